"""The main job: rows through the operator into files, counted on the way."""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from raymoe.cli.local_ray import running_ray
from raymoe.cli.progress import Progress, Tally
from raymoe.cli.sinks import Sink
from raymoe.cli.sources import Source, without_written
from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.data.sizing import map_batches_kwargs
from raymoe.device.host import read_host
from raymoe.errors import ConfigError, ExecutionError, RaymoeError
from raymoe.units import format_seconds

FLUSH_EVERY_S = 60.0
ROWS_PER_BLOCK = 64
MAX_REASONS = 3
USABLE_MEMORY_FRACTION = 0.8  # of what is free; Ray ends workers at 95 % of the machine


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to generate and how.

    Attributes:
        model: A local model directory, or a name on the hub.
        options: Of `MoEGenerator`.
        num_rows: Rows that are left to do.
        written: What a former run finished.
    """

    model: str
    source: Source
    sink: Sink
    options: dict[str, Any]
    engine_config: EngineConfig
    num_rows: int
    id_column: str | None = None
    written: "Written | None" = None
    num_actors: int = 1
    batch_size: int = 16
    rows_in_flight: int = 1024
    preserve_order: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Written:
    """Rows of the input that are already in the output.

    Attributes:
        ids: Of those that have one.
        errors: What was said of lines so broken that they have no id.
    """

    ids: pa.Array
    errors: pa.Array

    @property
    def num_rows(self) -> int:
        """Rows that need not be done again."""
        return len(self.ids) + len(self.errors)


def find_written(source: Source, sink: Sink, id_column: str) -> Written:
    """Read the output of a former run.

    Raises:
        ConfigError: Its ids are of another type than those of the input.
    """
    ids, errors = [], []
    for row_id, error in sink.read_written(id_column):
        if row_id is None:
            errors.append(error.removeprefix("ValueError: "))
        else:
            ids.append(row_id)
    try:
        known = pa.array(ids, source.ids.type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ConfigError(
            f"the ids in {sink.path} are not of the input's type {source.ids.type}: {error}"
        ) from error
    return Written(
        ids=source.ids.filter(pc.is_in(source.ids, value_set=known)),
        errors=pa.array(errors, pa.string()),
    )


def run_job(job: Job, console: Console) -> Tally:
    """Run a job to its end; what was finished stays on disk if it fails.

    Raises:
        ExecutionError: The run failed; the message has the innermost reason.
    """
    tally = Tally(total_rows=job.num_rows)
    if not job.num_rows:
        job.sink.close()
        tally.finished_s = time.monotonic()
        return tally
    with running_ray(preserve_order=job.preserve_order, verbose=job.verbose) as is_local:
        try:
            tally.started_s = time.monotonic()
            with Progress(tally, console):
                _drain(job, tally, is_local=is_local)
            tally.finished_s = time.monotonic()
        except KeyboardInterrupt:
            job.sink.flush()
            raise
        except RaymoeError:
            raise
        except Exception as error:
            job.sink.flush()
            kept = f"{tally.num_rows:,} of {tally.total_rows:,} rows were written"
            raise ExecutionError(f"the run failed: {innermost_reason(error)} ({kept})") from error
    job.sink.close()
    return tally


def _drain(job: Job, tally: Tally, *, is_local: bool) -> None:
    last_flush_s = time.monotonic()
    for table in _tables(job, is_local=is_local):
        tally.add(table)
        job.sink.write(table)
        if time.monotonic() - last_flush_s > FLUSH_EVERY_S:
            job.sink.flush()
            last_flush_s = time.monotonic()


def _tables(job: Job, *, is_local: bool) -> Iterator[pa.Table]:
    """Yield the finished blocks."""
    dataset = job.source.dataset()
    if job.id_column is not None and job.written is not None and job.written.num_rows:
        written = job.written
        dataset = without_written(dataset, job.id_column, written.ids, written.errors)
    config = share_of_machine(job.engine_config, job.num_actors) if is_local else job.engine_config
    arguments = map_batches_kwargs(
        job.model,
        num_actors=job.num_actors,
        batch_size=job.batch_size,
        rows_in_flight=job.rows_in_flight,
        engine_config=config,
        id_column=job.id_column,
        error_column=job.source.error_column,
        **job.options,
    )
    dataset = dataset.repartition(target_num_rows_per_block=ROWS_PER_BLOCK)
    dataset = dataset.map_batches(MoEGenerator, **arguments)
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        hidden = [name for name in (job.source.error_column,) if name in table.column_names]
        yield table.drop_columns(hidden)


def share_of_machine(config: EngineConfig, num_actors: int) -> EngineConfig:
    """Return a configuration for one of several engines on this machine; one takes it all."""
    if num_actors == 1:
        return config
    host = read_host()
    memory_bytes = int(host.available_memory_bytes * USABLE_MEMORY_FRACTION) // num_actors
    return dataclasses.replace(
        config,
        num_threads=config.num_threads or max(1, host.num_cores // num_actors),
        host_memory_bytes=config.host_memory_bytes or memory_bytes,
    )


def innermost_reason(error: BaseException) -> str:
    """Return the last line of the first cause: Ray wraps an error in tracebacks as text."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def print_summary(tally: Tally, output: Path, console: Console) -> None:
    """Print rows, the most frequent errors, tokens, speed, and where the output is."""
    errors = f", {tally.num_errors:,} error rows" if tally.num_errors else ""
    console.print(f"{tally.num_rows:,} rows in {format_seconds(tally.elapsed_s)}{errors}")
    for reason, count in tally.reasons.most_common(MAX_REASONS):
        console.print(f"  {count:,} x {reason}")
    console.print(
        f"{tally.num_input_tokens:,} tokens in, {tally.num_generated_tokens:,} tokens out, "
        f"{tally.tokens_per_s:,.0f} tokens/s out (loading included)"
    )
    console.print(f"output: {output}")
