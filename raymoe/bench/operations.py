"""Where the time of a job goes: its operations beside what each would take at the machine's limits.

The time from the end of a step to the end of the next belongs to the next one's kind of step, and
all of it to one operation or to what is not accounted for.
"""

import dataclasses
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from raymoe.bench.operation_timer import OperationTimer, StepTimes, TimedRunner, timed_operations
from raymoe.bench.steps import StepKind
from raymoe.bench.workloads import RowLengths, make_prompts
from raymoe.config import EngineConfig, SamplingParams
from raymoe.engine.engine import Engine
from raymoe.engine.load import load_parts
from raymoe.measure.timing import Limits, mean_limits, measure_limits
from raymoe.plan.bound import GEMM_EFFICIENCY
from raymoe.plan.step_work import OperationKind, StepWork, step_work
from raymoe.plan.work import ModelWork
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import ModelSpec

WARM_UP_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """One kind of operation in all steps of a phase.

    Attributes:
        flop: Operations of all of them.
        num_bytes: Bytes that they read or write at least once in each step.
        bound_s: Seconds at the limits: in each layer and step the longer of operations and bytes.
    """

    kind: OperationKind
    calls: int
    seconds: float
    flop: float
    num_bytes: float
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Steps of one kind, which follow each other or not.

    Attributes:
        seconds: By the clock, with the time before each step.
        operations: Those that were called or have work, the longest first.
    """

    phase: StepKind
    num_steps: int
    num_tokens: int
    seconds: float
    not_accounted_s: float
    operations: tuple[OperationTimes, ...]
    limits: Limits

    @property
    def sum_s(self) -> float:
        return self.not_accounted_s + sum(each.seconds for each in self.operations)

    def to_json(self, **names: str) -> str:
        return json.dumps(names | dataclasses.asdict(self))

    @classmethod
    def of(
        cls, phase: StepKind, steps: Sequence[tuple[StepTimes, StepWork]], limits: Limits
    ) -> "PhaseTimes":
        times, works = [each for each, _ in steps], [each for _, each in steps]
        operations = [_operation(kind, times, works, limits) for kind in OperationKind]
        found = [each for each in operations if each.calls or each.seconds or each.bound_s]
        return cls(
            phase=phase,
            num_steps=len(steps),
            num_tokens=int(sum(each.shape.tokens for each in times)),
            seconds=sum(each.seconds for each in times),
            not_accounted_s=sum(each.by_kind.get(None, 0.0) for each in times),
            operations=tuple(sorted(found, key=lambda each: -each.seconds)),
            limits=limits,
        )


def _operation(
    kind: OperationKind, times: Sequence[StepTimes], works: Sequence[StepWork], limits: Limits
) -> OperationTimes:
    entries = [each for work in works for each in work.get(kind, ())]
    return OperationTimes(
        kind=kind,
        calls=sum(each.calls.get(kind, 0) for each in times),
        seconds=sum(each.by_kind.get(kind, 0.0) for each in times),
        flop=sum(each.flop for each in entries),
        num_bytes=sum(each.num_bytes for each in entries),
        bound_s=sum(
            each.seconds(
                flop_per_s=GEMM_EFFICIENCY * limits.flop_per_s, bytes_per_s=limits.bytes_per_s
            )
            for each in entries
        ),
    )


def measure_operations(
    model: Path, workload: RowLengths, *, num_threads: int, repetitions: int
) -> list[PhaseTimes]:
    """Run a job in one engine; returns the phases of the run of median time.

    Args:
        repetitions: Runs that are timed, after a few rows that are not.
    """
    spec = ModelSpec.from_directory(model)
    prompts = make_prompts(workload, spec.vocab_size)
    runs, limits = [], [measure_limits(num_threads)]
    with _engine(model, workload, num_threads) as (engine, timer):
        engine.generate(prompts[:WARM_UP_ROWS], _params(2), use_tqdm=False)
        for _ in range(repetitions):
            engine.reset_prefix_cache()
            gc.collect()
            timer.begin()
            engine.generate(prompts, _params(workload.generated_tokens), use_tqdm=False)
            timer.end()
            runs.append(timer.steps)
            limits.append(measure_limits(num_threads))
    runs.sort(key=lambda steps: sum(step.seconds for step in steps))
    return phases_of(spec, runs[(len(runs) - 1) // 2], mean_limits(limits))


def phases_of(spec: ModelSpec, steps: Sequence[StepTimes], limits: Limits) -> list[PhaseTimes]:
    """The phases that occur among the steps of a job."""
    work = ModelWork.of(spec, torch.bfloat16.itemsize)
    routed = [i for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoeSpec)]
    grouped: dict[StepKind, list[tuple[StepTimes, StepWork]]] = {}
    for step in steps:
        activated = {
            i: len(np.unique(ids_TK.numpy()))
            for i, ids_TK in zip(routed, step.expert_ids, strict=True)
        }
        of_kind = grouped.setdefault(StepKind.of(step.shape), [])
        of_kind.append((step, step_work(work, step.shape, activated)))
    return [PhaseTimes.of(kind, grouped[kind], limits) for kind in StepKind if kind in grouped]


@contextmanager
def _engine(
    model: Path, workload: RowLengths, num_threads: int
) -> Iterator[tuple[Engine, OperationTimer]]:
    config = EngineConfig(
        dtype="bfloat16", device="cpu", num_threads=num_threads, workload=workload.job
    )
    timer, parts = OperationTimer(), load_parts(model, config)
    parts = dataclasses.replace(parts, runner=TimedRunner(parts.runner, timer))
    with timed_operations(timer), Engine(parts, config) as engine:
        yield engine, timer


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
