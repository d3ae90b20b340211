"""Where the time of a job goes: all of it to some operation, and every operation has a line."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymoe.bench import operations, workloads
from raymoe.bench.operation_timer import OperationTimer
from raymoe.bench.operations import PhaseTimes, measure_operations
from raymoe.bench.steps import StepKind
from raymoe.bench.workloads import RowLengths, make_checkpoint
from raymoe.engine.core import EngineCore
from raymoe.measure.timing import Limits
from raymoe.plan.step_work import OperationKind, step_work
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.specs.attention.work import AttentionShape
from raymoe.specs.model import ModelSpec

LIMITS = Limits(flop_per_s=1e11, bytes_per_s=1e10)
JOB = RowLengths(num_rows=3, mean_prompt_tokens=8, generated_tokens=4)
SMALL = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 256,
}  # fmt: skip
FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HEADS = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
SMALLER = {
    "mixtral": SMALL | {"num_local_experts": 4},
    "qwen3": SMALL | FEW_EXPERTS,
    "hybrid": SMALL | FEW_EXPERTS | HEADS | {"shared_expert_intermediate_size": 64},
}
# Calls in a step of four layers: projections before and after attention, a gate where it has one,
# and that of the shared expert.
CALLS = {
    "mixtral": {OperationKind.PROJECTIONS: 8, OperationKind.ATTENTION: 4},
    "qwen3": {OperationKind.PROJECTIONS: 8, OperationKind.ATTENTION: 4},
    "hybrid": {
        OperationKind.PROJECTIONS: 16,
        OperationKind.ATTENTION: 1,
        OperationKind.STATES: 3,
        OperationKind.NETWORKS: 4,
    },
}
COMMON = {
    OperationKind.EXPERTS: 4, OperationKind.ROUTER: 4, OperationKind.HEAD: 1,
    OperationKind.SAMPLING: 1,
}  # fmt: skip


class Clock:
    """One that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_time_belongs_to_the_innermost_operation() -> None:
    clock = Clock()
    timer = OperationTimer(clock)
    timer.begin_waiting()
    clock.now_s = 1.0
    timer.begin()
    clock.now_s = 2.0  # one second before rows came
    timer.end_waiting()
    clock.now_s = 2.5
    timer.enter(OperationKind.REST_OF_STEP)
    clock.now_s = 3.0
    timer.enter(OperationKind.ATTENTION, is_whole=True)
    assert not timer.counts_here()
    clock.now_s = 7.0
    timer.leave()
    assert timer.counts_here()
    clock.now_s = 7.25
    timer.leave()
    timer.end_step()  # nothing ran: the next step gets it
    timer.took(MicroBatchShape(host=AttentionShape(rows=1, context_tokens=1)))
    timer.end_step()
    timer.begin_waiting()
    clock.now_s = 8.0
    timer.end()
    (step,) = timer.steps
    assert step.seconds == 7.0
    assert step.by_kind == {
        OperationKind.WAITING: 1.0 + 0.75,
        OperationKind.REST_OF_STEP: 0.5 + 0.25,
        OperationKind.ATTENTION: 4.0,
        None: 0.5,
    }
    assert step.calls[OperationKind.ATTENTION] == 1


def phases(shape: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[PhaseTimes]:
    small = workloads.SHAPES[shape] | SMALLER[shape]
    monkeypatch.setitem(workloads.SHAPES, shape, small)
    monkeypatch.setattr(operations, "measure_limits", lambda _num_threads: LIMITS)
    monkeypatch.setattr(operations, "WARM_UP_ROWS", 1)
    model = make_checkpoint(shape, directory)
    return measure_operations(model, JOB, num_threads=2, repetitions=1)


def kinds_with_work(directory: Path) -> Iterator[OperationKind]:
    model = ModelWork.of(ModelSpec.from_directory(directory), 2)
    yield from step_work(model, MicroBatchShape.decode(3, 8))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
        "hybrid",
    ],
)
def test_every_operation_has_a_line_and_all_lines_add_up(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = phases(shape, tmp_path, monkeypatch)
    assert (prefill.phase, decode.phase) == (StepKind.PREFILL, StepKind.DECODE)
    assert (prefill.num_steps, decode.num_steps) == (1, 3)
    assert (prefill.num_tokens, decode.num_tokens) == (sum(JOB.prompt_lengths()), 3 * 3)
    for phase in (prefill, decode):
        assert phase.sum_s == pytest.approx(phase.seconds, rel=1e-9)
        calls = {each.kind: each.calls for each in phase.operations if each.calls}
        assert calls.keys() >= set(kinds_with_work(tmp_path))
        for kind, number in (COMMON | CALLS[shape]).items():
            assert calls[kind] == number * phase.num_steps, kind
        assert {each.kind for each in phase.operations if each.bound_s} == set(
            kinds_with_work(tmp_path)
        )
        assert OperationKind.WAITING in {each.kind for each in phase.operations}
        line = json.loads(phase.to_json(shape=shape))
        assert line["phase"] == phase.phase
        assert len(line["operations"]) == len(phase.operations)
    assert not hasattr(EngineCore.step, "__wrapped__"), "the engine is as it was"
