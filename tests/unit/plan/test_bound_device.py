"""The bound of a job on a node with a GPU: by hand, and never above what any plan predicts."""

from dataclasses import replace

import pytest

from raymoe.plan.bound import Limit, device_bound
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HardwareSpec, hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB

MIXTRAL = model_preset("mixtral-8x7b")
WORK = ModelWork.of(MIXTRAL, 2)
L4 = hardware_preset("l4")
# 32 layers: projections of 4096 x (2 x 4096 + 2 x 1024), 8 experts of 3 x 4096 x 14336, a router
# of 8 x 4096; and the head, 32000 x 4096.
EXPERT, PROJECTIONS, ROUTER, HEAD = 3 * 4096 * 14336, 4096 * 10240, 8 * 4096, 32000 * 4096
WEIGHT_BYTES = 2 * (32 * (8 * EXPERT + PROJECTIONS + ROUTER) + HEAD)
KV_BYTES = 131_072


def test_the_seconds_of_each_part_by_hand() -> None:
    workload = Workload(num_rows=400, prompt_tokens=77, generated_tokens=64)
    bound = device_bound(WORK, L4, workload)
    assert bound.num_steps == 64
    streamed = WEIGHT_BYTES - L4.gpu_memory_bytes
    assert bound.link_s == pytest.approx(64 * streamed / L4.htod_bytes_per_s)
    contexts = 400 * sum(range(78, 78 + 63))
    kv_read = contexts * KV_BYTES
    assert bound.host_memory_s == pytest.approx((64 * streamed + kv_read) / L4.host_bytes_per_s)
    tokens = 400 * (77 + 63)
    flop = tokens * 2 * 32 * (2 * EXPERT + PROJECTIONS + ROUTER) + 400 * 64 * 2 * HEAD
    flop += 400 * 77 * 78 // 2 * 32 * 4 * 4096 + contexts * 32 * 4 * 4096
    assert bound.gpu_s == pytest.approx(flop / (L4.gpu_flop_per_s + L4.host_flop_per_s), rel=1e-3)
    assert bound.gpu_memory_s == pytest.approx(64 * WEIGHT_BYTES / L4.gpu_bytes_per_s)
    assert bound.limit is Limit.LINK
    assert bound.seconds == bound.link_s


def test_more_rows_than_memory_holds_take_more_passes() -> None:
    workload = Workload(num_rows=50_000, prompt_tokens=77, generated_tokens=64)
    memory = L4.host_memory_bytes + L4.gpu_memory_bytes - WEIGHT_BYTES
    held = 50_000 * KV_BYTES * sum(range(77, 77 + 64))
    bound = device_bound(WORK, L4, workload)
    assert bound.num_steps == pytest.approx(held / memory)
    assert bound.limit is Limit.GPU


def test_layers_with_a_window_read_no_more_than_it() -> None:
    model = model_preset("gpt-oss-20b")
    work = ModelWork.of(model, 2)
    row = Workload(num_rows=1, prompt_tokens=126, generated_tokens=5)
    tiny = replace(L4, gpu_memory_bytes=1)
    whole = device_bound(work, tiny, row)
    layer_bytes = 2 * 8 * 64 * 2
    contexts = 127 + 128 + 129 + 130
    windows = 127 + 128 + 128 + 128
    weights = whole.gpu_memory_s * L4.gpu_bytes_per_s - whole.num_steps
    kv_read = whole.host_memory_s * L4.host_bytes_per_s - weights
    assert kv_read == pytest.approx(12 * layer_bytes * (contexts + windows), abs=4096)


def check_plans(name: str, node: HardwareSpec, workload: Workload) -> None:
    model = model_preset(name)
    plan = find_plan(model, node, workload)
    device = plan.policy.device
    has_host_experts = device is None or device.cpu_experts_fraction > 0
    work = ModelWork.of(model, 2)
    bound = device_bound(work, node, workload, has_host_experts=has_host_experts)
    assert plan.job.seconds > bound.seconds
    bound = device_bound(work, node, workload)
    policy = PaperPolicies(model, node, workload).vslpipe()
    plan = find_plan(model, node, workload, schedule="vslpipe", policy=policy)
    assert plan.job.seconds > bound.seconds


def test_no_plan_predicts_less() -> None:
    check_plans("mixtral-8x7b", L4, Workload(num_rows=99, prompt_tokens=77, generated_tokens=8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("node", [L4, replace(hardware_preset("h100"), gpu_memory_bytes=16 * GIB)])
@pytest.mark.parametrize("tokens", [(77, 64), (512, 32)])
def test_no_plan_of_large_jobs_does(name: str, node: HardwareSpec, tokens: tuple[int, int]) -> None:
    prompt, generated = tokens
    check_plans(
        name, node, Workload(num_rows=1000, prompt_tokens=prompt, generated_tokens=generated)
    )
