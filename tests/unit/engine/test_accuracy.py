"""Predicted beside measured, and what the engine learns from it."""

import time
from dataclasses import replace

import numpy as np
import pytest

from raymoe.engine.accuracy import (
    MIN_LEFT_S,
    Accuracy,
    Correction,
    Replanner,
    RunReport,
    StepKind,
    load_of,
)
from raymoe.engine.sequence import SchedulerOutput
from raymoe.plan.plan import Plan
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import StepLoad
from raymoe.runtime.batch import InputBatch, Sequences
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload

DECODE = StepLoad(decode_rows=10, decode_context=100)
PREFILL = StepLoad(prompt_tokens=64, prompt_chunk=32)
MIXED = StepLoad(decode_rows=10, decode_context=100, prompt_tokens=64, prompt_chunk=32)


def seconds_of(load: StepLoad) -> float:
    return 0.01 * load.tokens


def step_of(*sequences: tuple[int, int]) -> SchedulerOutput:
    """Sequences of (new tokens, context)."""
    num_scheduled_tokens, contexts = (
        np.array(values, np.int32) for values in zip(*sequences, strict=True)
    )
    tokens, empty = int(num_scheduled_tokens.sum()), np.zeros(0, np.int32)
    return SchedulerOutput(
        InputBatch(
            token_ids=np.zeros(tokens, np.int64),
            positions=np.zeros(tokens, np.int32),
            sequences=Sequences(
                query_start=np.concatenate([[0], np.cumsum(num_scheduled_tokens)]).astype(np.int32),
                context_tokens=contexts,
                block_table=np.zeros((len(num_scheduled_tokens), 1), np.int32),
                prompt_tokens=np.zeros(len(num_scheduled_tokens), np.int32),
            ),
            logit_rows=np.zeros(0, np.int64),
        ),
        slots=np.arange(len(num_scheduled_tokens)),
        num_scheduled_tokens=num_scheduled_tokens,
        row_slots=empty,
        row_positions=empty,
        row_is_sample=np.zeros(0, np.bool_),
    )


def timeline(gpu_s: float, link_s: float) -> Timeline:
    spans = [
        Span(Task(op=op, layer=0, part=0, resource=lane), 0.0, end_s)
        for op, lane, end_s in (
            (Op.EXPERTS, Resource.GPU, gpu_s),
            (Op.W, Resource.HTOD, link_s),
        )
    ]
    return Timeline("t", tuple(spans))


def test_a_pass_is_seen_as_rows_that_decode_and_chunks_of_prompts() -> None:
    load = load_of(step_of((1, 50), (1, 70), (30, 30), (10, 90)))
    assert load == StepLoad(
        decode_rows=2, decode_context=60, prompt_tokens=40, prompt_chunk=20, prompt_spread=3.25
    )
    assert load_of(step_of((8, 8))).decode_rows == 0


@pytest.mark.parametrize(
    ("load", "kind"),
    [(DECODE, StepKind.DECODE), (PREFILL, StepKind.PREFILL), (MIXED, StepKind.MIXED)],
)
def test_what_is_learnt_of_one_kind_of_pass_changes_that_kind(
    load: StepLoad, kind: StepKind
) -> None:
    correction = Correction(seconds_of)
    correction.learn(load, 1.5 * seconds_of(load))
    assert correction.ratios == {kind: pytest.approx(1.5)}
    for other in (DECODE, PREFILL, MIXED):
        factor = 1.5 if other is load else 1.0
        assert correction(other) == pytest.approx(factor * seconds_of(other))


def test_a_lasting_change_is_followed_and_one_slow_pass_is_not() -> None:
    correction = Correction(seconds_of)
    for _ in range(50):
        correction.learn(DECODE, seconds_of(DECODE))
    correction.learn(DECODE, 3 * seconds_of(DECODE))
    assert correction(DECODE) == pytest.approx(1.2 * seconds_of(DECODE))
    for _ in range(60):
        correction.learn(DECODE, 2 * seconds_of(DECODE))
    assert correction(DECODE) == pytest.approx(2 * seconds_of(DECODE), rel=0.01)


