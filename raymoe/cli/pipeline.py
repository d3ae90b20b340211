"""The main job: rows through the operator into files, counted on the way."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from raymoe.cli.job_watch import JobWatch
from raymoe.cli.jsonl import INPUT_ERROR_COLUMN
from raymoe.cli.lease import Lease
from raymoe.cli.lines import Stale, TableLines, WrittenRow
from raymoe.cli.local_ray import has_cluster, running_ray, this_machine
from raymoe.cli.progress import Progress, Tally
from raymoe.cli.sinks import Sink
from raymoe.cli.sources import Source, without_written
from raymoe.cli.storage import Location
from raymoe.config import EngineConfig
from raymoe.data.arrange import arrange
from raymoe.data.generator import MoEGenerator
from raymoe.data.manifest import Manifest
from raymoe.data.openai_batch import request_digest
from raymoe.data.sizing import map_batches_kwargs, plan_actor
from raymoe.data.status.files import make_status_directory
from raymoe.data.status.record import Pairs
from raymoe.engine.identity import ModelIdentity
from raymoe.errors import ConfigError, ExecutionError, RaymoeError
from raymoe.memory.source import find_model
from raymoe.memory.weights import WeightStore
from raymoe.safe_text import harmless
from raymoe.specs.model import ModelSpec
from raymoe.units import format_seconds

FLUSH_EVERY_S = 60.0
MAX_REASONS = 3
# Rows with these may succeed in another run, see `raymoe.errors`.
TEMPORARY_ERRORS = ("WorkerProcessError:", "CapacityError:")
LINE_ERROR = "ValueError: "
PROMPT_COLUMNS = ("prompt_column", "messages_column", "tools_column")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to generate and how.

    Attributes:
        model: A local model directory, or a name on the hub.
        options: Of `MoEGenerator`.
        lease: The right to write the output; None where nobody else can want to.
        written: What a former run finished.
        journal_dir: Where actors keep finished rows and look for those of a former run.
        status_dir: Where actors and driver write how they do; None writes nothing.
        price_per_hour: Of a node.
        settings: Names and values, for people.
        is_arranged: Rows that share a prefix come together; their order is lost.
    """

    model: str
    source: Source
    sink: Sink
    options: dict[str, Any]
    engine_config: EngineConfig
    id_column: str | None = None
    lease: Lease | None = None
    written: "Written | None" = None
    journal_dir: Path | None = None
    status_dir: Path | None = None
    price_per_hour: float | None = None
    settings: Pairs = ()
    num_actors: int = 1
    batch_size: int = 32
    rows_in_flight: int | None = None
    preserve_order: bool = False
    is_arranged: bool = False
    verbose: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that are left to do."""
        return self.source.num_rows - (0 if self.written is None else self.written.num_rows)

    def check_lease(self) -> None:
        """Make sure that the output is still this run's; see `Lease.check`."""
        if self.lease is not None:
            self.lease.check()


@dataclass(frozen=True, kw_only=True)
class Written:
    """Rows of the input that are already in the output.

    Attributes:
        ids: Of those that have one, and whose answer is still that of the input.
        changed: Ids of those that have been edited since.
        failed: Ids of those that ended by something outside of them.
        errors: What was said of lines so broken that they have no id.
        stale: Rows of the output that have to go: all that are to be generated again, and those of
            broken lines that are not there any more.
    """

    ids: pa.Array
    changed: pa.Array
    failed: pa.Array
    errors: pa.Array
    stale: Stale

    @property
    def num_rows(self) -> int:
        """Rows that need not be done again."""
        return len(self.ids) + len(self.errors)


