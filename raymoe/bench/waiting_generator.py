"""Operators for measuring what is around an engine: one whose engine waits, one that has none.

They write down when they were ready and how many rows and how much CPU time they have had since.
"""

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raymoe.bench.waiting import WaitingModel, waiting_parts
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.data.generator import MoEGenerator
from raymoe.engine.engine import Engine
from raymoe.engine.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorMoment:
    """An actor at one time.

    Attributes:
        time_s: Of the clock on the wall.
        num_rows: That it has finished.
        cpu_s: Of its process.
    """

    time_s: float
    num_rows: int
    cpu_s: float


class ActorLog:
    """A file of moments for each process of an actor. Thread-safe."""

    def __init__(self, directory: str | Path) -> None:
        self._lock = threading.Lock()
        self._num_rows = 0
        self._path = Path(directory) / f"{os.getpid()}.jsonl"
        self.record(0)

    def record(self, num_rows: int) -> None:
        """Note that so many more rows are finished."""
        with self._lock:
            self._num_rows += num_rows
            moment = ActorMoment(
                time_s=time.time(), num_rows=self._num_rows, cpu_s=time.process_time()
            )
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(moment)) + "\n")


def read_actor_logs(directory: Path) -> dict[int, list[ActorMoment]]:
    """The moments of each process that wrote a log, by its id; a torn last line is left out."""
    logs: dict[int, list[ActorMoment]] = {}
    for path in sorted(directory.glob("*.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        moments = [ActorMoment(**json.loads(line)) for line in lines if line.endswith("\n")]
        if moments:
            logs[int(path.stem)] = moments
    return logs


class WaitingGenerator(MoEGenerator):
    """A `MoEGenerator` whose engine waits instead of computing.

    Args:
        model_source: Its tokenizer is used, and its weights are not.
        model: What the engine stands for.
        log_dir: For the file of this actor.
        options: Of `MoEGenerator`.
    """

    def __init__(
        self, model_source: str | Path, *, model: WaitingModel, log_dir: str, **options: Any
    ) -> None:
        self._model = model
        super().__init__(model_source, **options)
        self._log = ActorLog(log_dir)

    def _open_engine(self, model_source: str | Path, config: EngineConfig) -> Engine:
        return Engine(waiting_parts(self._model, Path(model_source)), config)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Generate for one table, as the real operator does."""
        done = super().__call__(batch)
        self._log.record(batch.num_rows)
        return done


class InstantGenerator:
    """Answers every row at once: what is left is Ray's own work.

    Args:
        model_source: Not used.
        log_dir: For the file of this actor.
    """

    def __init__(self, model_source: str | Path, *, log_dir: str, **_options: Any) -> None:
        self._columns = OutputColumns.of(SamplingParams())
        self._log = ActorLog(log_dir)
        self.model_source = model_source

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the table with empty answers."""
        done = self._columns.append(batch, [Generation(finish_reason="stop")] * batch.num_rows)
        self._log.record(batch.num_rows)
        return done
