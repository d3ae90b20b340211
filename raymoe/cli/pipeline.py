"""A job of `raymoe generate`: rows through the operator into files, with progress and status."""

import contextlib
import dataclasses
import logging
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from raymoe.cli.progress import Progress
from raymoe.cli.resume import Lease, Written
from raymoe.cli.resume_without_ids import WrittenRows
from raymoe.cli.sources import Source, without_written
from raymoe.cli.stopping import Stopped, listen, stops_in_order
from raymoe.cli.writers import RunStats, Writer, write_part
from raymoe.config import AUTO, EngineConfig, NumActors
from raymoe.data.address import check_address
from raymoe.data.bucket import Bucket
from raymoe.data.cluster import Cluster
from raymoe.data.generator import MoEGenerator
from raymoe.data.journal import num_recorded_rows
from raymoe.data.manifest import Manifest
from raymoe.data.rows import SAMPLING_COLUMN, TEMPLATE_COLUMN
from raymoe.data.sizing import (
    configure_data_context,
    map_batches_kwargs,
    plan_actor,
)
from raymoe.data.sorting import sort_by_prefix
from raymoe.data.status import (
    GENERATE,
    JOB_FILE,
    LAST_WRITE_S,
    NO_RUNS,
    RUNNING,
    SUFFIX,
    WRITE_EVERY_S,
    FormerRuns,
    JobStatus,
    Pairs,
    StatusFiles,
    end_state,
    make_status_directory,
    read_status,
    write_record,
)
from raymoe.data.tasks import read_task_of, reader_of
from raymoe.data.workload import SAMPLED_ROWS, workload_of
from raymoe.device.host import read_host
from raymoe.engine.identity import ModelIdentity
from raymoe.engine.rank_model import configured_model, open_weights, read_model
from raymoe.engine.tasks.rows import check_head
from raymoe.errors import ExecutionError, RaymoeError
from raymoe.memory.checkpoint import check_hub_is_known, fetch_config, find_model
from raymoe.periodic import Periodic
from raymoe.plan.prediction import ROWS_OF_A_PART
from raymoe.safe_text import harmless
from raymoe.specs.files import check_adapter, local_model, read_config
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.status_view import JobView
from raymoe.units import CURRENCY, MIB

LAST_WORDS_S, LOOK_EVERY_S = 10.0, 0.05

logger = logging.getLogger(__name__)