def test_a_run_is_reported_with_gap_and_busy_shares_and_then_forgotten() -> None:
    accuracy = Accuracy(Correction(seconds_of))
    accuracy.record(step_of((1, 50)), timeline(gpu_s=0.02, link_s=0.01))
    accuracy.record(step_of((9, 9)), timeline(gpu_s=0.02, link_s=0.04))
    report = accuracy.report
    assert report.num_steps == 2
    assert report.predicted_s == pytest.approx(0.1)
    assert report.busy_s == {Resource.GPU: pytest.approx(0.04), Resource.HTOD: pytest.approx(0.05)}
    assert report.busy_share(Resource.GPU) == pytest.approx(2 / 3)
    assert report.busy_share(Resource.CPU) == 0.0
    assert str(report) == ("2 steps: predicted 0.1 s, measured 0.06 s, gap -40.0 %, link busy 83 %")
    accuracy.restart()
    assert accuracy.report == RunReport()
    assert accuracy.total == report
    assert report.num_steps == 2
    assert accuracy.last_step == (
        StepLoad(prompt_tokens=9, prompt_chunk=9),
        timeline(gpu_s=0.02, link_s=0.04),
    )
    assert accuracy.correction.ratios[StepKind.DECODE] == pytest.approx(2.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Rows are thought to generate 2,000 tokens, so few are planned to be live."""
    node = replace(hardware_preset("l4"), host_memory_bytes=140 << 30)
    workload = Workload(num_rows=20_000, prompt_tokens=100, generated_tokens=2000)
    policy = Policy(
        max_num_seqs=384,
        max_num_batched_tokens=1024,
        max_prefill_chunk_tokens=256,
        num_kv_blocks=13_000,
        steady_admission=True,
        device=DevicePolicy(num_micro_batches=4, expert_groups=8),
    )
    return find_plan(model_preset("mixtral-8x7b"), node, workload, policy=policy)


def replanned(plan: Plan, rows: int, lengths: tuple[int, int]) -> tuple[Policy | None, Accuracy]:
    accuracy = Accuracy(Correction(plan.step_times()))
    replanner = Replanner(plan, accuracy)
    for _ in range(rows):
        assert replanner.poll(20_000) is None
        replanner.record_row(*lengths)
    deadline_s = time.monotonic() + 60
    assert replanner.poll(20_000) is None
    policy = None
    while policy is None and replanner.is_planning and time.monotonic() < deadline_s:
        policy = replanner.poll(20_000)
        time.sleep(0.01)
    return policy, accuracy


def test_rows_that_end_early_let_more_sequences_run(plan: Plan) -> None:
    policy, accuracy = replanned(plan, plan.policy.max_num_seqs, (100, 300))
    assert policy is not None
    assert plan.policy.max_num_seqs < policy.max_num_seqs <= 4 * plan.policy.max_num_seqs
    assert policy.max_num_batched_tokens <= plan.policy.max_num_batched_tokens
    kept = replace(plan.policy, max_num_seqs=1, max_num_batched_tokens=1, steady_admission=False)
    assert kept == replace(policy, max_num_seqs=1, max_num_batched_tokens=1, steady_admission=False)
    observed = Workload(num_rows=20_000, prompt_tokens=100, generated_tokens=300)
    before_s, after_s = (plan.estimate(observed, each).seconds for each in (plan.policy, policy))
    assert after_s < 0.95 * before_s
    assert "planned again for 100 + 300 tokens a row" in str(accuracy.report)


def test_rows_as_planned_and_short_rests_change_nothing(plan: Plan) -> None:
    assert replanned(plan, plan.policy.max_num_seqs, (110, 1800))[0] is None
    accuracy = Accuracy(Correction(plan.step_times()))
    few = Workload(num_rows=10, prompt_tokens=100, generated_tokens=2)
    assert plan.estimate(few).seconds < MIN_LEFT_S
    assert Replanner(plan, accuracy).better(few, {}) is None
