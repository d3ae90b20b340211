"""Summaries of a job's status files: rates, remaining time, costs, dead actors."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raymoe.data.observer import recent_rate
from raymoe.data.status import (
    ENDED,
    FAILED,
    GENERATE,
    LOADING,
    RUNNING,
    ActorStatus,
    JobStatus,
    StatusFiles,
    StepRecord,
)
from raymoe.units import format_seconds

LOST_S = 30.0  # writers update every 5 s
LOST, UNKNOWN = "lost", "unknown"
SECONDS_PER_HOUR = 3600
MILLION = 1e6
MAX_NODES_IN_A_LINE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorView:
    """An actor as a reader sees it.

    Attributes:
        state: That of the status, or "lost" for an actor that has not written for long.
        age_s: Seconds since its last write.
    """

    status: ActorStatus
    state: str
    age_s: float

    @property
    def is_alive(self) -> bool:
        return self.state in {LOADING, RUNNING}

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second in the last minute, by the task's measure; 0 for a dead actor."""
        rate = recent_rate(self.status.history, "num_tokens")
        return rate if rate is not None and self.is_alive else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    name: str
    actors: tuple[ActorView, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(actor.tokens_per_s for actor in self.actors)

    @property
    def num_rows(self) -> int:
        return sum(actor.status.rows.num_rows for actor in self.actors)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as a reader sees it at `now_s`, in Unix time."""

    now_s: float
    job: JobStatus | None
    actors: tuple[ActorView, ...]
    steps: tuple[StepRecord, ...]
    unreadable: tuple[str, ...]

    @classmethod
    def of(cls, files: StatusFiles, now_s: float) -> "JobView":
        job = files.job
        is_over = job is not None and not job.is_running
        actors = tuple(
            _view(status, written_s, now_s, is_over=is_over)
            for status, written_s in zip(files.actors, files.written_unix_s, strict=True)
        )
        return cls(
            now_s=now_s,
            job=job,
            actors=actors,
            steps=files.steps,
            unreadable=files.unreadable,
        )

    @property
    def state(self) -> str:
        """State of the job; without a driver, that of its actors."""
        if self.job is not None:
            is_late = self.job.is_running and self.now_s - self.job.updated_unix_s > LOST_S
            return LOST if is_late else self.job.state
        states = {actor.state for actor in self.actors}
        for state in (RUNNING, LOADING, LOST, FAILED):
            if state in states:
                return state
        return states.pop() if states else UNKNOWN

    @property
    def is_alive(self) -> bool:
        return self.state in {LOADING, RUNNING}

    @property
    def model(self) -> str | None:
        if self.job is not None:
            return self.job.model
        return self.actors[0].status.model if self.actors else None

    @property
    def task(self) -> str:
        if self.job is not None:
            return self.job.task
        return self.actors[0].status.task if self.actors else GENERATE

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        names = sorted({actor.status.node for actor in self.actors})
        return tuple(
            NodeView(
                name=name,
                actors=tuple(actor for actor in self.actors if actor.status.node == name),
            )
            for name in names
        )

    @property
    def num_rows(self) -> int:
        """Rows of this run that are in the output; without a driver, rows answered."""
        return self.job.num_rows if self.job is not None else self._sum("num_rows")

    @property
    def num_error_rows(self) -> int:
        return self.job.num_error_rows if self.job is not None else self._sum("num_error_rows")

    @property
    def num_input_tokens(self) -> int:
        return self.job.num_input_tokens if self.job is not None else self._sum("num_input_tokens")

    @property
    def num_generated_tokens(self) -> int:
        if self.job is not None:
            return self.job.num_generated_tokens
        return self._sum("num_generated_tokens")

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens that the engines computed, recomputation included."""
        return self._sum_of_engines("num_prompt_tokens")

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that rows found in the KV cache."""
        return self._sum_of_engines("num_cached_tokens")

    @property
    def cached_share(self) -> float:
        """Prompt tokens found over those found or computed, 0..1."""
        found = self.num_cached_tokens
        return found / max(1, found + self.num_computed_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that the task is measured by: generated ones, or those read."""
        return self.num_generated_tokens if self.task == GENERATE else self.num_input_tokens

    @property
    def errors(self) -> tuple[tuple[str, int], ...]:
        """Error rows of each kind, most frequent first; without a driver, those of actors."""
        if self.job is not None:
            return self.job.errors
        counts: dict[str, int] = {}
        for actor in self.actors:
            for kind, count in actor.status.rows.errors:
                counts[kind] = counts.get(kind, 0) + count
        return tuple(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to now, or to the last write of an ended job."""
        if self.job is not None:
            since_s = self.now_s - self.job.updated_unix_s if self.is_alive else 0.0
            return self.job.elapsed_s + max(0.0, since_s)
        if not self.actors:
            return 0.0
        last_s = max(actor.status.updated_unix_s for actor in self.actors)
        end_s = self.now_s if self.is_alive else last_s
        return max(0.0, end_s - min(actor.status.started_unix_s for actor in self.actors))

    @property
    def tokens_per_s(self) -> float:
        """`num_tokens` per second: in the last minute, or over the whole run once it ended."""
        if self.is_alive:
            return sum(actor.tokens_per_s for actor in self.actors)
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the mean rate of finished rows; None if unknown."""
        if self.job is None or not self.is_alive or not self.num_rows:
            return None
        return (self.job.total_rows - self.num_rows) * self.elapsed_s / self.num_rows

    @property
    def cost(self) -> float | None:
        """Cost of all machines so far; None without a price."""
        if self.job is None or self.job.price_per_hour is None:
            return None
        num_nodes = max(1, len(self.nodes))
        return self.job.price_per_hour * num_nodes * self.elapsed_s / SECONDS_PER_HOUR

    @property
    def cost_per_million_tokens(self) -> float | None:
        name = "num_generated_tokens" if self.task == GENERATE else "num_prompt_tokens"
        tokens = max(self._sum_of_engines(name), self.num_tokens)
        return self.cost / tokens * MILLION if self.cost is not None and tokens else None

    def as_plain(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "name": None if self.job is None else self.job.name,
            "model": self.model,
            "task": self.task,
            "num_rows": self.num_rows,
            "total_rows": None if self.job is None else self.job.total_rows,
            "num_written_before": None if self.job is None else self.job.num_written_before,
            "num_error_rows": self.num_error_rows,
            "errors": dict(self.errors),
            "num_input_tokens": self.num_input_tokens,
            "num_computed_prompt_tokens": self.num_computed_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "tokens_per_s": self.tokens_per_s,
            "elapsed_s": self.elapsed_s,
            "left_s": self.left_s,
            "price_per_hour": None if self.job is None else self.job.price_per_hour,
            "cost": self.cost,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "nodes": [
                {"node": node.name, "tokens_per_s": node.tokens_per_s, "num_rows": node.num_rows}
                for node in self.nodes
            ],
            "actors": [_plain_actor(actor) for actor in self.actors],
            "unreadable": list(self.unreadable),
        }

    def _sum_of_engines(self, field: str) -> int:
        engines = [actor.status.engine for actor in self.actors]
        return sum(getattr(engine, field) for engine in engines if engine is not None)

    def _sum(self, field: str) -> int:
        return sum(getattr(actor.status.rows, field) for actor in self.actors)


def node_rates(nodes: Iterable[NodeView]) -> str:
    """Format the rate of each machine in one line; of many, the slowest ones."""
    alive = [node for node in nodes if any(actor.is_alive for actor in node.actors)]
    shown = sorted(alive, key=lambda node: node.tokens_per_s)[:MAX_NODES_IN_A_LINE]
    shown.sort(key=lambda node: node.name)
    texts = [f"{node.name} {node.tokens_per_s:,.0f} tokens/s" for node in shown]
    num_more = len(alive) - len(shown)
    if num_more:
        rate = sum(node.tokens_per_s for node in alive if node not in shown)
        texts.append(f"{num_more} faster nodes {rate:,.0f} tokens/s")
    return ", ".join(texts)


def _view(status: ActorStatus, written_s: float, now_s: float, *, is_over: bool) -> ActorView:
    age_s = max(0.0, now_s - max(status.updated_unix_s, written_s))
    state = status.state
    if state in {LOADING, RUNNING}:
        if is_over:
            state = ENDED  # with the job
        elif age_s > LOST_S:
            state = LOST
    return ActorView(status=status, state=state, age_s=age_s)


def _plain_actor(actor: ActorView) -> dict[str, Any]:
    status, engine = actor.status, actor.status.engine
    return {
        "actor": status.actor,
        "node": status.node,
        "pid": status.pid,
        "state": actor.state,
        "reason": status.reason,
        "age_s": actor.age_s,
        "tokens_per_s": actor.tokens_per_s,
        "num_rows": status.rows.num_rows,
        "num_error_rows": status.rows.num_error_rows,
        "num_found_rows": status.rows.num_found_rows,
        "pool_fill": None if engine is None else engine.pool_fill,
        "kv_use": None if engine is None else engine.kv_use,
        "num_preemptions": None if engine is None else engine.num_preemptions,
        "measured_over_predicted": measured_over_predicted(actor),
    }


def measured_over_predicted(actor: ActorView) -> float | None:
    """Ratio of measured to predicted time of steps; None if nothing was predicted."""
    engine = actor.status.engine
    return engine.busy_s / engine.predicted_s if engine and engine.predicted_s else None


def ago(seconds: float) -> str:
    return f"{format_seconds(max(1.0, seconds))} ago"
