"""A job of `raymoe generate`: rows through the operator into files, with progress and status."""

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
import ray.data
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.live import Live
from rich.text import Text

from raymoe.cli.resume import Lease, Written
from raymoe.cli.sources import Source, without_written
from raymoe.cli.storage import Location
from raymoe.cli.writers import RunStats, Writer, write_part
from raymoe.config import EngineConfig
from raymoe.data.cluster import Cluster
from raymoe.data.generator import MoEGenerator
from raymoe.data.manifest import Manifest
from raymoe.data.observer import Periodic
from raymoe.data.rows import SAMPLING_COLUMN, TEMPLATE_COLUMN
from raymoe.data.sizing import configure_data_context, map_batches_kwargs, plan_actor
from raymoe.data.sorting import sort_by_prefix
from raymoe.data.status import (
    GENERATE,
    JOB_FILE,
    RUNNING,
    JobStatus,
    Pairs,
    end_state,
    make_status_directory,
    read_status,
    write_record,
)
from raymoe.data.tasks import read_task_of, reader_of
from raymoe.data.workload import SAMPLED_ROWS, workload_of
from raymoe.device.host import read_host
from raymoe.engine.identity import ModelIdentity
from raymoe.engine.runner_loading import configured_model
from raymoe.engine.tasks.rows import check_head
from raymoe.errors import ExecutionError, RaymoeError
from raymoe.memory.checkpoint import check_hub_is_known, fetch_config, find_model
from raymoe.memory.weights import WeightStore
from raymoe.safe_text import harmless
from raymoe.specs.files import check_adapter, read_config
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.status_view import JobView, node_rates
from raymoe.units import MIB, format_seconds

LOG_EVERY_S = 60.0
BAR_CELLS = 24


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: rows may hold what rich takes for markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Progress:
    """Shows a statistics while it grows; a context manager."""

    def __init__(
        self,
        run_stats: RunStats,
        console: Console,
        *,
        more: Callable[[], Iterable[str]] = tuple,
        log_every_s: float = LOG_EVERY_S,
    ) -> None:
        """Show.

        Args:
            more: Asked for what else there is to say, each time that the line is shown.
            log_every_s: Where there is no terminal.
        """
        self._run_stats, self._more = run_stats, more
        self._console = console
        self._log_every_s = log_every_s
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._draw, console=self._console, transient=True)
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._log, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def _draw(self) -> Text:
        run_stats = self._run_stats
        filled = round(BAR_CELLS * run_stats.num_rows / max(1, run_stats.total_rows))
        return Text(f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] {self._line()}")

    def _log(self) -> None:
        while not self._is_over.wait(self._log_every_s):
            self._console.print(self._line())

    def _line(self) -> str:
        return " | ".join((self._run_stats.line(), *self._more()))


WRITE_EVERY_S = 5.0
LAST_WRITE_S = 10.0
LAST_WORDS_S, LOOK_EVERY_S = 10.0, 0.05

logger = logging.getLogger(__name__)


