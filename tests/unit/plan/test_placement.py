"""Pages: every byte is resident or in the pages of those who read it, and no memory stays idle."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.errors import ConfigError
from raymoe.plan.placement import PAGE_ALIGNMENT, LayerBytes, layer_sizes
from raymoe.plan.policy import PAGE_BYTES, DevicePolicy
from raymoe.specs.layer_weights import layer_parameters, layer_parts
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from tests.unit.plan.device_jobs import placed

LAYERS = st.builds(
    LayerBytes,
    attention=st.integers(1, 3000),
    shared=st.sampled_from([0, 0, 700]),
    expert=st.integers(1, 1500),
    num_experts=st.integers(1, 5),
)
SIZES = st.lists(LAYERS, min_size=1, max_size=9).map(tuple)
BUDGETS = st.integers(0, 30_000)
CONFIGS = [
    {"model_type": "mixtral"},
    {"model_type": "qwen2_moe"},
    {"model_type": "qwen3_moe", "mlp_only_layers": [0, 3]},
    {"model_type": "olmoe"},
    {"model_type": "llama", "mlp_bias": True},
]
MIXTRAL = LayerBytes(attention=84_000_000, shared=0, expert=352_000_000, num_experts=8)


@given(SIZES, st.integers(1, 5000), BUDGETS)
def test_a_byte_is_resident_or_in_one_page(
    sizes: tuple[LayerBytes, ...], page_bytes: int, budget: int
) -> None:
    cut = placed(sizes, page_bytes=page_bytes, resident_bytes=budget)
    assert cut.resident_bytes + cut.streamed_bytes == sum(size.total for size in sizes)
    assert cut.resident_bytes == sum(
        size.common * layer.is_common_resident + size.expert * layer.resident_experts
        for size, layer in zip(sizes, cut.layers, strict=True)
    )


@given(SIZES, st.integers(1, 5000), BUDGETS)
def test_whoever_reads_a_part_waits_for_all_pages_that_hold_some_of_it(
    sizes: tuple[LayerBytes, ...], page_bytes: int, budget: int
) -> None:
    cut = placed(sizes, page_bytes=page_bytes, resident_bytes=budget)
    for size, pages in zip(sizes, cut.layers, strict=True):
        owners = "" if pages.is_common_resident else "a" * size.attention + "s" * size.shared
        owners += "e" * size.expert * (size.num_experts - pages.resident_experts)
        starts = range(0, len(owners), cut.page_length)
        held = [set(owners[start : start + cut.page_length]) for start in starts]
        assert pages.num_pages == len(held)
        assert pages.attention_pages == tuple(p for p, has in enumerate(held) if has & {"a", "s"})
        assert pages.expert_pages == tuple(p for p, has in enumerate(held) if has & {"e", "s"})


@given(SIZES, st.integers(1, 5000), BUDGETS)
def test_pages_are_full_but_for_the_last_and_fit_their_slot(
    sizes: tuple[LayerBytes, ...], page_bytes: int, budget: int
) -> None:
    cut = placed(sizes, page_bytes=page_bytes, resident_bytes=budget)
    assert cut.page_length % PAGE_ALIGNMENT == 0
    assert cut.page_length < page_bytes + PAGE_ALIGNMENT
    for num_bytes in (layer.page_bytes for layer in cut.layers):
        assert all(size == cut.page_length for size in num_bytes[:-1])
        assert all(0 < size <= cut.page_length for size in num_bytes)
        assert 2 * sum(num_bytes) <= cut.slots_bytes


@given(SIZES, st.integers(1, 5000), BUDGETS, st.integers(2, 6))
def test_groups_divide_the_experts_that_stream(
    sizes: tuple[LayerBytes, ...], page_bytes: int, budget: int, num_groups: int
) -> None:
    whole = placed(sizes, page_bytes=page_bytes, resident_bytes=budget)
    cut = placed(
        sizes,
        page_bytes=page_bytes,
        resident_bytes=budget,
        num_groups=num_groups,
        ring_slots=2,
    )
    resident = [layer.resident_experts for layer in cut.layers]
    assert resident == [layer.resident_experts for layer in whole.layers]
    assert cut.streamed_bytes == whole.streamed_bytes
    for i, size in enumerate(sizes):
        pages, num_streamed = cut.layers[i], size.num_experts - cut.layers[i].resident_experts
        groups, num_bytes = pages.groups, pages.page_bytes
        assert len(groups) == len(pages.group_pages) == min(num_groups, num_streamed)
        assert [n for group in groups for n in group] == list(range(size.num_experts))[
            : size.num_experts if groups else 0
        ]
        assert sum(pages.group_shares) == pytest.approx(1.0 if groups else 0.0)
        common = 0 if cut.layers[i].is_common_resident else size.common
        assert sum(num_bytes[: pages.num_common_pages]) == common <= cut.max_common_bytes
        assert all(page < pages.num_common_pages for page in pages.attention_pages)
        for number, (group, grouped) in enumerate(zip(groups, pages.group_pages, strict=True)):
            streamed = len(group) - (0 if number else cut.layers[i].resident_experts)
            assert sum(num_bytes[page] for page in grouped) == streamed * size.expert
            assert streamed * size.expert <= cut.max_group_bytes
            assert set(grouped) <= set(pages.expert_pages)
    assert cut.slots_bytes == 2 * cut.max_common_bytes + 2 * cut.max_group_bytes


@given(SIZES, BUDGETS)
def test_nothing_that_streams_would_fit_in_what_is_left(
    sizes: tuple[LayerBytes, ...], budget: int
) -> None:
    cut = placed(sizes, resident_bytes=budget)
    left = budget - cut.resident_bytes
    assert left >= 0
    for size, layer in zip(sizes, cut.layers, strict=True):
        assert layer.is_common_resident or size.common > left
        assert layer.resident_experts == size.num_experts or size.expert > left


@given(LAYERS, st.integers(1, 40), BUDGETS)
def test_equal_layers_differ_by_one_expert_at_most(
    size: LayerBytes, count: int, budget: int
) -> None:
    cut = placed((size,) * count, resident_bytes=budget)
    resident = [layer.resident_experts for layer in cut.layers]
    assert max(resident) - min(resident) <= 1


def test_a_few_experts_stay_in_layers_far_apart() -> None:
    sizes = (MIXTRAL,) * 32
    budget = 32 * MIXTRAL.common + 5 * MIXTRAL.expert - 1
    cut = placed(sizes, resident_bytes=budget)
    assert [i for i, layer in enumerate(cut.layers) if layer.resident_experts] == [0, 8, 16, 24]
    assert all(layer.is_common_resident for layer in cut.layers)


def test_a_share_below_one_expert_a_layer_is_used() -> None:
    """MoE-Lightning truncates the ratio to whole experts of a layer, which left none resident."""
    cut = placed((MIXTRAL,) * 32, resident_bytes=int(0.1 * 32 * MIXTRAL.total))
    assert any(layer.resident_experts for layer in cut.layers)
    assert cut.resident_bytes > 0.095 * 32 * MIXTRAL.total


def test_a_model_that_fits_has_no_pages() -> None:
    cut = placed((MIXTRAL,) * 3, resident_bytes=3 * MIXTRAL.total)
    assert all(pages.num_pages == 0 for pages in cut.layers)
    assert (cut.streamed_bytes, cut.slots_bytes) == (0, 0)
    assert cut.resident_bytes == 3 * MIXTRAL.total


def test_mixtral_streams_its_published_bytes() -> None:
    """Bytes of 8 experts in 32 layers and of attention: 90.19 and 2.68 GB in 16-bit numbers."""
    model = model_preset("mixtral-8x7b")
    sizes = layer_sizes(model, 2)
    cut = placed(sizes, resident_bytes=sum(size.common for size in sizes))
    assert cut.streamed_bytes == pytest.approx(90.19e9, rel=1e-4)
    assert cut.resident_bytes == pytest.approx(2.68e9, rel=0.01)
    assert {pages.num_pages for pages in cut.layers} == {42}
    assert cut.page_length <= PAGE_BYTES


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config["model_type"]))
def test_parts_of_a_layer_make_the_layer(config: dict[str, object]) -> None:
    model = ModelSpec.from_config(config)
    for i, layer in enumerate(model.layers):
        size = LayerBytes.of(model, i, 2)
        assert size.total == 2 * layer_parameters(layer, model.hidden_size)
        assert size.attention > 0
    cut = placed(layer_sizes(model, 2))
    layers = sum(layer_parameters(layer, model.hidden_size) for layer in model.layers)
    assert cut.streamed_bytes == 2 * layers


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config["model_type"]))
def test_parts_are_as_large_as_those_that_lie_in_memory(config: dict[str, object]) -> None:
    model = ModelSpec.from_config(config)
    for i, layer in enumerate(model.layers):
        size = LayerBytes.of(model, i, 2)
        lie = {
            part.name: 2 * sum(map(prod, part.shapes.values()))
            for part in layer_parts(layer, model.hidden_size)
        }
        assert lie["attention"] == size.attention
        if "expert 0" in lie:
            assert lie["expert 0"] == size.expert
            assert lie.get("common", 0) == size.shared
        else:
            assert lie["common"] == size.expert


def test_the_shared_expert_is_apart() -> None:
    model = ModelSpec.from_config({"model_type": "qwen2_moe"})
    size = LayerBytes.of(model, 0, 2)
    assert size.shared == 2 * (3 * 2048 * 5632 + 2048)
    assert size.expert == 2 * 3 * 2048 * 1408


@pytest.mark.parametrize("sizes", [{"page_bytes": 0}, {"resident_bytes": -1}])
def test_sizes_out_of_range_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"DevicePolicy\.(page|resident)_bytes is"):
        DevicePolicy(**sizes)


@given(SIZES, st.integers(1, 5000), BUDGETS, st.integers(1, 4), st.floats(0, 1))
def test_a_step_loads_the_pages_that_hold_more_than_experts_of_the_cores(
    sizes: tuple[LayerBytes, ...], page_bytes: int, budget: int, num_groups: int, fraction: float
) -> None:
    device = {"page_bytes": page_bytes, "resident_bytes": budget, "num_groups": num_groups}
    cut = placed(sizes, **device, ring_slots=1)
    planned = placed(
        sizes,
        **device,
        ring_slots=1,
        cpu_experts_fraction=fraction,
        is_cpu_experts_fraction_fixed=True,
    )
    (split,) = planned.splits
    for i, size in enumerate(sizes):
        pages, whole = split.layers[i], cut.layers[i]
        num_streamed = size.num_experts - whole.resident_experts
        on_host = round(fraction * num_streamed) if size.num_experts > 1 else 0
        assert len(pages.host_experts) == on_host
        assert pages.host_experts.stop == size.num_experts * bool(on_host)
        left = sum(whole.page_bytes) - on_host * size.expert
        begins = [sum(whole.page_bytes[:page]) for page in range(whole.num_pages)]
        assert pages.num_pages == sum(begin < left for begin in begins)
        assert pages.num_pages + pages.num_host_pages == whole.num_pages
        assert pages.page_bytes == whole.page_bytes[: pages.num_pages]
        on_device = sum(pages.group_shares) + pages.host_share
        assert on_device == pytest.approx(1.0 if pages.group_bounds or on_host else 0.0)
        assert len(pages.groups) in {0, len(pages.group_pages), 1}
