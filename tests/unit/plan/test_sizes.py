"""Sizes of a point: they fit both memories, and leave neither empty."""

import random
from dataclasses import replace

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.footprint import device_footprint, host_footprint, kv_block_bytes
from raymoe.plan.placement import layer_sizes
from raymoe.plan.sizes import SearchPoint, Sizes
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.quantization import quantization_of
from raymoe.specs.workload import Workload
from raymoe.units import GIB
from tests.unit.plan.device_jobs import POINTS, device_job, random_jobs

ENDLESS = Workload(num_rows=10**7, prompt_tokens=200, generated_tokens=100)


@pytest.mark.parametrize("seed", range(20))
def test_memory_holds_the_sizes_of_every_point(seed: int) -> None:
    dice, job = random.Random(seed), next(random_jobs(seed))
    sizes = Sizes(job)
    for search_point in dice.sample(POINTS, 10):
        steps = sizes.placement(sizes.fixed(search_point), size_bits=dice.choice((None, 4, 7)))
        if steps is None:
            continue
        on_host = host_footprint(job.model, job.work, steps).total
        on_device = device_footprint(job.model, job.work, steps).total
        assert on_host <= job.hardware.host_memory_bytes
        assert on_device <= job.hardware.gpu_memory_bytes
        assert steps.policy.num_kv_blocks >= job.min_blocks
        assert (
            1
            <= steps.policy.max_num_seqs
            <= min(job.workload.num_rows, search_point.max_num_batched_tokens)
        )


@pytest.mark.parametrize("bits", [3, 7])
def test_rounded_sizes_have_few_leading_bits_and_waste_little(bits: int) -> None:
    job = device_job("mixtral-8x7b", hardware_preset("a5000"), ENDLESS)
    search_point = SearchPoint(0.75, 6, False, 2, 0.9, 32768)
    full, rounded = (Sizes(job).placement(search_point, size_bits=count) for count in (None, bits))
    assert full is not None
    assert rounded is not None
    batch, minimum = rounded.policy.max_num_seqs, 1 - 2.0 ** (1 - bits)
    assert batch % (1 << max(0, batch.bit_length() - bits)) == 0
    assert minimum**2 * full.policy.max_num_seqs <= batch <= full.policy.max_num_seqs


def test_rounding_takes_no_batch_more() -> None:
    workload = Workload(num_rows=2 * 283, prompt_tokens=20, generated_tokens=10)
    job = device_job("mixtral-8x7b", hardware_preset("a5000"), workload)
    share = 283 / Sizes(job).job.max_num_seqs(10**6, 1.0)
    steps = Sizes(job).placement(SearchPoint(share, 4, False, 2, 1.0, 8192), size_bits=7)
    assert steps is not None
    assert steps.policy.max_num_seqs == 283


@pytest.mark.parametrize("name", ["l4", "a5000", "h200"])
def test_an_endless_job_fills_both_memories(name: str) -> None:
    """There is no room for another expert of each layer, nor for another percent of KV."""
    job = device_job("mixtral-8x7b", hardware_preset(name), ENDLESS)
    steps = Sizes(job).placement(SearchPoint(1.0, 4, False, 2, 1.0, 32768))
    assert steps is not None
    on_device = device_footprint(job.model, job.work, steps)
    layers = layer_sizes(job.model, 2)
    is_all_resident = not steps.streamed_bytes
    expert = sum(layer.expert for layer in layers)
    assert is_all_resident or on_device.total + expert > job.hardware.gpu_memory_bytes
    on_host = host_footprint(job.model, job.work, steps)
    spare = job.hardware.host_memory_bytes - on_host.total
    is_cache_useful = steps.policy.max_num_seqs < steps.policy.max_num_batched_tokens
    assert not is_cache_useful or spare < 0.01 * on_host.bytes_of("KV cache")


def test_what_stays_on_the_device_leaves_its_room_on_the_host_to_the_cache() -> None:
    large, none = (
        device_job(
            "mixtral-8x7b", replace(hardware_preset("l4"), gpu_memory_bytes=gib * GIB), ENDLESS
        )
        for gib in (60, 12)
    )
    with_room, without = (
        Sizes(job).placement(SearchPoint(1.0, 4, False, 2, 1.0, 8192)) for job in (large, none)
    )
    assert with_room is not None
    assert without is not None
    kept = with_room.resident_bytes - without.resident_bytes
    more_blocks = with_room.policy.num_kv_blocks - without.policy.num_kv_blocks
    assert more_blocks * kv_block_bytes(large.work) == pytest.approx(kept, rel=0.01)


def test_a_model_larger_than_the_host_may_lie_on_both_sides() -> None:
    node = replace(hardware_preset("a100"), host_memory_bytes=60 * GIB)
    job = device_job("mixtral-8x7b", node, ENDLESS)
    assert job.model.weight_bytes(2) > node.host_memory_bytes
    steps = Sizes(job).placement(SearchPoint(1.0, 4, False, 2, 1.0, 4096))
    assert steps is not None
    assert steps.resident_bytes > 40 * GIB


def test_schedules_fix_their_knobs_and_equal_points_have_one_form() -> None:
    search_point = SearchPoint(1.0, 8, True, 15, 0.4, 4096)
    job = next(random_jobs(1))
    assert Sizes(job).fixed(search_point) == replace(search_point, look_ahead=7)
    assert Sizes(job, "vslpipe").fixed(search_point) == SearchPoint(1.0, 2, False, 0, 1.0, 4096)
    assert Sizes(job, "flexgen_s4").fixed(search_point) == SearchPoint(1.0, 8, False, 0, 0.0, 4096)
    one = Sizes(job).fixed(replace(search_point, num_micro_batches=1))
    assert one == SearchPoint(1.0, 1, False, 0, 0.4, 4096)


@pytest.mark.parametrize(("name", "memory"), [("a40", "host memory"), ("t4", "device memory")])
def test_what_does_not_fit_is_refused_with_the_bytes_missing(name: str, memory: str) -> None:
    node = hardware_preset(name)
    if memory == "device memory":
        node = replace(node, host_memory_bytes=2048 * GIB, gpu_memory_bytes=4 * GIB)
    sizes = Sizes(device_job("deepseek-v3", node, ENDLESS))
    assert sizes.placement(SearchPoint(0.125, 16, False, 1, 1.0, 1024)) is None
    with pytest.raises(InfeasiblePlanError, match=rf"GiB of {memory}.*GiB short"):
        sizes.refuse()


@pytest.mark.parametrize(
    ("name", "weights", "two_layers_fit"),
    [("deepseek-v3", "fp8", False), ("kimi-k2", "int4", True)],
)
def test_a_gpu_with_24_gb_holds_a_ring_of_experts_of_the_largest_models(
    name: str, weights: str, two_layers_fit: bool
) -> None:
    model = replace(model_preset(name), quantization=quantization_of(weights), dtype="bfloat16")
    job = device_job(
        model, replace(hardware_preset("a5000"), host_memory_bytes=1000 * GIB), ENDLESS
    )
    sizes = Sizes(job)
    search_point = SearchPoint(1.0, 4, True, 3, 0.6, 4096)
    assert (sizes.placement(search_point) is not None) == two_layers_fit
    steps = sizes.placement(replace(search_point, slot_layers=0.5))
    assert steps is not None
    assert steps.policy.max_num_seqs > 500
    assert steps.ring_slots == 4
    others = Sizes(job, "flexgen_s3")
    point = others.fixed(replace(search_point, slot_layers=0.5))
    assert (others.placement(point) is not None) == two_layers_fit