class JobWatch:
    """Writes how a job does while it runs, and how it ended; a context manager.

    Attributes:
        view: The job, as its processes said last.
    """

    def __init__(
        self,
        directory: Path | None,
        run_stats: RunStats,
        *,
        name: str,
        model: str,
        settings: Pairs = (),
        former: FormerRuns = NO_RUNS,
        price_per_hour: float | None = None,
        currency: str = CURRENCY,
    ) -> None:
        """Watch a job.

        Args:
            directory: Of its status; None writes nothing, and knows nothing of its actors.
            settings: Names and values, for people.
        """
        self._directory, self._run_stats = directory, run_stats
        now_s = time.time()
        self._status = JobStatus(
            name=name,
            model=model,
            task=run_stats.task,
            state=RUNNING,
            started_unix_s=now_s,
            updated_unix_s=now_s,
            elapsed_s=0.0,
            total_rows=run_stats.total_rows,
            former=former,
            price_per_hour=price_per_hour,
            currency=currency,
            settings=settings,
        )
        self.view = self._see(self._status)
        self._is_failing = False
        self._thread: Periodic | None = None

    def note(self, name: str, value: str) -> None:
        """Add to the settings that the report shows."""
        settings = (*self._status.settings, (name, value))
        self._status = dataclasses.replace(self._status, settings=settings)

    def wait_for_actors(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Let actors say how they ended, before Ray ends their processes."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if not any(actor.is_alive for actor in self._see(self._status).actors):
                return
            time.sleep(LOOK_EVERY_S)

    def __enter__(self) -> "JobWatch":
        self._thread = Periodic(self._look, WRITE_EVERY_S, name="raymoe-job")
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        state, reason = end_state(error)
        self._status = dataclasses.replace(self._status, state=state, reason=reason)
        if self._thread is not None:
            self._thread.close(LAST_WRITE_S)

    def _look(self) -> None:
        run_stats = self._run_stats
        status = dataclasses.replace(
            self._status,
            updated_unix_s=time.time(),
            elapsed_s=run_stats.elapsed_s,
            num_rows=run_stats.num_rows,
            num_error_rows=run_stats.num_errors,
            num_input_tokens=run_stats.num_input_tokens,
            num_generated_tokens=run_stats.num_generated_tokens,
            error_groups=run_stats.error_groups.groups(),
        )
        try:
            if self._directory is not None:
                write_record(self._directory / JOB_FILE, status)
        except OSError as error:
            if not self._is_failing:
                logger.warning("the status in %s cannot be written: %s", self._directory, error)
            self._is_failing = True
        self.view = self._see(status)

    def _see(self, status: JobStatus) -> JobView:
        """Return the job with its actors; the driver knows best how it does itself."""
        files = StatusFiles() if self._directory is None else read_status(self._directory)
        return JobView.of(dataclasses.replace(files, job=status), time.time())


# A part has this much, or what came in this time; the parts of a young job are smaller.
BYTES_PER_PART, BLOCKS_PER_PART = 32 * MIB, 1024
FLUSH_EVERY_S, FLUSH_SHARE = 60.0, 0.1
MAX_WRITES, WRITE_RETRIES, SAVE_S = 4, 10, 60.0
PROMPT_COLUMNS = {"prompt_column": "prompt", "messages_column": "messages", "tools_column": None}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to generate and how.

    Attributes:
        model: A local model directory, or a name on the hub.
        lease: The right to write the output; None where nobody else can want to.
        written: Rows of former runs that are in the output.
        former: What those runs took.
        price_per_hour: Of a node, in `currency`.
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
    written: Written | WrittenRows | None = None
    journal_dir: Path | Bucket | None = None
    status_dir: Path | None = None
    former: FormerRuns = NO_RUNS
    price_per_hour: float | None = None
    currency: str = CURRENCY
    settings: Pairs = ()
    num_actors: NumActors = AUTO
    batch_size: int | None = None
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


def run_job(job: Job, console: Console) -> JobView:
    """Run a job to its end; what was finished stays on disk if it fails.

    Raises:
        Stopped: By a signal; what is kept has been said.
        ExecutionError: The run failed; the message has the innermost reason.
    """
    run_stats = RunStats(total_rows=job.num_rows, task=job.options.get("task", GENERATE))
    try:
        with stops_in_order(), _watched(job, run_stats) as watch:
            if job.num_rows:
                _run(job, run_stats, watch, console)
            job.check_lease()
            job.writer.close()
            run_stats.finished_s = run_stats.finished_s or time.monotonic()
    except Stopped as stop:
        console.print(f"{stop}: {describe_kept(job, run_stats)}")
        raise
    difference = describe_difference(job, run_stats)
    if difference:
        console.print(difference)
    if run_stats.num_cut:
        console.print(f"{run_stats.num_cut:,} of {run_stats.num_rows:,} answers were cut off at "
            "their largest number of tokens; a larger --max-tokens lets them end by "
            "themselves")  # fmt: skip
    return watch.view


def describe_difference(job: Job, run_stats: RunStats) -> str:
    """Return what to say where not as many rows were written as the input had; "" where they were.

    Rows are counted once before the job and once as they come out: files may change in between.
    """
    if run_stats.num_rows == job.num_rows:
        return ""
    return (
        f"the input had {job.num_rows:,} rows to read when the job began, and "
        f"{run_stats.num_rows:,} were read and written; if its files have changed since, run "
        "it again with --resume"
    )


def describe_kept(job: Job, run_stats: RunStats) -> str:
    """Return how many rows a job that was stopped will not generate again."""
    num_before = 0 if job.written is None else job.written.num_rows
    num_written = num_before + run_stats.num_rows
    num_more = 0
    if isinstance(job.journal_dir, Path):  # to count those in a bucket, all must be read
        # Written rows are in it too, except those that cannot be generated.
        num_more = max(0, num_recorded_rows(job.journal_dir) - num_written)
    about = "at least " if num_more else ""
    text = f"{about}{num_written + num_more:,} of {job.source.num_rows:,} rows are safe"
    return text + (
        f": {num_written:,} written, {num_more:,} more in the journal" if num_more else ""
    )


def _watched(job: Job, run_stats: RunStats) -> JobWatch:
    directory = None if job.status_dir is None else make_status_directory(job.status_dir)
    return JobWatch(
        directory,
        run_stats,
        name=job.writer.location.name if directory is None else directory.name.removesuffix(SUFFIX),
        model=job.model,
        settings=job.settings,
        former=job.former,
        price_per_hour=job.price_per_hour,
        currency=job.currency,
    )


def _run(job: Job, run_stats: RunStats, watch: JobWatch, console: Console) -> None:
    where = "starting Ray on this machine"
    if has_cluster():
        where = f"connecting to Ray at {os.environ['RAY_ADDRESS']}"
    console.print(harmless(where))
    # The tokenizer loads in its process while this one waits for those of Ray.
    beside = ThreadPoolExecutor(1, "raymoe-workload")
    workload = beside.submit(_workload, job)
    with beside, running_ray(preserve_order=job.preserve_order, verbose=job.verbose):
        try:
            run_stats.started_s = time.monotonic()
            dataset = _dataset(job, watch, workload.result(), console)
            with Progress(lambda: watch.view, console):
                _drain(job, dataset, run_stats, console)
            run_stats.finished_s = time.monotonic()
            watch.wait_for_actors()
        except RaymoeError:
            raise
        except Exception as error:
            job.check_lease()
            kept = f"{run_stats.num_rows:,} of {run_stats.total_rows:,} rows were written"
            raise ExecutionError(f"the run failed: {innermost_reason(error)} ({kept})") from error


def check_model(
    model: str, options: Mapping[str, Any], engine_config: EngineConfig, num_actors: NumActors
) -> None:
    """Refuse a local model that an engine would refuse, before Ray starts.

    Raises:
        CheckpointError: Files are missing, damaged or unsafe.
        UnsupportedModelError: The model's mathematics is not implemented.
        InfeasiblePlanError: This machine has too little memory; not checked for a cluster.
        ConfigError: No cluster answers at RAY_ADDRESS.
    """
    if has_cluster():
        check_address()
    directory, task = find_model(model), read_task_of(options)
    if directory is None:
        if not has_cluster():  # else its nodes may have what is not here
            check_hub_is_known(model)
            config = read_config(fetch_config(model).parent)
            spec = configured_model(ModelSpec.from_config(config, name=model), engine_config)
            check_head(task, spec.head)
        return
    adapter = engine_config.adapter
    check_adapter(directory, is_ignored=engine_config.ignore_adapter, adapter=adapter)
    spec = read_model(directory, engine_config)
    check_head(task, spec.head)
    open_weights(spec, directory, engine_config)
    if not has_cluster():
        here = this_machine()
        of_node = here.share(here.max_actors if num_actors == AUTO else num_actors)
        plan_actor(directory, engine_config, of_node)


def find_manifest(job: Job) -> Manifest | None:
    """Return what the job's tokens depend on.

    None where its model is not on this machine, or its weights are still to be read, which the
    actors do while they load them; then the manifest of the journal counts. Without a journal this
    waits.
    """
    directory = find_model(job.model)
    if directory is None:
        return None
    adapter, reads_weights = job.engine_config.adapter, job.journal_dir is None
    identity = ModelIdentity.of(directory, adapter=adapter, reads_weights=reads_weights)
    if job.journal_dir is None:
        _ = identity.weights
    params = job.options["sampling_params"]
    if not identity.has_weights:
        return None
    kwargs, task = job.options.get("chat_template_kwargs"), read_task_of(job.options)
    return Manifest.of(identity, params, job.engine_config, kwargs, task)


def _drain(job: Job, dataset: ray.data.Dataset, run_stats: RunStats, console: Console) -> None:
    parts = _Parts(job, run_stats)
    try:
        for bundle in dataset.iter_internal_ref_bundles():
            for block in bundle.blocks:
                parts.add(block)
        parts.finish()
    except BaseException as error:
        if isinstance(error, Stopped):
            console.print("stopping: rows that are done are written; a second signal ends at once")
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
            self._num_rows >= ROWS_OF_A_PART
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
        """Write what there is of a run that failed or was stopped, as far as that succeeds."""
        with contextlib.suppress(Exception):
            self._start()
        done: list[Any] = []
        with contextlib.suppress(Exception):  # such as that Ray has ended
            waiting = list(self._writing)
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=SAVE_S)
        for written in done:
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


