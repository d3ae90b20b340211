"""Summaries of a job's status files over all its runs: totals, rates, time left and cost."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymoe.data.error_groups import ErrorGroup, ErrorGroups
from raymoe.data.observer import error_kind, recent_rate
from raymoe.data.status import (
    ENDED,
    FAILED,
    GENERATE,
    LOADING,
    RUNNING,
    STOPPED,
    ActorStatus,
    FormerRuns,
    JobStatus,
    StatusFiles,
    StepRecord,
    read_status,
)
from raymoe.units import format_seconds

LOST_S = 30.0  # writers update every 2 s
LOST, UNKNOWN = "lost", "unknown"
HOW_TO_RESUME = "The same command with --resume goes on from here."
UNKNOWN_RUNS = FormerRuns(elapsed_s=None, node_s=None)
SECONDS_PER_HOUR = 3600
MILLION = 1e6
MAX_NODES_IN_A_LINE = 6
NOTHING = "-"  # a cell whose number is not known


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

    @property
    def num_finished_rows(self) -> int:
        """Rows with an answer; of a live actor also those of batches that are not complete."""
        rows, engine = self.status.rows, self.status.engine
        if engine is None or not self.is_alive:
            return rows.num_rows
        known = rows.num_found_rows + rows.num_refused_rows
        return max(rows.num_rows, known + engine.num_finished_rows)


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
    """A job as a reader sees it at `now_s`, in Unix time: all its runs, the latest as it is now."""

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
    def is_loading(self) -> bool:
        """Whether all that live are still loading weights."""
        alive = [actor for actor in self.actors if actor.is_alive]
        return bool(alive) and all(actor.state == LOADING for actor in alive)

    @property
    def can_resume(self) -> bool:
        """Whether another run can finish the job."""
        return self.job is not None and self.state in {STOPPED, FAILED, LOST}

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
    def former(self) -> FormerRuns:
        """What former runs did; nothing without a driver, which alone knows."""
        return FormerRuns() if self.job is None else self.job.former

    @property
    def total_rows(self) -> int | None:
        """Rows of the whole job; None without a driver."""
        return None if self.job is None else self.former.num_rows + self.job.total_rows

    @property
    def num_rows(self) -> int:
        """Rows that are in the output; without a driver, rows answered."""
        return self._total("num_rows")

    @property
    def num_finished_rows(self) -> int:
        """Rows with an answer, those that are not in the output yet included."""
        if self.total_rows is None:
            return sum(actor.num_finished_rows for actor in self.actors)
        now = sum(actor.num_finished_rows for actor in self.actors) if self.is_alive else 0
        return max(self.num_rows, min(self.total_rows, self.former.num_rows + now))

    @property
    def num_error_rows(self) -> int:
        return self._total("num_error_rows")

    @property
    def num_input_tokens(self) -> int:
        return self._total("num_input_tokens")

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples of all rows."""
        return self._total("num_generated_tokens")

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens that the engines computed, recomputation included."""
        return self.former.num_computed_prompt_tokens + self._sum_of_engines("num_prompt_tokens")

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that rows found in the KV cache."""
        return self.former.num_cached_tokens + self._sum_of_engines("num_cached_tokens")

    @property
    def cached_share(self) -> float:
        """Prompt tokens found over those found or computed, 0..1."""
        found = self.num_cached_tokens
        return found / max(1, found + self.num_computed_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that the task is measured by: generated ones, or those read."""
        return self._total(self._tokens_field)

    @property
    def error_groups(self) -> tuple[ErrorGroup, ...]:
        """What error rows say, most frequent first; without a driver, those of actors."""
        if self.job is not None:
            parts = [self.former.error_groups, self.job.error_groups]
        else:
            parts = [actor.status.rows.error_groups for actor in self.actors]
        return ErrorGroups(group for part in parts for group in part).groups()

    @property
    def errors(self) -> dict[str, int]:
        """Error rows of each kind."""
        counts: dict[str, int] = {}
        for group in self.error_groups:
            kind = error_kind(group.template, counts)
            counts[kind] = counts.get(kind, 0) + group.num_rows
        return counts

    @property
    def elapsed_s(self) -> float:
        """Seconds of all runs that are known, to now, or to the last write of an ended job."""
        return (self.former.elapsed_s or 0.0) + self.run_s

    @property
    def run_s(self) -> float:
        """Seconds of the latest run."""
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
        """`num_tokens` per second: in the last minute, or over all runs once the job ended.

        Over the latest run alone where the time of a former one is not known.
        """
        if self.is_alive:
            return sum(actor.tokens_per_s for actor in self.actors)
        tokens = self.num_tokens - self._num_tokens_of_unknown_time
        return tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at most, by finished rows and by generated tokens; None if unknown."""
        if self.total_rows is None or not self.is_alive:
            return None
        known = (self._left_by_rows_s(self.total_rows), self._left_by_tokens_s())
        return min((seconds for seconds in known if seconds is not None), default=None)

    def _left_by_rows_s(self, total_rows: int) -> float | None:
        """At the rate since the first model was loaded; the first rows to finish come late."""
        num_done = self.num_finished_rows - self.former.num_rows
        if num_done <= 0:
            return None
        begins = [actor.status.history[0][0] for actor in self.actors if actor.status.history]
        generating_s = max(0.0, self.now_s - min(begins)) if begins else self.run_s
        seconds = min(self.run_s, generating_s)
        return (total_rows - self.num_finished_rows) * seconds / num_done

    def _left_by_tokens_s(self) -> float | None:
        """At the latest rate, if each row generates as many tokens as it may."""
        plans = [actor.status.plan for actor in self.actors if actor.is_alive]
        tokens = sum(plan.generated_tokens for plan in plans if plan is not None)
        is_known = self.task == GENERATE and None not in plans and self.tokens_per_s > 0
        if not (is_known and tokens):
            return None
        engines = [actor.status.engine for actor in self.actors if actor.is_alive]
        done = sum(one.num_generated_tokens for one in engines if one is not None)
        return max(0, tokens - done) / self.tokens_per_s

    @property
    def currency(self) -> str:
        return "" if self.job is None else self.job.currency

    @property
    def cost(self) -> float | None:
        """Cost of all runs that are known, in `currency`, at the latest price; None without."""
        if self.job is None or self.job.price_per_hour is None:
            return None
        return self.job.price_per_hour * self.node_s / SECONDS_PER_HOUR

    @property
    def node_s(self) -> float:
        """Seconds of all nodes in all runs that are known."""
        return (self.former.node_s or 0.0) + max(1, len(self.nodes)) * self.run_s

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Cost over the tokens of the same runs, those of unfinished rows included."""
        name = "num_generated_tokens" if self.task == GENERATE else "num_prompt_tokens"
        now = self._sum_of_engines(name) if self.is_alive else 0
        tokens = max(int(getattr(self.former, self._tokens_field)) + now, self.num_tokens)
        tokens -= self._num_tokens_of_unknown_time
        return self.cost / tokens * MILLION if self.cost is not None and tokens else None

    def as_plain(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "reason": "" if self.job is None else self.job.reason,
            "name": None if self.job is None else self.job.name,
            "model": self.model,
            "task": self.task,
            "num_runs": self.former.num_runs + 1,
            "num_rows": self.num_rows,
            "num_finished_rows": self.num_finished_rows,
            "total_rows": self.total_rows,
            "num_error_rows": self.num_error_rows,
            "errors": self.errors,
            "error_groups": [
                {"num_rows": one.num_rows, "error": one.text()} for one in self.error_groups
            ],
            "num_input_tokens": self.num_input_tokens,
            "num_computed_prompt_tokens": self.num_computed_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "tokens_per_s": self.tokens_per_s,
            "elapsed_s": self.elapsed_s,
            "left_s": self.left_s,
            "price_per_hour": None if self.job is None else self.job.price_per_hour,
            "currency": self.currency,
            "cost": self.cost,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "nodes": [
                {"node": node.name, "tokens_per_s": node.tokens_per_s, "num_rows": node.num_rows}
                for node in self.nodes
            ],
            "actors": [_plain_actor(actor) for actor in self.actors],
            "unreadable": list(self.unreadable),
        }

    @property
    def _tokens_field(self) -> str:
        return "num_generated_tokens" if self.task == GENERATE else "num_input_tokens"

    @property
    def _num_tokens_of_unknown_time(self) -> int:
        is_known = self.former.elapsed_s is not None
        return 0 if is_known else int(getattr(self.former, self._tokens_field))

    def _sum_of_engines(self, field: str) -> int:
        engines = [actor.status.engine for actor in self.actors]
        return sum(getattr(engine, field) for engine in engines if engine is not None)

    def _total(self, field: str) -> int:
        """A count of the driver over all runs; without a driver, the sum of the actors'."""
        if self.job is not None:
            return int(getattr(self.job, field) + getattr(self.former, field))
        return sum(getattr(actor.status.rows, field) for actor in self.actors)


def former_runs(directory: Path) -> FormerRuns:
    """Return what the runs so far took, by their status files; the output knows their rows."""
    files = read_status(directory)
    if files.job is None:
        return UNKNOWN_RUNS
    view = JobView.of(files, files.job.updated_unix_s)
    is_known = view.former.elapsed_s is not None
    return FormerRuns(
        num_runs=view.former.num_runs + 1,
        num_computed_prompt_tokens=view.num_computed_prompt_tokens,
        num_cached_tokens=view.num_cached_tokens,
        elapsed_s=view.elapsed_s if is_known else None,
        node_s=view.node_s if is_known else None,
    )


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
