"""Plans of models whose layers keep states: on the GPU, in host memory, and what moves between."""

from dataclasses import replace

import pytest

from raymoe.kernels.gpu_state import scan
from raymoe.plan.bound import device_bound
from raymoe.plan.cost import DEVICE_STATE_EFFICIENCY, DEVICE_STATE_FLOP_SHARE, StepCost
from raymoe.plan.footprint import SCAN_BYTES, device_footprint, host_footprint
from raymoe.plan.placement import Placement
from raymoe.plan.plan import Plan
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.plan.step import StepModel
from raymoe.plan.work import MicroBatchShape, ModelWork, StepLoad
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.placement import LayerPlacement
from raymoe.specs.hardware import HARDWARE_PRESETS
from raymoe.specs.presets_models import model_preset
from raymoe.specs.quantization import quantization_of
from raymoe.specs.workload import Workload
from raymoe.units import GIB
from tests.unit.plan.test_cost import device_curves

MODEL = model_preset("qwen3.5-35b-a3b")
IN_4_BITS = replace(MODEL, quantization=quantization_of("int4"), dtype="bfloat16")
WORK = ModelWork.of(MODEL, 2)
NODE = HARDWARE_PRESETS["l40s"]
WORKLOAD = Workload(num_rows=20_000, prompt_tokens=512, generated_tokens=256)
POLICY = Policy(
    max_num_seqs=100,
    max_num_batched_tokens=1024,
    max_prefill_chunk_tokens=512,
    num_kv_blocks=2000,
)
STATE, KV = 0, 3  # layers of each kind
ROWS = 50
LAYERS = tuple(
    LayerPlacement(states_on_device=layer.attention.state_bytes > 0) for layer in WORK.layers
)


def steps(*, states_on_device: bool, **fields: int) -> Placement:
    device = DevicePolicy(states_on_device=states_on_device, **fields)
    return Placement.of(MODEL, "micro_batches", replace(POLICY, device=device), 2)


def cost(node=NODE, *, has_states: bool = True) -> StepCost:
    shape = MicroBatchShape.decode(ROWS, 600, cpu_attention_fraction=0.5)
    return StepCost(WORK, node, (shape,), layers=LAYERS if has_states else ())


def seconds(of: StepCost, op: Op, resource: Resource) -> float:
    task = Task(op=op, layer=STATE, part=0, resource=resource)
    overhead = Task(op=Op.SYNC, layer=STATE, part=0, resource=resource)
    assert of.duration_s(overhead) == 0
    return of.kernel_s(task)


def test_the_preset_has_states_and_kv_where_the_tests_expect_them() -> None:
    assert WORK.layers[STATE].attention.state_bytes
    assert not WORK.layers[STATE].attention.kv_token_bytes
    assert WORK.layers[KV].attention.kv_token_bytes


@pytest.mark.parametrize("op", [Op.ATTN, Op.GATTN])
def test_a_gpu_updates_states_of_all_rows_at_its_memory_s_rate(op: Op) -> None:
    """Of the host's share too: the states of its rows are on the GPU."""
    num_bytes = 2 * ROWS * WORK.layers[STATE].attention.state_bytes
    expected = num_bytes / (DEVICE_STATE_EFFICIENCY * NODE.gpu_bytes_per_s)
    assert seconds(cost(), op, Resource.GPU) == pytest.approx(expected)
    measured = replace(device_curves(), state_bytes_per_s=3e11)
    node = replace(NODE, device_curves=measured)
    assert seconds(cost(node), op, Resource.GPU) == pytest.approx(num_bytes / 3e11)


def test_prompts_cost_operations_not_bytes() -> None:
    (shape,) = StepLoad(prompt_tokens=4096, prompt_chunk=512).micro_batches(1, 0.0)
    of = StepCost(WORK, NODE, (shape,), layers=LAYERS)
    flop = 4096 * WORK.layers[STATE].attention.token_flop
    expected = flop / (DEVICE_STATE_FLOP_SHARE * NODE.gpu_flop_per_s)
    assert seconds(of, Op.GATTN, Resource.GPU) == pytest.approx(expected)


def test_the_host_reads_no_states_that_the_gpu_has() -> None:
    on_device, on_host = (cost(has_states=has_states).rates for has_states in (True, False))
    read = on_host.read_bytes - on_device.read_bytes
    assert read == pytest.approx(2 * WORK.state_bytes * ROWS / 2 / len(WORK.layers))


