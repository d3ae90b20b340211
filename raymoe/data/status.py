"""Status files of a job: records of its progress and speed that `raymoe status` reads."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from raymoe.data.error_groups import ErrorGroup
from raymoe.data.journal import make_directory, open_private
from raymoe.data.manifest import FILE_NAME as MANIFEST_FILE
from raymoe.engine.outputs import EngineStats
from raymoe.errors import CheckpointError, ConfigError
from raymoe.plan.work import Operation, StepLoad
from raymoe.schedule.graph import Op, Resource
from raymoe.specs.files import expanded, from_plain, open_regular, parse_json_object, to_json
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import CURRENCY, MIB, format_bytes

FORMAT = 2  # format version of all status files
WRITE_EVERY_S = 2.0
LAST_WRITE_S = 10.0  # for the last write: a slow disk must not delay the end of a process

LOADING, RUNNING = "loading", "running"
ENDED, FAILED = "ended", "failed"  # of an actor
FINISHED, STOPPED = "finished", "stopped"  # of a job, which may have FAILED, too
GENERATE = "generate"

_OPS, _RESOURCES = frozenset(Op), frozenset(Resource)

Pairs = tuple[tuple[str, str], ...]
PlainSpan = tuple[str, int, int, str, float, float]
"""Operation, layer, part, resource, start and end in seconds."""
PlainOperation = tuple[str, float, float, float]
"""Name, operations, bytes of device memory, bytes of host memory: `plan.work.Operation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows that an operator answered.

    Attributes:
        errors: Rows per kind of error, most frequent first.
        num_found_rows: Of a former run, by the journal.
        num_refused_rows: Error rows that did not reach the engine.
        error_groups: What the error rows say; untrusted text, with parts of cells.
    """

    num_rows: int = 0
    num_error_rows: int = 0
    num_found_rows: int = 0
    num_refused_rows: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    errors: tuple[tuple[str, int], ...] = ()
    error_groups: tuple[ErrorGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The plan of an actor, for readers without an engine.

    Attributes:
        tokens_per_s: Predicted generated tokens per second of the planned job.
        generated_tokens: Those of the planned job, if each row generates as many as it may.
        description: The whole plan as text.
    """

    schedule: str
    tokens_per_s: float
    generated_tokens: float = 0.0
    bound: str
    description: str


HISTORY_COLUMNS = (
    "unix_s",
    "num_rows",
    "num_prompt_tokens",
    "num_tokens",
    "pool_fill",
    "kv_use",
)
HistoryPoint = tuple[float, float, float, float, float, float]
"""One sample with `HISTORY_COLUMNS`: counts are sums since the start, fills are means since the
last sample. `num_tokens` are those that the task is measured by: generated, or read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatus:
    """The status of one actor at one moment.

    Attributes:
        actor: Unique name.
        engine: None before the model is loaded.
        plan: None before, and for an engine without one.
        task: What it does with rows; "generate" counts generated tokens, the others tokens read.
    """

    format: int = FORMAT
    actor: str
    node: str
    pid: int
    model: str
    task: str = GENERATE
    state: str
    reason: str = ""
    started_unix_s: float
    updated_unix_s: float
    rows: RowCounts
    engine: EngineStats | None = None
    plan: PlanSummary | None = None
    history: tuple[HistoryPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A typical step of an actor, and its roofline.

    Attributes:
        predicted: Tasks of a few layers.
        operations: Operations in the roofline; the first is that of the planned load.
    """

    format: int = FORMAT
    actor: str
    model: str
    schedule: str
    load: StepLoad
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
                raise ConfigError(
                    f"{op!r} on {resource!r}, {start_s} to {end_s} s, is no task of a step"
                )

    @property
    def placed(self) -> list[Operation]:
        return [
            Operation(name=name, flop=flop, near_bytes=near, far_bytes=far)
            for name, flop, near, far in self.operations
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerRuns:
    """What the runs of a job did before this one; counts rows that are still in the output.

    Attributes:
        elapsed_s: None where a run left no status.
        node_s: Seconds of all their nodes, each from start to end; None with `elapsed_s`.
        error_groups: As for `RowCounts`.
    """

    num_runs: int = 0
    num_rows: int = 0
    num_error_rows: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    elapsed_s: float | None = 0.0
    node_s: float | None = 0.0
    error_groups: tuple[ErrorGroup, ...] = ()


NO_RUNS = FormerRuns()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A run of a job as its driver sees it; counts rows that this run wrote to the output.

    Attributes:
        elapsed_s: Since the start of the run, at `updated_unix_s`; the start of Ray is excluded.
        error_groups: As for `RowCounts`.
        total_rows: Rows to do in this run.
        price_per_hour: Of a node, in `currency`.
        settings: Names and values for display.
        task: As for `ActorStatus`.
    """

    format: int = FORMAT
    name: str
    model: str
    task: str = GENERATE
    state: str
    reason: str = ""
    started_unix_s: float
    updated_unix_s: float
    elapsed_s: float
    total_rows: int
    num_rows: int = 0
    num_error_rows: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    error_groups: tuple[ErrorGroup, ...] = ()
    former: FormerRuns = NO_RUNS
    price_per_hour: float | None = None
    currency: str = CURRENCY
    settings: Pairs = ()

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING


def end_state(error: BaseException | None) -> tuple[str, str]:
    """Return the state that a job ends with, and the reason: of what ended it, None for its end.

    An interrupt, or an error that one caused, stops a job; its finished rows stay.
    """
    if error is None:
        return FINISHED, ""
    is_stop = any(isinstance(one, KeyboardInterrupt) for one in (error, error.__cause__))
    state = STOPPED if is_stop else FAILED
    return state, str(error) or ("interrupted" if is_stop else type(error).__name__)


def rate_unit(task: str) -> str:
    """Name the tokens that a task is measured by: generated ones, or those read."""
    return "tokens/s" if task == GENERATE else "tokens/s read"


SUFFIX = ".status"
JOB_FILE = "job.json"
ACTOR_PREFIX, STEP_PREFIX = "actor-", "step-"
JOURNAL_SUFFIX, REPORT_SUFFIX = ".journal", ".report.html"
PARTS_SUFFIX = ".partial"  # of the directory beside an output of JSON lines that is not complete
MANIFEST_SUFFIX = f".{MANIFEST_FILE}"
MAX_FILE_BYTES = 16 * MIB
OURS = re.compile(r"\.?(job|actor-[\w.-]+|step-[\w.-]+)\.json(\.tmp)?", re.ASCII)

Record = TypeVar("Record", ActorStatus, JobStatus, StepRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFiles:
    """The contents of a status directory; files are sorted by name.

    Attributes:
        job: None without a driver that writes one: Ray Data without `raymoe generate`.
        unreadable: Files that could not be read, with the reason.
        written_unix_s: Modification time of each actor's file.
    """

    job: JobStatus | None = None
    actors: tuple[ActorStatus, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    unreadable: tuple[str, ...] = ()
    written_unix_s: tuple[float, ...] = ()


def status_beside(path: str | Path) -> Path:
    """Return the status directory of a job with this output or journal."""
    path = Path(path)
    name = path.name.removesuffix(JOURNAL_SUFFIX) or path.name
    return path.with_name(name + SUFFIX)


def report_beside(status_dir: Path) -> Path:
    return status_dir.with_name(status_dir.name.removesuffix(SUFFIX) + REPORT_SUFFIX)


def manifests_beside(status_dir: Path) -> tuple[Path, ...]:
    """Return where the manifest of a job may be: next to its output, or in its journal."""
    name = status_dir.name.removesuffix(SUFFIX)
    beside, journal = status_dir.with_name(name + MANIFEST_SUFFIX), name + JOURNAL_SUFFIX
    return (beside, *(status_dir.with_name(one) / MANIFEST_FILE for one in (journal, name)))


def find_status(path: str | Path) -> Path:
    """Return the status directory of a job, given itself, the output or the journal."""
    path = expanded(path)
    if not path.name:
        raise ConfigError(f"{path} is no output of a job; give a path that ends in a name")
    if path.name.endswith(SUFFIX) and path.is_dir():
        return path
    beside = status_beside(path)
    if not beside.is_dir():
        raise ConfigError(
            f"{path}: no status of a job here or in {beside}; give the output, the journal_dir or "
            "the status_dir of a job that was started with one"
        )
    return beside


def make_status_directory(directory: str | Path) -> Path:
    return make_directory(directory, "status_dir")


def check_status(directory: Path) -> None:
    """Refuse a directory that holds foreign files."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise ConfigError(f"{directory} is not a directory; move it away")
    for path in sorted(directory.iterdir()) if directory.exists() else ():
        if not OURS.fullmatch(path.name):
            raise ConfigError(
                f"{directory} holds {path.name}, which raymoe did not write; move it away"
            )


def clear_status(directory: Path) -> None:
    """Remove what a former run wrote; refuse a directory that holds foreign files."""
    check_status(directory)
    for path in directory.iterdir() if directory.exists() else ():
        path.unlink(missing_ok=True)


def write_record(path: Path, record: ActorStatus | JobStatus | StepRecord) -> None:
    """Replace a file atomically; a reader finds the old or the new one, whole.

    It is not forced to disk, because a lost status costs nothing after a crash of the machine.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # one process writes one name
    temporary.unlink(missing_ok=True)
    with open(temporary, "x", encoding="utf-8", opener=open_private) as file:
        file.write(to_json(record))
    temporary.replace(path)


def read_status(directory: Path) -> StatusFiles:
    """Read all files; torn, foreign and vanished ones are listed as unreadable."""
    unreadable: list[str] = []

    def read(kind: type[Record], path: Path) -> tuple[Record, float] | None:
        try:
            return _read(kind, path)
        except FileNotFoundError:  # removed since it was listed
            return None
        except (OSError, CheckpointError, ConfigError) as error:
            unreadable.append(f"{path.name}: {error}")
            return None

    def read_all(kind: type[Record], prefix: str) -> list[tuple[Record, float]]:
        found = [read(kind, path) for path in sorted(directory.glob(f"{prefix}*.json"))]
        return [one for one in found if one is not None]

    job = read(JobStatus, directory / JOB_FILE)
    actors, steps = read_all(ActorStatus, ACTOR_PREFIX), read_all(StepRecord, STEP_PREFIX)
    return StatusFiles(
        job=None if job is None else job[0],
        actors=tuple(status for status, _ in actors),
        steps=tuple(record for record, _ in steps),
        unreadable=tuple(unreadable),
        written_unix_s=tuple(written_s for _, written_s in actors),
    )


def _read(kind: type[Record], path: Path) -> tuple[Record, float]:
    with os.fdopen(open_regular(path), "rb") as file:
        state = os.fstat(file.fileno())
        if state.st_size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{format_bytes(state.st_size)} is more than the {format_bytes(MAX_FILE_BYTES)} of "
                "a status"
            )
        plain = parse_json_object(file.read(), where="content")
    if plain.get("format") != FORMAT:
        raise ConfigError(
            f"its format is {plain.get('format')!r} and this raymoe reads {FORMAT}: another "
            "version wrote it"
        )
    record = from_plain(kind, plain, where="content")
    if not isinstance(record, StepRecord):
        _check_not_negative("content", plain)
    return record, state.st_mtime


def _check_not_negative(where: str, value: object) -> None:
    """Refuse a count or a time below 0, which readers divide by and draw."""
    if isinstance(value, int | float) and value < 0:
        raise ConfigError(f"{where} is {value!r}; it is 0 or more")
    items = value.items() if isinstance(value, dict) else ()
    for name, entry in enumerate(value) if isinstance(value, list) else items:
        _check_not_negative(f"{where}: {name}", entry)
