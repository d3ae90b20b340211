"""A job on a local cluster whose engines wait, or are not there: rows in, figures out."""

import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from raymoe.assets import demo_model_path
from raymoe.data.sizing import configure_data_context, map_batches_kwargs
from raymoe.errors import ExecutionError
from raymoe.processes import Usage, usage_of
from raymoe.specs.workload import Workload
from tests.scale.figures import Run, steady_rate
from tests.scale.waiting import WaitingModel
from tests.scale.waiting_generator import (
    ActorMoment,
    InstantGenerator,
    WaitingGenerator,
    read_actor_logs,
)
from tests.scale.waiting_rows import ID_COLUMN, RowCheck, make_rows

START_TIMEOUT_S = 1800.0
ROWS_PER_READ = 4096
SAMPLE_S = 1.0
DRIVER, RAY, ACTORS = "driver", "Ray's processes", "each actor"


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """What to run.

    Attributes:
        workload: Its rows.
        model: What the engines stand for; None for an operator that takes no time.
        rows_in_flight: Inside one actor.
        log_dir: For a file of each actor.
        journal_dir: Of finished rows; None for no journal.
    """

    workload: Workload
    model: WaitingModel | None
    num_actors: int
    rows_in_flight: int
    rows_per_task: int
    log_dir: Path
    journal_dir: Path | None = None

    def tables(self) -> Iterator[pa.Table]:
        """Start the job; yields the finished blocks."""
        num_rows = self.workload.num_rows
        reads = max(1, math.ceil(num_rows / ROWS_PER_READ))
        rows = functools.partial(make_rows, workload=self.workload)
        dataset = ray.data.range(num_rows, override_num_blocks=reads)
        dataset = dataset.map_batches(rows, batch_size=None, batch_format="pyarrow")
        dataset = dataset.repartition(target_num_rows_per_block=self.rows_per_task, strict=True)
        operator = InstantGenerator if self.model is None else WaitingGenerator
        dataset = dataset.map_batches(operator, **self._arguments())
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)

    def _arguments(self) -> dict[str, Any]:
        model: dict[str, Any] = {} if self.model is None else {"model": self.model}
        arguments = map_batches_kwargs(
            demo_model_path(),
            num_actors=self.num_actors,
            rows_in_flight=self.rows_in_flight,
            batch_size=self.rows_per_task,
            num_gpus=1,
            num_cpus=1,
            memory=1,
            sampling_params={"temperature": 0.0, "ignore_eos": True},
            id_column=ID_COLUMN,
            journal_dir=self.journal_dir,
        )
        arguments["fn_constructor_kwargs"] |= {"log_dir": str(self.log_dir), **model}
        return arguments


@dataclass
class Samples:
    """What processes used over time.

    Attributes:
        memory: (seconds, bytes) by name of the process.
        cpu_s: Of Ray's processes, at the latest sample.
    """

    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    cpu_s: float = 0.0

    def take(self, begin_s: float, actors: list[int]) -> None:
        """Add a sample of all processes."""
        now_s = time.monotonic() - begin_s
        own = os.getpid()
        rest = Usage()
        for pid in descendants(own) - set(actors):
            rest += usage_of(pid) or Usage()
        self.cpu_s = rest.cpu_s
        named = {DRIVER: usage_of(own), RAY: rest}
        named |= {f"actor {number}": usage_of(pid) for number, pid in enumerate(actors, 1)}
        for name, usage in named.items():
            if usage is not None:
                self.memory.setdefault(name, []).append((now_s, float(usage.rss_bytes)))

    def by_kind(self) -> dict[str, list[list[tuple[float, float]]]]:
        """`memory` of the driver, of Ray's processes, and of all actors."""
        kinds: dict[str, list[list[tuple[float, float]]]] = {}
        for name, points in self.memory.items():
            kinds.setdefault(name if name in (DRIVER, RAY) else ACTORS, []).append(points)
        return kinds


@contextmanager
def _sampling(samples: Samples, log_dir: Path) -> Iterator[None]:
    """Take a sample every second in a thread of its own."""
    begin_s, is_over = time.monotonic(), threading.Event()

    def run() -> None:
        while not is_over.wait(SAMPLE_S):
            samples.take(begin_s, sorted(int(path.stem) for path in log_dir.glob("*.jsonl")))

    thread = threading.Thread(target=run, name="raymoe-samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run_waiting_job(job: WaitingJob) -> tuple[Run, Samples]:
    """Run a job to its end on the cluster that this process is connected to.

    Raises:
        ExecutionError: An id is missing or there twice, or a row could not be generated.
    """
    context = configure_data_context()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = START_TIMEOUT_S  # all at once, or the first take all rows
    job.log_dir.mkdir(parents=True)
    check, samples = RowCheck(job.workload.num_rows), Samples()
    begin_s, end_s, before = time.time(), None, (0.0, 0.0)
    with _sampling(samples, job.log_dir):
        for table in job.tables():
            if end_s is None:  # what came before belongs to the start
                before = (time.process_time(), samples.cpu_s)
            end_s = time.time()
            check.add(table)
    check.finish()
    run = _figures(
        job,
        begin_s=begin_s,
        end_s=end_s or begin_s,
        driver_cpu_s=time.process_time() - before[0],
        ray_cpu_s=max(0.0, samples.cpu_s - before[1]),
    )
    return run, samples


def _figures(
    job: WaitingJob,
    *,
    begin_s: float,
    end_s: float,
    driver_cpu_s: float,
    ray_cpu_s: float,
) -> Run:
    logs = read_actor_logs(job.log_dir)
    if len(logs) != job.num_actors:
        raise ExecutionError(
            f"{len(logs)} processes of actors ran, not {job.num_actors}: some were started again, "
            "or never; is there enough memory?"
        )
    ready_s = max(moments[0].time_s for moments in logs.values())
    return Run(
        num_actors=job.num_actors,
        num_rows=job.workload.num_rows,
        rows_per_task=job.rows_per_task,
        start_s=ready_s - begin_s,
        job_s=end_s - ready_s,
        steady_tokens_per_s=None if job.model is None else steady_rate(_steps(logs.values())),
        actor_cpu_s=sum(moments[-1].cpu_s - moments[0].cpu_s for moments in logs.values()),
        driver_cpu_s=driver_cpu_s,
        ray_cpu_s=ray_cpu_s,
    )


def _steps(logs: Iterable[list[ActorMoment]]) -> list[tuple[float, int]]:
    """(end, tokens) of all actors' passes."""
    steps = [
        (after.time_s, after.num_tokens - before.num_tokens)
        for moments in logs
        for before, after in itertools.pairwise(moments)
    ]
    return sorted(steps)


def descendants(pid: int) -> set[int]:
    """Return children, grandchildren and so on, as of now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    left = [pid]
    while left:
        new = set(children.get(left.pop(), ())) - found
        found |= new
        left += new
    return found
