"""MoE-Lightning (ASPLOS 2025), section 3.3: its case study of Mixtral-8x7B on an L4 host."""

import random

import pytest

from raymoe.plan.papers.hrm import (
    Hierarchy,
    Level,
    PaperModel,
    Roof,
    decode_attention,
    expert_ffn,
    place,
)
from raymoe.specs.hardware import HARDWARE_PRESETS
from raymoe.specs.presets_models import model_preset

# Figure 3 and the scripts of figures 4 and 5: the GPU's rate is its peak for sparse matrices.
L4_HOST = Hierarchy(Level(242e12, 300e9), Level(1.3e12, 100e9), 16e9)
MIXTRAL = PaperModel.of(model_preset("mixtral-8x7b"))
MICRO_BATCH = 128


def test_the_symbols_of_mixtral_8x7b() -> None:
    """Table 1 of MoE-Lightning, and the sizes of its experts and its KV."""
    assert (MIXTRAL.num_layers, MIXTRAL.hidden_size, MIXTRAL.expert_hidden) == (32, 4096, 14336)
    assert (MIXTRAL.num_experts, MIXTRAL.top_k, MIXTRAL.num_heads) == (8, 2, 32)
    assert MIXTRAL.expert_bytes == pytest.approx(352.3e6, rel=1e-4)
    assert MIXTRAL.expert_bytes_all == pytest.approx(90.19e9, rel=1e-4)
    assert MIXTRAL.dense_bytes_all == pytest.approx(2.68e9, rel=2e-3)
    assert MIXTRAL.kv_token_bytes_all == 131072


def test_turning_point_1_is_where_the_link_feeds_the_gpu_as_fast_as_the_cpu_computes() -> None:
    """Figures 4 and 5, P1: 1.3 TFLOP/s over 16 GB/s."""
    assert L4_HOST.turning_point_1() == (pytest.approx(81.25), pytest.approx(1.3e12))


def test_turning_point_2_of_the_experts_at_128_tokens() -> None:
    """Figure 5, P2: 31.9 operations a byte at 300 GB/s, brought by 16 GB/s; half a percent."""
    sits = place(L4_HOST, expert_ffn(MIXTRAL, 1024, MICRO_BATCH))
    assert sits.operation.near_intensity == pytest.approx(32.0, rel=0.005)
    assert sits.p2.flop_per_byte == pytest.approx(600.0, rel=0.005)
    assert sits.p2.flop_per_s == pytest.approx(9.6e12, rel=0.005)
    assert sits.balance == sits.p2, "the kernel reads device memory at the limit, so they meet"


@pytest.mark.parametrize(
    ("batch", "roof", "is_near_better"),
    [
        (32, Roof.LINK, False),
        (128, Roof.LINK, False),
        (1024, Roof.LINK, True),
        (16384, Roof.MEMORY, True),
    ],
)
def test_regions_of_the_batch_sizes_of_figure_5(
    batch: int, roof: Roof, is_near_better: bool
) -> None:
    """Two batches left of P1, one between P1 and P2, one to the right of P2."""
    sits = place(L4_HOST, expert_ffn(MIXTRAL, batch, MICRO_BATCH))
    assert sits.near_roof is roof
    assert sits.is_near_better is is_near_better
    assert (sits.operation.far_intensity > sits.p1.flop_per_byte) is is_near_better
    assert (sits.operation.far_intensity > sits.p2.flop_per_byte) is (roof is Roof.MEMORY)


@pytest.mark.parametrize(("kv_bits", "flop_per_byte"), [(16, 2.0), (4, 8.0)])
def test_attention_stays_on_the_cpu_in_16_and_4_bits(kv_bits: int, flop_per_byte: float) -> None:
    """Figure 4: both lines are left of P1, where host memory limits; intensities as drawn."""
    attention = decode_attention(MIXTRAL, 512, kv_bits=kv_bits, products=1)
    sits = place(L4_HOST, attention)
    assert attention.far_intensity == pytest.approx(flop_per_byte, rel=0.01)
    assert attention.far_intensity < sits.p1.flop_per_byte
    assert sits.point.flop_per_s == pytest.approx(100e9 * flop_per_byte, rel=0.01)
    assert not sits.is_near_better


def test_attention_has_an_intensity_of_its_own_and_the_experts_one_of_the_batch() -> None:
    """Section 3.3: attention does not gain from a batch, the experts do."""
    long, longer = (decode_attention(MIXTRAL, tokens).far_intensity for tokens in (4096, 65536))
    assert longer == pytest.approx(long, rel=0.01)
    small, large = (expert_ffn(MIXTRAL, size, MICRO_BATCH) for size in (256, 512))
    assert large.far_intensity == pytest.approx(2 * small.far_intensity)
    assert large.near_intensity == pytest.approx(small.near_intensity)


def test_a_batch_below_the_micro_batch_reads_the_experts_once() -> None:
    alone, cut = (expert_ffn(MIXTRAL, 32, size) for size in (32, MICRO_BATCH))
    assert cut.near_bytes == pytest.approx(alone.near_bytes)
    assert alone.near_bytes > MIXTRAL.layer_expert_bytes


def test_resident_weights_and_a_larger_batch_shift_the_same_way() -> None:
    """Section 3.3: both raise the intensity at the host."""
    doubled = expert_ffn(MIXTRAL, 512, MICRO_BATCH)
    halved = expert_ffn(MIXTRAL, 256, MICRO_BATCH, resident_fraction=0.5)
    assert halved.far_intensity == pytest.approx(doubled.far_intensity)
    resident = place(L4_HOST, expert_ffn(MIXTRAL, 256, MICRO_BATCH, resident_fraction=1.0))
    assert resident.near_roof is Roof.MEMORY


@pytest.mark.parametrize("name", HARDWARE_PRESETS)
def test_turning_points_are_where_the_roofs_cross(name: str) -> None:
    """On every node, at random intensities: speed is continuous and its roof changes at P1 and P2.

    Equations 7 to 11, whatever the numbers.
    """
    node = Hierarchy.of(HARDWARE_PRESETS[name])
    rng = random.Random()
    micro_batch = rng.uniform(1, 4096)
    ffn = expert_ffn(MIXTRAL, rng.uniform(1, 1e6), micro_batch)
    sits = place(node, ffn)
    assert sits.near_flop_per_s == pytest.approx(min(node.roofs(ffn).values()))
    assert node.link_bytes_per_s * sits.p2.flop_per_byte == pytest.approx(
        node.near.attainable(ffn.near_intensity)
    )
    assert node.far.attainable(sits.p1.flop_per_byte) == pytest.approx(
        node.link_bytes_per_s * sits.p1.flop_per_byte
    )
    if sits.balance is None:
        assert ffn.near_intensity > node.near.turning_point
    is_right_of_p2 = ffn.far_intensity > sits.p2.flop_per_byte
    assert is_right_of_p2 is (sits.near_roof is not Roof.LINK), f"micro-batch {micro_batch}"


def test_a_link_faster_than_host_memory_leaves_no_place_for_the_cpu() -> None:
    node = Hierarchy(Level(242e12, 300e9), Level(1.3e12, 100e9), 200e9)
    assert node.turning_point_1() == (0.0, 0.0)
    assert place(node, decode_attention(MIXTRAL, 512)).is_near_better
