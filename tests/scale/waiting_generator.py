"""Operators for measuring what is around an engine: one whose engine waits, one that has none.

They write down when they were ready, and after each step how many tokens they have generated since
and how much CPU time their process has had.
"""

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.data.generator import MoEGenerator
from raymoe.engine.engine import Engine
from raymoe.engine.outputs import Generation
from tests.scale.waiting import WaitingModel, waiting_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorMoment:
    """An actor at one time.

    Attributes:
        time_s: Of the clock on the wall.
        num_tokens: That it has generated.
        cpu_s: Of its process.
    """

    time_s: float
    num_tokens: int
    cpu_s: float


class ActorLog:
    """A file of moments for each process of an actor. Thread-safe."""

    def __init__(self, directory: str | Path) -> None:
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._path = Path(directory) / f"{os.getpid()}.jsonl"
        self.record(0)

    def record(self, num_tokens: int) -> None:
        """Note that there are so many more tokens."""
        with self._lock:
            self._num_tokens += num_tokens
            moment = ActorMoment(
                time_s=time.time(), num_tokens=self._num_tokens, cpu_s=time.process_time()
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
        def on_step(num_tokens: int) -> None:
            self._log.record(num_tokens)

        return Engine(waiting_parts(self._model, Path(model_source), on_step), config)


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
        done, _ = self._columns.append(batch, [Generation(finish_reason="stop")] * batch.num_rows)
        self._log.record(0)
        return done