def test_states_count_where_they_are() -> None:
    on_device, on_host = steps(states_on_device=True), steps(states_on_device=False)
    states, kv_bytes = POLICY.num_state_slots * WORK.state_bytes, 2000 * 32 * WORK.kv_token_bytes
    assert host_footprint(MODEL, WORK, on_host).bytes_of("KV cache") == kv_bytes + states
    assert host_footprint(MODEL, WORK, on_device).bytes_of("KV cache") == kv_bytes
    assert device_footprint(MODEL, WORK, on_host).bytes_of("states") == 0
    assert device_footprint(MODEL, WORK, on_device).bytes_of("states") == states
    resident = device_footprint(MODEL, WORK, Placement.of(MODEL, "resident", POLICY, 2))
    assert resident.bytes_of("KV cache") == kv_bytes + states


def test_chunks_of_prompts_count_as_intermediates() -> None:
    assert SCAN_BYTES == 8 * scan.CHUNK_BYTES
    on_device, on_host = (
        device_footprint(MODEL, WORK, steps(states_on_device=where)).bytes_of("intermediates")
        for where in (True, False)
    )
    assert on_device > on_host + SCAN_BYTES


def test_rows_attend_on_the_gpu_only_if_their_states_are_there() -> None:
    assert steps(states_on_device=False).attends_on_host
    assert not steps(states_on_device=True).attends_on_host


@pytest.mark.parametrize("schedule", ["in_place", "resident"])
def test_a_policy_without_a_device_to_stream_to_stays_as_it_was_given(schedule: str) -> None:
    assert Placement.of(MODEL, schedule, POLICY, 2).policy == POLICY


@pytest.mark.parametrize("fields", [{}, {"expert_groups": 8, "ring_slots": 4}], ids=str)
def test_every_split_of_the_experts_keeps_the_states_on_the_gpu(fields: dict[str, int]) -> None:
    planned = steps(states_on_device=True, cpu_experts_fraction=0.5, **fields)
    assert len(planned.splits) == 3
    for split in planned.splits:
        assert [layer.states_on_device for layer in split.layers] == [
            layer.attention.state_bytes > 0 for layer in WORK.layers
        ]


def test_extrapolated_steps_are_as_long_as_simulated_ones() -> None:
    load = StepLoad(decode_rows=80, decode_context=600, prompt_tokens=512, prompt_chunk=256)
    for where in (True, False):
        step = StepModel(WORK, NODE, steps(states_on_device=where))
        whole_s = step.timeline(load).makespan_s
        assert step.seconds(load) == pytest.approx(whole_s, rel=0.05)
        assert step.min_s(load) <= whole_s * 1.0001


def plan(model=IN_4_BITS, node=NODE, **options: object) -> Plan:
    return find_plan(model, node, WORKLOAD, **options)


@pytest.mark.slow
def test_a_model_that_fits_is_resident_with_the_states_of_its_rows() -> None:
    resident = plan()
    assert resident.schedule == "resident"
    assert resident.device_footprint is not None
    assert resident.device_footprint.total <= NODE.gpu_memory_bytes
    assert resident.policy.max_num_seqs > 200
    # The longest row of the model fits, though it takes more blocks than all others have.
    assert resident.policy.num_kv_blocks * 32 >= MODEL.max_model_len


@pytest.mark.slow
def test_rows_are_few_where_the_longest_one_takes_most_of_the_host() -> None:
    """Its KV is there, which would come with the states of hundreds of other rows."""
    small = replace(NODE, host_memory_bytes=MODEL.weight_bytes(2) - 30 * GIB)
    few = find_plan(MODEL, small, WORKLOAD, schedule="cgopipe")
    assert few.policy.num_kv_blocks * 32 == MODEL.max_model_len
    assert 1 < few.policy.max_num_seqs < 200
    assert few.footprint.total <= small.host_memory_bytes


@pytest.mark.slow
def test_streamed_plans_have_states_on_the_gpu_where_host_memory_is_slow() -> None:
    slow = replace(NODE, host_bytes_per_s=NODE.host_bytes_per_s / 20)
    streamed = plan(node=slow, schedule="micro_batches")
    device = streamed.policy.device
    assert device is not None
    assert device.states_on_device
    assert "states on the GPU" in streamed.describe()
    small = replace(NODE, gpu_memory_bytes=12 * GIB, host_memory_bytes=400 * GIB)
    on_host = plan(node=small, schedule="micro_batches").policy.device
    assert on_host is not None
    assert not on_host.states_on_device


def test_a_bound_lets_states_be_on_either_side() -> None:
    bound, updated = device_bound(ModelWork.of(IN_4_BITS, 2), NODE, WORKLOAD), 2 * WORK.state_bytes
    both = NODE.gpu_bytes_per_s + NODE.host_bytes_per_s
    assert bound.seconds >= 20_000 * 255 * updated / both
    assert bound.seconds <= plan().job.seconds
