"""Measure lane latency, and compare predicted with measured steps."""

import dataclasses
import enum
import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raymoe.bench.workloads import RowLengths, make_prompts
from raymoe.config import EngineConfig, SamplingParams
from raymoe.device.lane import Lane, ThreadLane
from raymoe.engine.core import Runner
from raymoe.engine.engine import Engine
from raymoe.engine.load import load_parts
from raymoe.plan.cost import StepCost
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.runtime.batch import InputBatch
from raymoe.runtime.executor import Bindings, Executor
from raymoe.schedule.builders import build_in_place
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.timeline import Timeline, simulate
from raymoe.specs.attention.work import AttentionShape
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec

TARGET_S = 40e-6  # a task of a decode step takes at least some hundred microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLatency:
    """Seconds between dependent empty tasks."""

    same_lane_s: float  # median if the next task is on the same lane
    other_lane_s: float  # median if it is on another lane, whose thread sleeps until then
    other_lane_p99_s: float  # 99th percentile of that

    def __str__(self) -> str:
        return (
            f"time between two tasks of a step: on one thread {self.same_lane_s * 1e6:.1f} us, on "
            f"two threads {self.other_lane_s * 1e6:.1f} us (99 % below "
            f"{self.other_lane_p99_s * 1e6:.1f} us), target {TARGET_S * 1e6:.0f} us"
        )


def measure_lanes(num_tasks: int = 2000) -> LaneLatency:
    same = _gaps_s(_run(_chain([Op.ATTN], num_tasks)))
    other = _gaps_s(_run(_chain([Op.ATTN, Op.W], num_tasks)))
    return LaneLatency(
        same_lane_s=statistics.median(same),
        other_lane_s=statistics.median(other),
        other_lane_p99_s=statistics.quantiles(other, n=100)[-1],
    )


def _chain(ops: Sequence[Op], num_tasks: int) -> Schedule:
    lanes = {Op.ATTN: Resource.CPU, Op.W: Resource.HTOD}
    link = Buffer("link")
    tasks = [
        Task(op=op, layer=index, part=0, resource=lanes[op], reads=(link,), writes=(link,))
        for index, op in ((index, ops[index % len(ops)]) for index in range(num_tasks))
    ]
    return Schedule("chain", tuple(tasks), frozenset({link}))


def _run(schedule: Schedule) -> Timeline:
    def nothing(_task: Task, _state: None) -> None:
        """Do nothing."""

    bindings: Bindings[None] = dict.fromkeys(Op, nothing)
    lanes: dict[Resource | Op, Lane] = {key: ThreadLane(key) for key in schedule.resources}
    try:
        return Executor(schedule, bindings, lanes).run(None)
    finally:
        for lane in lanes.values():
            lane.close()


