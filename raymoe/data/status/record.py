"""What the files of a job's status hold: plain data, read back strictly (`specs.plain_data`)."""

from dataclasses import dataclass

from raymoe.engine.statistics import EngineStats
from raymoe.errors import ConfigError
from raymoe.plan.papers.hrm import Operation
from raymoe.plan.work import PassLoad
from raymoe.schedule.graph import Op, Resource
from raymoe.specs.hardware import HardwareSpec

FORMAT = 1  # of all files of a status; a change of any of them raises it

LOADING, RUNNING, ENDED, FAILED = "loading", "running", "ended", "failed"

_OPS, _RESOURCES = frozenset(Op), frozenset(Resource)

Pairs = tuple[tuple[str, str], ...]
PlainSpan = tuple[str, int, int, str, float, float]
"""Operation, layer, part, resource, start and end in seconds."""
PlainOperation = tuple[str, float, float, float]
"""Name, operations, bytes of device memory, bytes of host memory: `hrm.Operation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows that an operator answered.

    Attributes:
        num_rows: All, error rows included.
        num_error_rows: Of them, those without a text.
        num_found_rows: Of them, those that a journal had.
        num_input_tokens: Of their prompts.
        num_generated_tokens: Of their samples.
        errors: How many of each kind, most frequent first.
        messages: What the first error rows said, each once, cut; rows had a say in it.
    """

    num_rows: int = 0
    num_error_rows: int = 0
    num_found_rows: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    errors: tuple[tuple[str, int], ...] = ()
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What an actor planned.

    Attributes:
        schedule: Its name.
        tokens_per_s: Predicted generated tokens per second of the job that was planned for.
        bound: What limits decoding.
        description: All of it, for people.
    """

    schedule: str
    tokens_per_s: float
    bound: str
    description: str


HISTORY_COLUMNS = (
    "unix_s",
    "num_rows",
    "num_prompt_tokens",
    "num_generated_tokens",
    "pool_fill",
    "kv_use",
)
HistoryPoint = tuple[float, float, float, float, float, float]
"""A moment: `HISTORY_COLUMNS`. Counts are sums since the start, fills are means since the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatus:
    """One actor, at one moment.

    Attributes:
        actor: Its own name, of no other process.
        node: Name of its machine.
        pid: Of its process there.
        state: "loading", "running", "ended", "failed".
        reason: Why it failed.
        engine: None before the model is loaded.
        plan: None before, and for an engine without one.
    """

    format: int = FORMAT
    actor: str
    node: str
    pid: int
    model: str
    state: str
    reason: str = ""
    started_unix_s: float
    updated_unix_s: float
    rows: RowCounts
    engine: EngineStats | None = None
    plan: PlanSummary | None = None
    history: tuple[HistoryPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """A typical pass of an actor, and where its plan lies under the roofs of its node.

    Attributes:
        load: What the pass held.
        num_layers: Of the whole pass.
        num_shown_layers: Of them, those whose tasks are here.
        predicted_s: The whole pass.
        measured_s: The whole pass.
        predicted: Tasks of a few layers.
        measured: The same.
        hardware: The node, without curves.
        operations: Under its roofs; the first is the one that was planned for.
    """

    format: int = FORMAT
    actor: str
    model: str
    schedule: str
    load: PassLoad
    num_layers: int
    num_shown_layers: int
    predicted_s: float
    measured_s: float
    predicted: tuple[PlainSpan, ...]
    measured: tuple[PlainSpan, ...]
    hardware: HardwareSpec
    operations: tuple[PlainOperation, ...] = ()

    def __post_init__(self) -> None:
        for op, _, _, resource, start_s, end_s in (*self.predicted, *self.measured):
            if op not in _OPS or resource not in _RESOURCES or not start_s <= end_s:
                raise ConfigError(f"{op!r} on {resource!r}, {start_s} to {end_s} s, is no task")

    @property
    def placed(self) -> list[Operation]:
        """The operations."""
        return [
            Operation(name=name, flop=flop, near_bytes=near, far_bytes=far)
            for name, flop, near, far in self.operations
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The whole job, as its driver sees it: rows that are in the output.

    Attributes:
        state: "running", "ended", "failed".
        reason: Why it failed.
        elapsed_s: Since it began, at the moment of `updated_unix_s`; Ray's own start not counted.
        errors: Error rows of each kind, most frequent first.
        total_rows: Rows to do in this run.
        num_written_before: Rows that former runs had written.
        price_per_hour: Of a node; None where nobody said it.
        settings: Names and values, for people.
    """

    format: int = FORMAT
    name: str
    model: str
    state: str
    reason: str = ""
    started_unix_s: float
    updated_unix_s: float
    elapsed_s: float
    total_rows: int
    num_written_before: int = 0
    num_rows: int = 0
    num_error_rows: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    errors: tuple[tuple[str, int], ...] = ()
    price_per_hour: float | None = None
    settings: Pairs = ()

    @property
    def is_running(self) -> bool:
        """Whether the driver has not said that it is over."""
        return self.state == RUNNING
