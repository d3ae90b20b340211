"""What a device holds between the kernels of a layer."""

from hypothesis import given
from hypothesis import strategies as st

from raymoe.plan.footprint import device_footprint
from raymoe.plan.placement import Placement
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.work import ModelWork
from raymoe.specs.layers import GROUP_UNEVENNESS, MAX_TILE_ROWS, rows_at_once
from raymoe.specs.presets_models import model_preset

DEEPSEEK = model_preset("deepseek-v3")


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_rows_at_once_are_twice_a_share_or_all(num_rows: int, groups: int) -> None:
    rows = rows_at_once(num_rows, 1 / groups)
    wanted = GROUP_UNEVENNESS * num_rows / groups
    assert rows == num_rows or (rows % MAX_TILE_ROWS == 0 and rows >= wanted)
    assert rows <= min(num_rows, wanted + MAX_TILE_ROWS)
    assert groups > GROUP_UNEVENNESS or rows == num_rows


def test_groups_of_experts_need_room_for_their_rows_only() -> None:
    work = ModelWork.of(DEEPSEEK, 2)

    def intermediates(groups: int) -> int:
        device = DevicePolicy(num_micro_batches=1, expert_groups=groups, ring_slots=groups)
        policy = Policy(
            max_num_seqs=64, max_num_batched_tokens=16384, max_prefill_chunk_tokens=16384,
            num_kv_blocks=64, device=device,
        )  # fmt: skip
        placement = Placement.of(DEEPSEEK, "micro_batches", policy, 2)
        return device_footprint(DEEPSEEK, work, placement).bytes_of("intermediates")

    of_row = 2048 * 2 + 7168 * 4  # a gated product, and a result in float32
    all_rows, inputs = 8 * 16384 * of_row, 16384 * 7168 * 2
    in_dense_layers = 3 * 16384 * 18432 * 2
    assert all_rows / 4 + inputs < in_dense_layers
    assert intermediates(1) - intermediates(8) == all_rows + inputs - in_dense_layers
    assert intermediates(1) - intermediates(3) == (8 * 16384 - 683 * 128) * of_row