def _gaps_s(timeline: Timeline) -> list[float]:
    spans = timeline.spans[len(timeline.spans) // 2 :]
    return [later.start_s - earlier.end_s for earlier, later in itertools.pairwise(spans)]


WARM_UP_ROWS = 8


class StepKind(enum.StrEnum):
    PREFILL = "prefill"
    MIXED = "mixed"
    DECODE = "decode"

    @classmethod
    def of(cls, shape: MicroBatchShape) -> "StepKind":
        if not shape.host.prompt_pairs:
            return cls.DECODE
        return cls.MIXED if shape.host.decode_rows else cls.PREFILL


@dataclass(frozen=True, slots=True)
class StepPair:
    shape: MicroBatchShape
    predicted: Timeline
    measured: Timeline


Job = Sequence[StepPair]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    kind: str
    num_steps: int
    predicted_s: float  # total over the steps
    measured_s: float  # total over the steps, median over runs
    gap_by_op: Mapping[str, float]  # predicted over measured seconds per operation, minus 1

    @property
    def gap(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @classmethod
    def of(cls, kind: str, runs: Sequence[Job]) -> "KindTimes":
        predicted = _seconds_by_op([pair.predicted for pair in runs[0]])
        measured = [_seconds_by_op([pair.measured for pair in run]) for run in runs]
        by_op = {op: statistics.median(run[op] for run in measured) for op in predicted}
        return cls(
            kind=kind,
            num_steps=len(runs[0]),
            predicted_s=sum(predicted.values()),
            measured_s=statistics.median(sum(run.values()) for run in measured),
            gap_by_op={op: predicted[op] / by_op[op] - 1 for op in predicted},
        )


def times_by_kind(runs: Sequence[Job]) -> list[KindTimes]:
    """One entry per kind of step that occurs in a job's runs, and one for all steps."""
    grouped: dict[str, Sequence[Job]] = {
        kind: [[pair for pair in run if StepKind.of(pair.shape) is kind] for run in runs]
        for kind in StepKind
    }
    grouped["all"] = runs
    return [KindTimes.of(kind, members) for kind, members in grouped.items() if all(members)]


def _seconds_by_op(timelines: Iterable[Timeline]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for timeline in timelines:
        seconds.update(timeline.seconds_by_op())
    return dict(seconds)


class StepRecorder:
    """Wraps a runner and records the inputs and duration of each step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[tuple[MicroBatchShape, Timeline]] = []

    @property
    def last_timeline(self) -> Timeline:
        return self._runner.last_timeline

    @contextmanager
    def run(self, batch: InputBatch) -> Iterator[Tensor]:
        with self._runner.run(batch) as hidden_RH:
            yield hidden_RH
        self.steps.append((shape_of(batch), self.last_timeline))

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        return self._runner.compute_logits(hidden_RH)

    def interrupt(self) -> None:
        self._runner.interrupt()

    def close(self) -> None:
        self._runner.close()


def shape_of(batch: InputBatch) -> MicroBatchShape:
    """Convert a step to cost-model numbers; a chunk of one token counts as decoding."""
    num_scheduled_tokens = batch.sequences.num_scheduled_tokens
    contexts = batch.sequences.context_tokens.astype(np.int64)
    pairs = num_scheduled_tokens * (2 * contexts - num_scheduled_tokens + 1) // 2
    is_prefill = num_scheduled_tokens > 1
    attention = AttentionShape(
        rows=int(num_scheduled_tokens.sum()),
        decode_rows=int((~is_prefill).sum()),
        pairs=int(pairs[~is_prefill].sum()),
        prompt_pairs=int(pairs[is_prefill].sum()),
        context_tokens=int(contexts.sum()),
    )
    return MicroBatchShape(host=attention, logit_rows=len(batch.logit_rows))


def predict_step(model: ModelSpec, hardware: HardwareSpec, shape: MicroBatchShape) -> Timeline:
    work = ModelWork.of(model, torch.bfloat16.itemsize)
    return simulate(build_in_place(model.num_layers), StepCost(work, hardware, (shape,)))


def compare_steps(
    model: Path, hardware: HardwareSpec, workload: RowLengths, repetitions: int = 1
) -> list[Job]:
    spec = ModelSpec.from_directory(model)
    prompts = make_prompts(workload, spec.vocab_size)
    config = EngineConfig(
        dtype="bfloat16",
        device="cpu",
        num_threads=hardware.num_cores,
        hardware=hardware,
        workload=workload.job,
    )
    parts = load_parts(model, config)
    recorder = StepRecorder(parts.runner)
    runs: list[Job] = []
    with Engine(dataclasses.replace(parts, runner=recorder), config) as engine:
        engine.generate(prompts[:WARM_UP_ROWS], _params(2), use_tqdm=False)
        for _ in range(repetitions):
            recorder.steps.clear()
            engine.reset_prefix_cache()
            engine.generate(prompts, _params(workload.generated_tokens), use_tqdm=False)
            runs.append(
                [
                    StepPair(shape, predict_step(spec, hardware, shape), measured)
                    for shape, measured in recorder.steps
                ]
            )
    return runs


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
