"""What is there to say of one actor right now? One thread asks, once a second."""

import os
import platform
import re
import time
import uuid
from typing import TYPE_CHECKING

from raymoe.data.status.history import History
from raymoe.data.status.record import (
    LOADING,
    RUNNING,
    ActorStatus,
    PassRecord,
    PlanSummary,
)
from raymoe.data.status.row_counter import RowCounter
from raymoe.data.status.typical_pass import TypicalPass, record_pass
from raymoe.plan.plan import RESOURCE_NAMES, Plan

if TYPE_CHECKING:
    from raymoe.engine.engine import Engine
    from raymoe.engine.statistics import EngineStats


class ActorProbe:
    """Reads the sums that an engine and its operator keep anyway.

    Attributes:
        actor: A name of this process's own, which any file system takes.
        state: See `ActorStatus`; the operator sets it.
        reason: The same.
    """

    def __init__(self, model: str, rows: RowCounter) -> None:
        """Begin.

        Args:
            model: Name for people.
            rows: What the operator counts.
        """
        self._model, self._rows = model, rows
        self._node, self._pid = platform.node() or "node", os.getpid()
        node = re.sub(r"[^\w.-]", "_", self._node, flags=re.ASCII)[:100]
        self.actor = f"{node}-{self._pid}-{uuid.uuid4().hex[:6]}"
        self.state, self.reason = LOADING, ""
        self._started_s = time.time()
        self._engine: Engine | None = None
        self._stats: EngineStats | None = None
        self._plan: PlanSummary | None = None
        self._history, self._passes = History(), TypicalPass()

    def attach(self, engine: "Engine") -> None:
        """Say that the engine is loaded."""
        self._engine = engine
        self.state = RUNNING

    def sample(self) -> None:
        """Look at the engine."""
        engine, rows = self._engine, self._rows.counts()
        if engine is None:
            return
        if self._plan is None and engine.plan is not None:
            self._plan = summarise(engine.plan)
        if engine.accuracy is not None:
            self._passes.see(engine.accuracy.last_pass)
        self._stats = stats = engine.stats()
        self._history.add(
            (
                time.time(),
                float(rows.num_rows),
                float(stats.num_prompt_tokens),
                float(stats.num_generated_tokens),
                stats.pool_fill,
                stats.kv_use,
            )
        )

    def status(self) -> ActorStatus:
        """What was seen."""
        return ActorStatus(
            actor=self.actor,
            node=self._node,
            pid=self._pid,
            model=self._model,
            state=self.state,
            reason=self.reason,
            started_unix_s=self._started_s,
            updated_unix_s=time.time(),
            rows=self._rows.counts(),
            engine=self._stats,
            plan=self._plan,
            history=self._history.points,
        )

    def typical_pass(self) -> PassRecord | None:
        """A pass that shows how it goes, beside its prediction; takes a simulation."""
        chosen, engine = self._passes.choose(), self._engine
        if chosen is None or engine is None or engine.plan is None:
            return None
        return record_pass(self.actor, self._model, engine.plan, chosen)


def summarise(plan: Plan) -> PlanSummary:
    """The plan for those who have no engine."""
    return PlanSummary(
        schedule=plan.schedule,
        tokens_per_s=plan.tokens_per_s,
        bound=RESOURCE_NAMES[plan.bound],
        description=plan.describe(),
    )