def _dataset(
    job: Job, watch: JobWatch, workload: Workload | None, console: Console
) -> ray.data.Dataset:
    """Return the lazy dataset of answers; prints the plan."""
    dataset = _missing_rows(job)
    directory = local_model(job.model)  # actors work elsewhere
    arguments = map_batches_kwargs(
        job.model if directory is None else directory.absolute(),
        workload=workload,
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
        text = arguments.plan.describe(job.price_per_hour, job.currency)
        console.print(harmless(text, keep="\n"))
        watch.note("predicted", arguments.plan.prediction.parts)
    if job.is_sorted:
        columns = {name: job.options[name] for name in PROMPT_COLUMNS}
        dataset = sort_by_prefix(dataset, **columns, rows_per_block=arguments["batch_size"])
    else:
        dataset = dataset.repartition(
            target_num_rows_per_block=arguments["batch_size"], strict=True
        )
    return dataset.map_batches(MoEGenerator, **arguments)


def _missing_rows(job: Job) -> ray.data.Dataset:
    """Return the rows that are not written yet."""
    written = job.written
    if isinstance(written, WrittenRows):
        return job.source.dataset(written.is_written)
    dataset = job.source.dataset()
    if job.id_column is None or written is None or not written.num_rows:
        return dataset
    return without_written(dataset, job.id_column, written.ids, written.errors)


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
    # A column may be named for messages instead of prompts: it is read once.
    return (*dict.fromkeys(name for name in named if name is not None), TEMPLATE_COLUMN)


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


STDERR = 2
RAY_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"


OBJECT_STORE_BYTES = 400 * MIB


def has_cluster() -> bool:
    """Whether jobs run in a Ray that is there already, instead of one of their own."""
    return os.environ.get("RAY_ADDRESS", "") not in {"", "local"}


def this_machine() -> Cluster:
    """Return what a Ray on this machine will have."""
    host = read_host()
    memory_bytes = host.available_memory_bytes - OBJECT_STORE_BYTES
    return Cluster(
        num_nodes=1,
        num_cpus=host.num_cores,
        num_gpus=0,
        memory_bytes=max(1, memory_bytes),
        is_here=True,
    )


@contextmanager
def running_ray(*, preserve_order: bool, verbose: bool) -> Iterator[None]:
    """Connect to Ray, or start it; leave or end it afterwards.

    Args:
        preserve_order: Rows come out in the order of the input.
        verbose: Show what Ray and the actors log.
    """
    if not has_cluster():
        _ensure_token()
    # Workers look for packages in the directory in which Ray was started, and before others.
    with tempfile.TemporaryDirectory(prefix="raymoe-ray-") as empty:
        with contextlib.chdir(empty), nullcontext() if verbose else _without_stderr():
            _start(verbose=verbose)
        listen()
        context = configure_data_context(preserve_order=preserve_order)
        context.enable_progress_bars = False
        if not verbose:
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        try:
            yield
        except BaseException as error:
            # Ray Data's objects in it would start another Ray when they are collected after this.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            ray.shutdown()


def _start(*, verbose: bool) -> None:
    level = "info" if verbose else "error"
    if has_cluster():
        ray.init(os.environ["RAY_ADDRESS"], logging_level=level, log_to_driver=verbose)
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
    if {RAY_TOKEN_VARIABLE, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"} & os.environ.keys():
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
    os.environ[RAY_TOKEN_VARIABLE] = secrets.token_hex(32)


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
