"""Weights in pages: what the device finds in its slots is what the checkpoint holds."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from raymoe.codecs import Weight
from raymoe.device.device import NoPinning
from raymoe.kernels.ngrams import table_view
from raymoe.memory.arena import HostArena, SharedArena, aligned_bytes
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weight_pages import WeightPages
from raymoe.memory.weights import WeightStore
from raymoe.plan.placement import layer_sizes
from raymoe.specs.attention.ngrams import NGRAM_TABLE
from raymoe.specs.layer_weights import layer_prefix
from raymoe.specs.model import ModelSpec
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS
from tests.unit.plan.device_jobs import placed, placed_model

NAMES = [
    next(c.name for c in CONFIGURATIONS if c.family == family)
    for family in ("mixtral", "qwen2_moe", "llama")
]


def allocate(num_bytes: int) -> Tensor:
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("resident_bytes", [0, 40_000, 1 << 30])
@pytest.mark.parametrize("page_bytes", [3_000, 1 << 30])
@pytest.mark.parametrize("name", NAMES)
def test_the_device_finds_each_weight_in_the_slot_of_its_layer(
    name: str, page_bytes: int, resident_bytes: int, num_groups: int
) -> None:
    directory = get_case(name).directory
    spec = ModelSpec.from_directory(directory)
    store = WeightStore.open(spec, directory)
    cut = placed(
        layer_sizes(spec, 4),
        page_bytes=page_bytes,
        resident_bytes=resident_bytes,
        num_groups=num_groups,
        ring_slots=2,
    )
    pages = WeightPages(
        spec,
        store,
        cut.layers,
        dtype=torch.float32,
        allocate_on_device=allocate,
        ring_slots=cut.ring_slots,
    )
    assert pages.host_memory.nbytes >= cut.streamed_bytes
    slot = 1
    for layer in range(spec.num_layers):
        num_pages = cut.layers[layer].num_pages
        groups = cut.layers[layer].group_pages
        slots = {page: 2 + group % 2 for group, grouped in enumerate(groups) for page in grouped}
        experts, last = cut.layers[layer].groups, {}
        for page in range(num_pages):
            pages.slot_page(layer, page, slots.get(page, slot)).copy_(pages.host_page(layer, page))
            if page in slots:  # the first group of three has given its slot to the third
                last[slots[page]] = next(g for g, grouped in enumerate(groups) if page in grouped)
        gone = {
            f"mlp.experts.{expert}."
            for group, each in enumerate(experts)
            for expert in each
            if group not in last.values() and expert >= cut.layers[layer].resident_experts
        }
        for weight in pages.names(layer):
            if weight.startswith(tuple(gone)):
                continue
            found = pages.device_weight(layer, weight, first_slot=1)
            assert torch.equal(found, store(layer_prefix(layer) + weight).float())
        slot = (slot + 1) % 2 if num_pages else slot


class Recorded(NoPinning):
    """Keeps what the parts held when they counted as filled."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.places: list[int] = []

    def filled(self, part: Tensor) -> None:
        self.parts.append(part.clone())
        self.places.append(part.data_ptr())


def test_each_layer_is_pinned_when_it_is_filled() -> None:
    spec = ModelSpec.from_directory(get_case(NAMES[0]).directory)
    store, pinning = WeightStore.open(spec, get_case(NAMES[0]).directory), Recorded()
    num_told = []

    def make_arena(num_bytes: int) -> HostArena:
        arena = HostArena(num_bytes)
        arena.pinning = pinning
        return arena

    pages = WeightPages(
        spec,
        store,
        placed_model(spec, 4, page_bytes=1 << 30).layers,
        dtype=torch.float32,
        allocate_on_device=allocate,
        make_arena=make_arena,
        release=lambda _names: num_told.append(len(pinning.parts)),
    )
    assert num_told == list(range(1, spec.num_layers + 1))
    assert pages.pinning is pinning
    for layer, (part, place) in enumerate(zip(pinning.parts, pinning.places, strict=True)):
        assert place == pages.host_page(layer, 0).data_ptr()
        assert torch.equal(part, pages.host_page(layer, 0))


def test_a_page_that_is_not_loaded_is_nan() -> None:
    name = NAMES[0]
    spec = ModelSpec.from_directory(get_case(name).directory)
    store = WeightStore.open(spec, get_case(name).directory)
    cut = placed_model(spec, 4, page_bytes=3_000)
    pages = WeightPages(
        spec,
        store,
        cut.layers,
        dtype=torch.float32,
        allocate_on_device=allocate,
    )
    pages.slot_page(0, 0, 0).copy_(pages.host_page(0, 0))
    norm = pages.device_weight(0, "input_layernorm.weight", first_slot=0)
    down = pages.device_weight(0, "mlp.experts.1.down_proj.weight", first_slot=0)
    assert norm.isfinite().all()
    assert down.isnan().all()


def test_tables_of_n_grams_are_last_in_a_file_that_another_process_need_not_fill(
    tmp_path: Path,
) -> None:
    name = "qwen4_exp_text: two tables, the first before all layers, in uneven tensors"
    directory = get_case(name).directory
    store = WeightStore.open(spec := ModelSpec.from_directory(directory), directory)
    cut = placed(layer_sizes(spec, 4), page_bytes=1 << 30, resident_bytes=0)
    read: list[str] = []

    def get(name: str) -> Weight:
        read.append(name)
        return store(name)

    for is_first in (True, False):
        file = SharedFile.open("tables", tmp_path)
        assert file.is_whole is not is_first
        read.clear()
        pages = WeightPages(
            spec,
            get,
            cut.layers,
            dtype=torch.float32,
            allocate_on_device=allocate,
            make_arena=lambda size, file=file: SharedArena(size, file, b"", is_writable=False),
        )
        assert any(NGRAM_TABLE in one for one in read) is is_first
        end = pages.host_memory.nbytes
        for layer in reversed(range(spec.num_layers)):
            ngrams, memory = spec.layers[layer].ngrams, pages.table(layer)
            assert (ngrams is None) == (memory is None)
            if ngrams is None or memory is None:
                continue
            prefix = layer_prefix(layer) + NGRAM_TABLE
            wanted = torch.cat([store(f"{prefix}{i}") for i in range(len(ngrams.tensor_rows))])
            assert torch.equal(table_view(memory, ngrams), wanted)
            end -= aligned_bytes(memory.nbytes)
            assert memory.data_ptr() == pages.host_memory.data_ptr() + end
        assert end >= cut.streamed_bytes
        if is_first:
            first = pages
    first.close()
    pages.close()