def find_written(source: Source, sink: Sink, columns: Sequence[str], id_column: str) -> Written:
    """Read the output of a former run, and find the rows of the input that have changed since.

    Args:
        source: The input.
        sink: The output.
        columns: What the answer of a row depends on.
        id_column: Of both.

    Raises:
        ConfigError: Its ids are of another type than those of the input.
    """
    digests: dict[Any, str] = {}
    errors: set[str] = set()
    failed, changed, broken = [], [], set()
    for row in sink.read_written(id_column):
        if row.id is None:
            errors.add(row.error)
        else:
            digests[row.id] = row.digest
            if row.error.startswith(TEMPORARY_ERRORS):
                failed.append(row.id)
    for now in _input_rows(source, columns, id_column):
        if now.id is None:
            broken.add(now.error)
        elif digests.get(now.id, now.digest) != now.digest:
            changed.append(now.id)
    try:
        known = pa.array(list(digests), source.ids.type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ConfigError(
            f"the ids in {sink.location} are not of the input's type {source.ids.type}: {error}"
        ) from error
    again = [pa.array(ids, source.ids.type) for ids in (changed, failed)]
    is_right = pc.and_not(
        pc.is_in(source.ids, value_set=known),
        pc.is_in(source.ids, value_set=pa.concat_arrays(again)),
    )
    return Written(
        ids=source.ids.filter(is_right),
        changed=again[0],
        failed=again[1],
        errors=pa.array([e.removeprefix(LINE_ERROR) for e in errors & broken], pa.string()),
        stale=Stale(frozenset([*changed, *failed]), frozenset(errors - broken)),
    )


def _input_rows(source: Source, columns: Sequence[str], id_column: str) -> Iterator[WrittenRow]:
    """Yield the rows of the input as they would be written; the errors are of broken lines."""
    lines = TableLines(source.json_columns, content_columns=tuple(columns))
    for table in source.tables([id_column, *columns, INPUT_ERROR_COLUMN]):
        for record in lines.of(table):
            digest = request_digest(record) if source.is_batch else lines.digest(record)
            error = f"{LINE_ERROR}{record.get(INPUT_ERROR_COLUMN)}"
            yield WrittenRow(record[id_column], error, digest)


def run_job(job: Job, console: Console) -> Tally:
    """Run a job to its end; what was finished stays on disk if it fails.

    Raises:
        ExecutionError: The run failed; the message has the innermost reason.
    """
    tally = Tally(total_rows=job.num_rows)
    with _watched(job, tally) as watch:
        if job.num_rows:
            _run(job, tally, watch, console)
        job.check_lease()
        job.sink.close()
        tally.finished_s = tally.finished_s or time.monotonic()
    return tally


def _watched(job: Job, tally: Tally) -> AbstractContextManager[JobWatch | None]:
    if job.status_dir is None:
        return nullcontext()
    return JobWatch(
        make_status_directory(job.status_dir),
        tally,
        model=job.model,
        settings=job.settings,
        num_written_before=0 if job.written is None else job.written.num_rows,
        price_per_hour=job.price_per_hour,
    )


def _run(job: Job, tally: Tally, watch: JobWatch | None, console: Console) -> None:
    def more() -> Iterator[str]:
        if watch is not None and watch.cost_per_million_tokens is not None:
            yield f"{watch.cost_per_million_tokens:.3g} per million tokens"
        if watch is not None and watch.node_rates:
            yield f"now {harmless(watch.node_rates)}"

    with running_ray(preserve_order=job.preserve_order, verbose=job.verbose):
        try:
            tally.started_s = time.monotonic()
            with Progress(tally, console, more=more):
                _drain(job, tally)
            tally.finished_s = time.monotonic()
            if watch is not None:
                watch.wait_for_actors()
        except KeyboardInterrupt:
            job.check_lease()
            job.sink.flush()
            raise
        except RaymoeError:
            raise
        except Exception as error:
            job.check_lease()
            job.sink.flush()
            kept = f"{tally.num_rows:,} of {tally.total_rows:,} rows were written"
            raise ExecutionError(f"the run failed: {innermost_reason(error)} ({kept})") from error


def check_model(job: Job) -> None:
    """Refuse a local model that an engine would refuse, before Ray starts.

    Raises:
        CheckpointError: Files are missing, damaged or unsafe.
        UnsupportedModelError: The model's mathematics is not implemented.
        InfeasiblePlanError: This machine has too little memory; not checked for a cluster.
    """
    directory = Path(job.model)
    if not directory.exists():
        return
    spec = ModelSpec.from_directory(directory)
    WeightStore.open(spec, directory)
    if not has_cluster():
        plan_actor(directory, job.engine_config, this_machine().share(job.num_actors))


def find_manifest(job: Job) -> Manifest | None:
    """Return what the job's tokens depend on.

    None where its model is not on this machine, or its weights are still to be read, which the
    actors do while they load them; then the manifest of the journal counts. Without a journal this
    waits.
    """
    directory = find_model(job.model)
    if directory is None:
        return None
    identity = ModelIdentity.of(directory, reads_weights=job.journal_dir is None)
    if job.journal_dir is None:
        _ = identity.weights
    params = job.options["sampling_params"]
    return Manifest.of(identity, params, job.engine_config) if identity.has_weights else None


def _drain(job: Job, tally: Tally) -> None:
    last_flush_s = time.monotonic()
    for table in _tables(job):
        tally.add(table)
        job.check_lease()
        job.sink.write(table)
        if time.monotonic() - last_flush_s > FLUSH_EVERY_S:
            job.sink.flush()
            last_flush_s = time.monotonic()


def _tables(job: Job) -> Iterator[pa.Table]:
    """Yield the finished blocks."""
    dataset = job.source.dataset()
    if job.id_column is not None and job.written is not None and job.written.num_rows:
        written = job.written
        dataset = without_written(dataset, job.id_column, written.ids, written.errors)
    arguments = map_batches_kwargs(
        job.model,
        num_actors=job.num_actors,
        batch_size=job.batch_size,
        rows_in_flight=job.rows_in_flight,
        engine_config=job.engine_config,
        journal_dir=job.journal_dir,
        status_dir=job.status_dir,
        id_column=job.id_column,
        error_column=job.source.error_column,
        **job.options,
    )
    if job.is_arranged:
        columns = {name: job.options[name] for name in PROMPT_COLUMNS}
        dataset = arrange(dataset, **columns, rows_per_block=job.batch_size)
    else:
        dataset = dataset.repartition(target_num_rows_per_block=job.batch_size, strict=True)
    dataset = dataset.map_batches(MoEGenerator, **arguments)
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        hidden = [name for name in (job.source.error_column,) if name in table.column_names]
        yield table.drop_columns(hidden)


def innermost_reason(error: BaseException) -> str:
    """Return the last line of the first cause: Ray wraps an error in tracebacks as text."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        if lines:  # Ray Data's own SystemException has no text
            return lines[-1]
    return type(error).__name__


def print_summary(tally: Tally, output: Location, console: Console) -> None:
    """Print rows, the most frequent errors, tokens, speed, and where the output is."""
    errors = f", {tally.num_errors:,} error rows" if tally.num_errors else ""
    console.print(f"{tally.num_rows:,} rows in {format_seconds(tally.elapsed_s)}{errors}")
    for reason, count in tally.reasons.most_common(MAX_REASONS):
        console.print(f"  {count:,} x {harmless(reason)}")
    console.print(
        f"{tally.num_input_tokens:,} tokens in, {tally.num_generated_tokens:,} tokens out, "
        f"{tally.tokens_per_s:,.0f} tokens/s out (loading included)"
    )
    console.print(f"output: {harmless(str(output))}")
