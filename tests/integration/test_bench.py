"""`raymoe bench` on a tiny shape: every figure is there and the contenders did the same work."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from raymoe.bench.kernels import measure_kernels, quantised_experts_job
from raymoe.bench.steps import StepKind, StepPair, compare_steps, predict_step, times_by_kind
from raymoe.bench.suite import run_suite
from raymoe.bench.workloads import WORKLOADS, make_checkpoint, make_prompts
from raymoe.errors import ConfigError
from raymoe.measure.jobs import (
    AttentionShape,
    ExpertsShape,
    StateShape,
    decode_job,
    experts_job,
    linear_job,
    prefill_job,
    scan_job,
)
from raymoe.plan.work import MicroBatchShape
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Mxfp4


@pytest.mark.slow
def test_both_contenders_generate_every_token_and_are_set_beside_the_bound(tmp_path: Path) -> None:
    results = list(
        run_suite(
            shapes=["tiny"],
            workloads=["smoke"],
            contenders=["raymoe", "transformers"],
            repetitions=1,
            num_threads=2,
            has_phases=True,
            directory=tmp_path,
            report=print,
        )
    )
    assert [result.contender for result in results] == ["raymoe", "transformers"]
    for result in results:
        figures = json.loads(result.to_json())
        assert figures["generated_tokens"] == 8 * 8
        assert 0 < figures["share_of_bound"] < 1
        assert figures["tokens_per_s"] == pytest.approx(64 / figures["total_s"])
        assert figures["prefill_s"] > 0
        assert figures["peak_rss_bytes"] > 100e6


@pytest.mark.slow
def test_kernels_are_held_against_the_limit_that_binds_them() -> None:
    heads = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32)
    experts = ExpertsShape(hidden_size=512, expert_size=512, num_experts=4, top_k=2)
    makers = [
        lambda: decode_job(heads, 64, 512),
        lambda: prefill_job(heads, 4, 512),
        lambda: experts_job(experts, 512),
        lambda: linear_job(1024, 1024, 512),
    ]
    rates = list(measure_kernels(makers, num_threads=2, repetitions=1))
    assert [rate.is_memory_bound for rate in rates] == [True, False, False, False]
    assert rates[0].case == "8/2 heads x 32, 64 x 512"
    for rate in rates:
        assert 0 < rate.share_of_limit < 1.5  # a limit is a measurement too
        assert rate.bytes_per_s > 0
        assert rate.flop_per_s > 0


@pytest.mark.slow
def test_a_job_on_codes_reads_the_bytes_that_are_stored() -> None:
    shape = ExpertsShape(hidden_size=1024, expert_size=512, num_experts=4, top_k=2)
    (rate,) = measure_kernels(
        [lambda: quantised_experts_job(shape, 64, Mxfp4())], num_threads=2, repetitions=1
    )
    assert rate.kernel == "experts in mxfp4"
    parameters = 3 * 1024 * 512
    operations = 2 * 64 * 2 * parameters
    num_bytes = 4 * parameters * 17 // 32  # 4 bits, and 8 for each 32 elements
    assert rate.flop_per_s / rate.bytes_per_s == pytest.approx(operations / num_bytes)
    assert 0 < rate.share_of_limit < 1.5


@pytest.mark.parametrize("has_int8_kv", [False, True])
def test_a_decode_job_reads_the_keys_and_values_of_every_token(has_int8_kv: bool) -> None:
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32, has_int8_kv=has_int8_kv)
    job = decode_job(shape, 3, 64)
    cache = job.calls[0].args[3]  # type: ignore[attr-defined]
    assert job.bytes_per_call == cache.numel() * cache.itemsize
    assert len(job.calls) * job.bytes_per_call >= 512 << 20


def test_a_decode_job_reads_shared_tokens_once() -> None:
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32)
    job = decode_job(shape, 3, 128, shared_tokens=96)
    table = job.calls[0].args[4].block_table  # type: ignore[attr-defined]
    assert torch.equal(table[:, :3], table[:1, :3].expand(3, -1))
    assert table[:, 3].unique().numel() == 3
    assert job.bytes_per_call == (96 + 3 * 32) * shape.kv_bytes_per_token


def test_a_step_of_states_reads_and_writes_each_of_them() -> None:
    shape = StateShape(num_groups=2, num_heads=4, key_dim=16, value_dim=32)
    job = scan_job(shape, 8, 1)
    states = job.calls[0].args[5]  # type: ignore[attr-defined]
    assert job.updates
    assert job.bytes_per_call == 2 * states.nbytes
    assert job.flop_per_call == 7 * states.numel()
    (rate,) = measure_kernels(
        [lambda: dataclasses.replace(job, calls=job.calls[:1000])], num_threads=2, repetitions=1
    )
    assert rate.is_memory_bound
    assert 0 < rate.share_of_limit < 1.5


@pytest.mark.slow
def test_passes_of_a_job_are_set_beside_their_prediction(tmp_path: Path) -> None:
    model = make_checkpoint("tiny", tmp_path)
    node = HardwareSpec(
        name="node", num_cores=2, host_memory_bytes=4 << 30, host_bytes_per_s=1e9,
        host_flop_per_s=1e11,
    )  # fmt: skip
    workload = WORKLOADS["smoke"]
    runs = compare_steps(model, node, workload, repetitions=2)
    assert [len(run) for run in runs] == [workload.generated_tokens] * 2
    prompt_tokens = sum(workload.prompt_lengths())
    for run in runs:
        prefill, *decodes = [pair.shape for pair in run]
        assert prefill.tokens == prefill.host.rows == prompt_tokens
        assert prefill.host.decode_rows == 0
        assert prefill.host.prompt_pairs == sum(n * (n + 1) // 2 for n in workload.prompt_lengths())
        for step, shape in enumerate(decodes, 1):
            contexts = prompt_tokens + workload.num_rows * step
            assert shape == MicroBatchShape.decode(workload.num_rows, contexts / workload.num_rows)
    kinds = times_by_kind(runs)
    assert [(each.kind, each.num_steps) for each in kinds] == [
        ("prefill", 1), ("decode", 7), ("all", 8),
    ]  # fmt: skip
    spec = ModelSpec.from_directory(model)
    predicted = sum(predict_step(spec, node, pair.shape).makespan_s for pair in runs[0])
    assert kinds[-1].predicted_s == pytest.approx(predicted)
    for each in kinds:
        assert each.gap == pytest.approx(each.predicted_s / each.measured_s - 1)
        assert set(each.gap_by_op) == {"embed", "pre", "attn", "post", "experts", "head"}


def pair_of(shape: MicroBatchShape, predicted_s: float, measured_s: float) -> StepPair:
    task = Task(op=Op.HEAD, layer=0, part=0, resource=Resource.CPU)
    timelines = [Timeline("", (Span(task, 0.0, each),)) for each in (predicted_s, measured_s)]
    return StepPair(shape, *timelines)


def test_times_of_a_kind_are_medians_over_runs_of_sums_over_passes() -> None:
    decode, prefill = MicroBatchShape.decode(4, 9), MicroBatchShape.prefill(2, 9, is_on_host=True)
    mixed = prefill + MicroBatchShape.decode(1, 9)
    runs = [
        [pair_of(prefill, 8, 4 * slow), pair_of(decode, 1, slow), pair_of(decode, 2, 2 * slow)]
        for slow in (1.0, 9.0, 2.0)
    ]
    times = {each.kind: each for each in times_by_kind(runs)}
    assert set(times) == {"prefill", "decode", "all"}
    assert (times["decode"].predicted_s, times["decode"].measured_s) == (3, 6)
    assert times["decode"].gap == times["decode"].gap_by_op["head"] == pytest.approx(-0.5)
    assert times["prefill"].gap == pytest.approx(0.0)
    assert StepKind.of(mixed) is StepKind.MIXED


def test_prompts_have_the_lengths_of_their_workload() -> None:
    for workload in WORKLOADS.values():
        prompts = make_prompts(workload, 1000)
        lengths = sorted(map(len, prompts))
        assert len(prompts) == workload.num_rows
        assert sum(lengths) / len(lengths) == pytest.approx(workload.mean_prompt_tokens, rel=0.02)
        assert lengths[0] < workload.mean_prompt_tokens < lengths[-1]


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        make_checkpoint("tiny", tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_an_unknown_shape_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixtral"):
        make_checkpoint("enormous", tmp_path)