class JobWatch:
    """Writes how a job does while it runs, and how it ended; a context manager.

    Attributes:
        node_rates: What each machine generates, as its actors said last.
        cost_per_million_tokens: So far; None without a price.
    """

    def __init__(
        self,
        directory: Path,
        run_stats: RunStats,
        *,
        model: str,
        settings: Pairs = (),
        num_written_before: int = 0,
        price_per_hour: float | None = None,
    ) -> None:
        """Watch a job.

        Args:
            settings: Names and values, for people.
            num_written_before: Rows that former runs had written.
        """
        self._directory, self._run_stats, self._model = directory, run_stats, model
        self._settings, self._num_written_before = settings, num_written_before
        self._price_per_hour = price_per_hour
        self._started_s = time.time()
        self._state, self._reason = RUNNING, ""
        self.node_rates = ""
        self.cost_per_million_tokens: float | None = None
        self._is_failing = False
        self._thread: Periodic | None = None

    def wait_for_actors(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Let actors say how they ended, before Ray ends their processes."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            actors = JobView.of(read_status(self._directory), time.time()).actors
            if not any(actor.is_alive for actor in actors):
                return
            time.sleep(LOOK_EVERY_S)

    def __enter__(self) -> "JobWatch":
        self._thread = Periodic(self._look, WRITE_EVERY_S, name="raymoe-job")
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._state, self._reason = end_state(error)
        if self._thread is not None:
            self._thread.close(LAST_WRITE_S)

    def _look(self) -> None:
        run_stats = self._run_stats
        status = JobStatus(
            name=self._directory.name.removesuffix(".status"),
            model=self._model,
            task=run_stats.task,
            state=self._state,
            reason=self._reason,
            started_unix_s=self._started_s,
            updated_unix_s=time.time(),
            elapsed_s=run_stats.elapsed_s,
            total_rows=run_stats.total_rows,
            num_written_before=self._num_written_before,
            num_rows=run_stats.num_rows,
            num_error_rows=run_stats.num_errors,
            num_input_tokens=run_stats.num_input_tokens,
            num_generated_tokens=run_stats.num_generated_tokens,
            errors=tuple(run_stats.kinds.most_common()),
            price_per_hour=self._price_per_hour,
            settings=self._settings,
        )
        try:
            write_record(self._directory / JOB_FILE, status)
        except OSError as error:
            if not self._is_failing:
                logger.warning("the status in %s cannot be written: %s", self._directory, error)
            self._is_failing = True
        view = JobView.of(read_status(self._directory), time.time())
        self.node_rates = node_rates(view.nodes)
        self.cost_per_million_tokens = view.cost_per_million_tokens


# A part has this much, or what came in this time; the parts of a young job are smaller.
ROWS_PER_PART, BYTES_PER_PART, BLOCKS_PER_PART = 8192, 32 * MIB, 1024
FLUSH_EVERY_S, FLUSH_SHARE = 60.0, 0.1
MAX_WRITES, WRITE_RETRIES = 4, 10
MAX_REASONS = 3
PROMPT_COLUMNS = {"prompt_column": "prompt", "messages_column": "messages", "tools_column": None}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to generate and how.

    Attributes:
        model: A local model directory, or a name on the hub.
        lease: The right to write the output; None where nobody else can want to.
        written: What a former run finished.
        journal_dir: Where actors keep finished rows and look for those of a former run.
        status_dir: Where actors and driver write how they do; None writes nothing.
        settings: Names and values, for people.
        is_sorted: Rows that share a prefix come together; their order is lost.
    """

    model: str
    source: Source
    writer: Writer
    options: dict[str, Any]
    engine_config: EngineConfig
    id_column: str | None = None
    lease: Lease | None = None
    written: Written | None = None
    journal_dir: Path | None = None
    status_dir: Path | None = None
    price_per_hour: float | None = None
    settings: Pairs = ()
    num_actors: int = 1
    batch_size: int = 32
    rows_in_flight: int | None = None
    preserve_order: bool = False
    is_sorted: bool = False
    verbose: bool = False

    @property
    def num_rows(self) -> int:
        return self.source.num_rows - (0 if self.written is None else self.written.num_rows)

    def check_lease(self) -> None:
        """Make sure that the output is still this run's; see `Lease.check`."""
        if self.lease is not None:
            self.lease.check()


def run_job(job: Job, console: Console) -> RunStats:
    """Run a job to its end; what was finished stays on disk if it fails.

    Raises:
        ExecutionError: The run failed; the message has the innermost reason.
    """
    run_stats = RunStats(total_rows=job.num_rows, task=job.options.get("task", GENERATE))
    with _watched(job, run_stats) as watch:
        if job.num_rows:
            _run(job, run_stats, watch, console)
        job.check_lease()
        job.writer.close()
        run_stats.finished_s = run_stats.finished_s or time.monotonic()
    return run_stats


def _watched(job: Job, run_stats: RunStats) -> AbstractContextManager[JobWatch | None]:
    if job.status_dir is None:
        return nullcontext()
    return JobWatch(
        make_status_directory(job.status_dir),
        run_stats,
        model=job.model,
        settings=job.settings,
        num_written_before=0 if job.written is None else job.written.num_rows,
        price_per_hour=job.price_per_hour,
    )


def _run(job: Job, run_stats: RunStats, watch: JobWatch | None, console: Console) -> None:
    def more() -> Iterator[str]:
        if watch is not None and watch.cost_per_million_tokens is not None:
            yield f"{watch.cost_per_million_tokens:.3g} per million tokens"
        if watch is not None and watch.node_rates:
            yield f"now {harmless(watch.node_rates)}"

    with running_ray(preserve_order=job.preserve_order, verbose=job.verbose):
        try:
            run_stats.started_s = time.monotonic()
            dataset = _dataset(job, console)
            with Progress(run_stats, console, more=more):
                _drain(job, dataset, run_stats)
            run_stats.finished_s = time.monotonic()
            if watch is not None:
                watch.wait_for_actors()
        except RaymoeError:
            raise
        except Exception as error:
            job.check_lease()
            kept = f"{run_stats.num_rows:,} of {run_stats.total_rows:,} rows were written"
            raise ExecutionError(f"the run failed: {innermost_reason(error)} ({kept})") from error


def check_model(
    model: str, options: Mapping[str, Any], engine_config: EngineConfig, num_actors: int
) -> None:
    """Refuse a local model that an engine would refuse, before Ray starts.

    Raises:
        CheckpointError: Files are missing, damaged or unsafe.
        UnsupportedModelError: The model's mathematics is not implemented.
        InfeasiblePlanError: This machine has too little memory; not checked for a cluster.
    """
    directory, task = find_model(model), read_task_of(options)
    if directory is None:
        if not has_cluster():  # else its nodes may have what is not here
            check_hub_is_known(model)
            config = read_config(fetch_config(model).parent)
            spec = configured_model(ModelSpec.from_config(config, name=model), engine_config)
            check_head(task, spec.head)
        return
    check_adapter(directory, is_ignored=engine_config.ignore_adapter)
    spec = configured_model(ModelSpec.from_directory(directory), engine_config)
    check_head(task, spec.head)
    WeightStore.open(spec, directory)
    if not has_cluster():
        plan_actor(directory, engine_config, this_machine().share(num_actors))


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
    if not identity.has_weights:
        return None
    kwargs, task = job.options.get("chat_template_kwargs"), read_task_of(job.options)
    return Manifest.of(identity, params, job.engine_config, kwargs, task)


def _drain(job: Job, dataset: ray.data.Dataset, run_stats: RunStats) -> None:
    parts = _Parts(job, run_stats)
    try:
        for bundle in dataset.iter_internal_ref_bundles():
            for block in bundle.blocks:
                parts.add(block)
        parts.finish()
    except BaseException:
        parts.save()
        raise


class _Parts:
    """Has Ray's workers write finished blocks; this process sees references and counts.

    Which blocks are in a part, and its name, are decided here once: a task that Ray runs again
    writes the same part again.
    """

    def __init__(self, job: Job, run_stats: RunStats) -> None:
        self._job, self._run_stats = job, run_stats
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": WRITE_RETRIES}
        if job.writer.location.is_local:  # a path of this machine, whatever other nodes there are
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        self._task = ray.remote(**options)(write_part)
        self._writing: dict[Any, str] = {}
        self._began_s = 0.0
        self._clear()

    def add(self, block: Any) -> None:
        """Take a block of the dataset; start to write a part when there are enough for one.

        Raises:
            ExecutionError: The output is another run's by now, or a part could not be written.
        """
        if block.metadata.num_rows == 0:
            return
        if not self._blocks:
            self._began_s = time.monotonic()
        self._blocks.append(block.ref)
        self._num_rows += block.metadata.num_rows or 0
        self._num_bytes += block.metadata.size_bytes
        self._collect(0)
        is_full = (
            self._num_rows >= ROWS_PER_PART
            or self._num_bytes >= BYTES_PER_PART
            or len(self._blocks) >= BLOCKS_PER_PART
        )
        if is_full or (self._is_old() and not self._writing):  # one process writes what suffices
            self._start()
        if len(self._writing) >= MAX_WRITES:
            self._collect(None)

    def finish(self) -> None:
        """Write what is left, and wait until all is written."""
        self._start()
        while self._writing:
            self._collect(None)

    def save(self) -> None:
        """Write what there is of a run that failed, as far as that succeeds."""
        with contextlib.suppress(Exception):
            self._start()
        for written in list(self._writing):
            with contextlib.suppress(Exception):
                self._take(written)

    def _is_old(self) -> bool:
        age_s = time.monotonic() - self._began_s
        return age_s >= min(FLUSH_EVERY_S, FLUSH_SHARE * self._run_stats.elapsed_s)

    def _start(self) -> None:
        if not self._blocks:
            return
        job = self._job
        job.check_lease()
        name = job.writer.next_name()
        hidden = job.source.error_column
        self._writing[self._task.remote(job.writer.shards, name, hidden, self._blocks)] = name
        self._clear()

    def _clear(self) -> None:
        self._blocks: list[Any] = []
        self._num_rows = self._num_bytes = 0

    def _collect(self, timeout_s: float | None) -> None:
        if self._writing:
            done, _ = ray.wait(list(self._writing), timeout=timeout_s)
            for written in done:
                self._take(written)

    def _take(self, written: Any) -> None:
        name = self._writing.pop(written)
        try:
            self._run_stats.merge(ray.get(written))
        except RayTaskError as error:
            if isinstance(error.cause, RaymoeError):
                raise error.cause from None
            raise
        self._job.writer.commit(name)


def _dataset(job: Job, console: Console) -> ray.data.Dataset:
    """Return the lazy dataset of answers; prints the plan."""
    dataset = job.source.dataset()
    if job.id_column is not None and job.written is not None and job.written.num_rows:
        written = job.written
        dataset = without_written(dataset, job.id_column, written.ids, written.errors)
    arguments = map_batches_kwargs(
        job.model,
        workload=_workload(job),
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
    if arguments.plan is not None:
        console.print(harmless(arguments.plan.describe(job.price_per_hour), keep="\n"))
    if job.is_sorted:
        columns = {name: job.options[name] for name in PROMPT_COLUMNS}
        dataset = sort_by_prefix(dataset, **columns, rows_per_block=job.batch_size)
    else:
        dataset = dataset.repartition(target_num_rows_per_block=job.batch_size, strict=True)
    return dataset.map_batches(MoEGenerator, **arguments)


def _workload(job: Job) -> Workload | None:
    """Return the rows of this run, by the lengths of the first of its input."""
    tables = job.source.tables(content_columns(job.options))
    sample = next((table for table in tables if table.num_rows), None)
    if sample is None:
        return None
    reader = reader_of(job.options)
    return workload_of(sample.slice(0, SAMPLED_ROWS), job.num_rows, job.model, reader)


def content_columns(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that the answer of a row depends on."""
    task = read_task_of(options)
    named = [options.get(name, default) for name, default in PROMPT_COLUMNS.items()]
    named += [SAMPLING_COLUMN] if task is None else task.columns
    return (*(name for name in named if name is not None), TEMPLATE_COLUMN)


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


def print_summary(run_stats: RunStats, output: Location, console: Console) -> None:
    """Print rows, the most frequent errors, tokens, speed, and where the output is."""
    errors = f", {run_stats.num_errors:,} error rows" if run_stats.num_errors else ""
    console.print(f"{run_stats.num_rows:,} rows in {format_seconds(run_stats.elapsed_s)}{errors}")
    for reason, count in run_stats.reasons.most_common(MAX_REASONS):
        console.print(f"  {count:,} x {harmless(reason)}")
    tokens = f"{run_stats.num_input_tokens:,} tokens "
    if run_stats.task == GENERATE:
        tokens += f"in, {run_stats.num_generated_tokens:,} tokens out, "
        tokens += f"{run_stats.tokens_per_s:,.0f} tokens/s out"
    else:
        rows_per_s = run_stats.num_rows / max(run_stats.elapsed_s, 1e-9)
        tokens += f"read, {rows_per_s:,.1f} rows/s, {run_stats.tokens_per_s:,.0f} tokens/s read"
    console.print(f"{tokens} (loading included)")
    console.print(f"output: {harmless(str(output))}")


STDERR = 2
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"


OBJECT_STORE_BYTES = 400 * MIB


def has_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


def this_machine() -> Cluster:
    """Return what a Ray on this machine will have."""
    host = read_host()
    memory_bytes = host.available_memory_bytes - OBJECT_STORE_BYTES
    return Cluster(
        num_nodes=1, num_cpus=host.num_cores, num_gpus=0, memory_bytes=max(1, memory_bytes)
    )


@contextmanager
def running_ray(*, preserve_order: bool, verbose: bool) -> Iterator[None]:
    """Connect to Ray, or start it; leave or end it afterwards.

    Args:
        preserve_order: Rows come out in the order of the input.
        verbose: Show what Ray and the actors log.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        _ensure_token()
    with nullcontext() if verbose else _without_stderr():
        _start(address, verbose=verbose)
    context = configure_data_context(preserve_order=preserve_order)
    context.enable_progress_bars = False
    if not verbose:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ray.shutdown()


def _start(address: str | None, *, verbose: bool) -> None:
    level = "info" if verbose else "error"
    if address:
        ray.init(address, logging_level=level, log_to_driver=verbose)
        return
    ray.init(
        "local",
        num_cpus=read_host().num_cores,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=level,
        log_to_driver=verbose,
    )


def _ensure_token() -> None:
    """Give a local Ray its token by the environment if it cannot write `~/.ray/auth_token`."""
    if {TOKEN_VARIABLE, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"} & os.environ.keys():
        return
    try:
        directory = Path("~/.ray").expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK) or (directory / "auth_token").exists():
            return
        reason = f"{directory} cannot be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home at all
        reason = str(error)
    logger.warning("no home to write to (%s): Ray's token is only in this process", reason)
    os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)


@contextmanager
def _without_stderr() -> Iterator[None]:
    sys.stderr.flush()
    saved = os.dup(STDERR)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), STDERR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, STDERR)
        os.close(saved)
