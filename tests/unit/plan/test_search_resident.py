"""A model that lies on the GPU: chosen where it fits and is faster, sized, refused with numbers."""

from dataclasses import replace

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.placement import Placement
from raymoe.plan.policy import Policy
from raymoe.plan.search import Search, find_plan
from raymoe.plan.sizes import SearchPoint, Sizes
from raymoe.plan.step import StepModel
from raymoe.plan.work import ModelWork, StepLoad
from raymoe.schedule.graph import Resource
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GB, GIB
from tests.unit.plan.device_jobs import device_job

MIXTRAL, H200 = model_preset("mixtral-8x7b"), hardware_preset("h200")
WORKLOAD = Workload(num_rows=5000, prompt_tokens=200, generated_tokens=100)


def test_what_fits_on_the_gpu_stays_there() -> None:
    plan = find_plan(MIXTRAL, H200, WORKLOAD, max_model_len=4096)
    assert plan.schedule == "resident"
    assert plan.policy.device is None
    assert plan.decode.resources == (Resource.GPU,)
    on_device = plan.device_footprint
    assert on_device is not None
    stored = on_device.bytes_of("weights") + on_device.bytes_of("embedding, final norm and head")
    assert stored == pytest.approx(MIXTRAL.weight_bytes(2))
    assert on_device.bytes_of("KV cache") == plan.policy.num_kv_blocks * 32 * 32 * 2 * 8 * 128 * 2
    assert on_device.total <= H200.gpu_memory_bytes
    assert plan.footprint.total < 4 * GIB, "nothing of the model is on the host"


@pytest.mark.slow
def test_resident_is_never_slower_than_a_stream() -> None:
    """On the same node; the stream may keep all weights on the device, and its KV on the host."""
    resident = find_plan(MIXTRAL, H200, WORKLOAD, max_model_len=4096)
    stream = find_plan(MIXTRAL, H200, WORKLOAD, schedule="micro_batches", max_model_len=4096)
    assert resident.job.seconds < stream.job.seconds
    assert stream.steps.placement.streams


@pytest.mark.slow
def test_weights_that_leave_no_room_for_a_useful_batch_stream() -> None:
    """Long rows: the GPU holds a few beside the weights, a fast host hundreds."""
    node = replace(H200, gpu_memory_bytes=92 * GIB, host_bytes_per_s=300 * GB)
    workload = Workload(num_rows=5000, prompt_tokens=3500, generated_tokens=500)
    job = device_job(MIXTRAL, node, workload)
    resident = Search(Sizes(job, "resident")).best()
    assert resident is not None
    assert resident.placement.policy.max_num_seqs < 32
    plan = find_plan(MIXTRAL, node, workload, max_model_len=job.max_model_len)
    assert plan.schedule == "micro_batches"
    assert plan.job.seconds < resident.seconds


def test_the_batch_is_what_the_device_holds() -> None:
    """An endless job fills the GPU to the last percent of its cache."""
    job = device_job(MIXTRAL, H200, replace(WORKLOAD, num_rows=10**7))
    placement = Sizes(job, "resident").placement(SearchPoint(1.0, 1, False, 0, 0.0, 32768))
    assert placement is not None
    policy, footprint = placement.policy, job.device_footprint(placement)
    spare = H200.gpu_memory_bytes - footprint.total
    assert 0 <= spare < 0.01 * footprint.bytes_of("KV cache")
    held = 250 + 16  # tokens of a row half way, with half a block to spare
    assert policy.max_num_seqs == pytest.approx(policy.num_kv_blocks * 32 / held, rel=0.01)


def test_a_decode_pass_reads_the_weights_and_the_cache_once() -> None:
    policy = Policy(
        max_num_seqs=100, max_num_batched_tokens=100, max_prefill_chunk_tokens=1, num_kv_blocks=9400
    )
    placement = Placement.of(MIXTRAL, "resident", policy, 2)
    steps = StepModel(ModelWork.of(MIXTRAL, 2), H200, placement)
    load = StepLoad(decode_rows=100, decode_context=3000)
    cache_bytes = 100 * 3000 * 32 * 2 * 8 * 128 * 2
    read_s = (MIXTRAL.weight_bytes(2) + cache_bytes) / H200.gpu_bytes_per_s
    assert steps.seconds(load) == pytest.approx(steps.timeline(load).makespan_s)
    assert read_s < steps.seconds(load) < 1.2 * read_s
    assert steps.seconds(StepLoad()) == 0


def test_a_model_that_does_not_fit_is_refused_with_the_bytes_missing() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"on the GPU alone needs .*GiB short"):
        find_plan(MIXTRAL, hardware_preset("l4"), WORKLOAD, schedule="resident")


def test_a_given_policy_is_taken_or_refused() -> None:
    policy = Policy(
        max_num_seqs=7, max_num_batched_tokens=256, max_prefill_chunk_tokens=64, num_kv_blocks=500
    )
    plan = find_plan(MIXTRAL, H200, WORKLOAD, schedule="resident", policy=policy)
    assert (plan.policy, plan.schedule) == (policy, "resident")
    huge = replace(policy, num_kv_blocks=10**6)
    with pytest.raises(InfeasiblePlanError, match="KV cache"):
        find_plan(MIXTRAL, H200, WORKLOAD, schedule="resident", policy=huge)


@pytest.mark.slow
def test_models_that_fit_no_host_may_lie_on_the_device() -> None:
    node = replace(H200, host_memory_bytes=8 * GIB)
    plan = find_plan(MIXTRAL, node, WORKLOAD, max_model_len=4096)
    assert plan.schedule == "resident"
