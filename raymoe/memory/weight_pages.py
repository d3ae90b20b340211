"""Weights in pages: their places in host memory and on the device.

The host holds every layer in the order of `layer_parts`: quantised matrices as they are
stored, the others in the type that the kernels read. Within a part, tensors of larger elements come
first, so that all are aligned.

The device holds the resident parts of each layer permanently, and two *slots*, each as large as the
largest streamed remainder of a layer. Streamed layers are copied page by page into the two slots in
turn. Experts that are in groups have slots of their own, a ring, each as large as the largest
group; group g of any layer uses the ring's slot g modulo its length.
"""

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from raymoe.codecs import TORCH_DTYPES, StoredMatrix, Weight
from raymoe.device.device import Pinning
from raymoe.device.threads import torch_on_all_cores
from raymoe.kernels.ngrams import fill_table
from raymoe.memory.arena import HostArena, aligned_bytes
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import NUM_LAYER_SLOTS
from raymoe.specs.attention.ngrams import NgramSpec
from raymoe.specs.layer_weights import (
    PART_ALIGNMENT,
    WeightPart,
    layer_parts,
    layer_prefix,
    ngram_tables,
)
from raymoe.specs.layers import DenseSpec, LayerSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Piece, WeightFormat
from raymoe.specs.weights import Shape
from raymoe.units import ceil_div

GetWeight = Callable[[str], Weight]
Allocate = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One tensor of a weight.

    Attributes:
        piece: Name of the tensor of a quantised matrix; None for a weight of one tensor.
        offset: In bytes from the begin of the layer's streamed or resident bytes.
    """

    piece: Piece | None
    shape: Shape
    item_bytes: int
    offset: int
    is_resident: bool

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    stored: WeightFormat | None
    shape: Shape
    places: tuple[_Place, ...]


Weights = dict[str, _Weight]  # by canonical name without the prefix of the layer


class WeightPages:
    """The host's copy of all layers, and the slots and resident parts on the device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: GetWeight,
        layers: Sequence[LayerPlacement],
        *,
        dtype: torch.dtype,
        allocate_on_device: Allocate,
        ring_slots: int = 0,
        release: Callable[[list[str]], None] = lambda _names: None,
        make_arena: Callable[[int], HostArena] = HostArena,
    ) -> None:
        """Copy layers to the host arena, if they are missing, and resident parts to the device.

        Tables of n-grams come last in the arena, as they are stored.

        Args:
            weights: Canonical name -> weight as it is stored.
            dtype: Type that the kernels read; weights that are not quantised are converted to it.
            allocate_on_device: Bytes -> uint8 tensor of device memory.
            layers: What of each layer streams in which pages, and what stays on the device.
            ring_slots: Slots for groups of experts; 0 if no layer has groups.
            release: Called with the names of a layer once it is copied.
            make_arena: Bytes -> arena of the host's copy.
        """
        self._dtype, self._layers, self._spec = dtype, tuple(layers), spec
        self._tables: dict[int, Tensor] = {}
        layouts = [_lay_out(spec, i, cut, dtype.itemsize) for i, cut in enumerate(layers)]
        self._weights = [weights for weights, _ in layouts]
        # Scales keep the type of the checkpoint.
        self._dtypes: list[dict[tuple[str, str], torch.dtype]] = [{} for _ in layers]
        streamed = [sum(cut.page_bytes) for cut in layers]
        ngrams = {i: layer.ngrams for i, layer in enumerate(spec.layers) if layer.ngrams}
        tables = [each.table_bytes for each in ngrams.values()]
        self._arena = make_arena(sum(map(aligned_bytes, streamed + tables)))
        self._host = [self._arena.allocate(num_bytes) for num_bytes in streamed]
        units = [cut.unit_bytes for cut in layers]
        self._unit_begins = [list(itertools.accumulate(each[:-1], initial=0)) for each in units]
        common_bytes = max((each[0] for each in units), default=0)
        group_bytes = max((num_bytes for each in units for num_bytes in each[1:]), default=0)
        self._ring_slots = ring_slots
        self._slots = [
            allocate_on_device(num_bytes)
            for num_bytes in [common_bytes] * NUM_LAYER_SLOTS + [group_bytes] * ring_slots
        ]
        self._resident = [allocate_on_device(num_bytes) for _, num_bytes in layouts]
        with torch_on_all_cores():  # new memory is zeroed by whoever writes first
            for i, names in enumerate(self._weights):
                for name in names:
                    if not self._is_there(i, name):
                        self._copy(i, name, weights(layer_prefix(i) + name))
                self._arena.pinning.filled(self._host[i])
                release([layer_prefix(i) + name for name in names])
            for i, table in ngrams.items():
                self._fill_table(i, table, weights, release)
        self._arena.seal()

    def _fill_table(
        self,
        layer: int,
        ngrams: NgramSpec,
        weights: GetWeight,
        release: Callable[[list[str]], None],
    ) -> None:
        memory, prefix = self._arena.allocate(ngrams.table_bytes), layer_prefix(layer)
        self._tables[layer] = memory
        if not self._arena.is_filled:
            fill_table(memory, ngrams, lambda name: weights(prefix + name))
        release([prefix + each.name for each in ngram_tables(self._spec.layers[layer])])

    def _is_there(self, layer: int, name: str) -> bool:
        """Whether another process has put a weight there; scales are looked at for their types."""
        weight = self._weights[layer][name]
        is_on_host = not any(place.is_resident for place in weight.places)
        return self._arena.is_filled and is_on_host and weight.stored is None

    def _copy(self, layer: int, name: str, weight: Weight) -> None:
        for place in self._weights[layer][name].places:
            source, dtype = weight, self._dtype
            if place.piece is not None:
                assert isinstance(weight, StoredMatrix)
                source = weight.pieces[place.piece.name]
                dtype = _kept_dtype(place.piece, source.dtype)
                self._dtypes[layer][name, place.piece.name] = dtype
            assert isinstance(source, Tensor)
            if self._arena.is_filled and not place.is_resident:
                continue
            memory = self._resident[layer] if place.is_resident else self._host[layer]
            _view(memory, place, dtype).copy_(source)

    @property
    def host_memory(self) -> Tensor:
        return self._arena.memory

    @property
    def pinning(self) -> Pinning:
        """What page-locks the host's copy, since its first layer was filled."""
        return self._arena.pinning

    def table(self, layer: int) -> Tensor | None:
        """Bytes of the table of n-grams of a layer on the host; None if it has none."""
        return self._tables.get(layer)

    def names(self, layer: int) -> tuple[str, ...]:
        """Return the weights of a layer, without its prefix, in memory order."""
        return tuple(self._weights[layer])

    def host_page(self, layer: int, page: int) -> Tensor:
        page_bytes = self._layers[layer].page_bytes
        begin = sum(page_bytes[:page])
        return self._host[layer][begin : begin + page_bytes[page]]

    def slot_page(self, layer: int, page: int, slot: int) -> Tensor:
        paging = self._layers[layer]
        begin = sum(paging.page_bytes[:page])
        begin -= self._unit_of(layer, begin)[1]
        return self._slots[slot][begin : begin + paging.page_bytes[page]]

    def device_weight(self, layer: int, name: str, first_slot: int) -> Weight:
        """Return a weight as the device finds it if the first streamed layer is in `first_slot`.

        `name` has no layer prefix. Streamed layers use the two slots in turn.
        """
        weight = self._weights[layer][name]
        first, memory, begin = weight.places[0], self._resident[layer], 0
        if not first.is_resident:
            unit, begin = self._unit_of(layer, first.offset)
            streamed_before = sum(bool(cut.page_bytes) for cut in self._layers[:layer])
            slot = (first_slot + streamed_before) % NUM_LAYER_SLOTS
            if unit:
                slot = NUM_LAYER_SLOTS + (unit - 1) % self._ring_slots
            memory = self._slots[slot]
        return self._assembled(layer, name, memory, begin)

    def host_weight(self, layer: int, name: str) -> Weight | None:
        """Return a weight where the host has it; None if it is on the device alone."""
        if self._weights[layer][name].places[0].is_resident:
            return None
        return self._assembled(layer, name, self._host[layer])

    def _assembled(self, layer: int, name: str, memory: Tensor, begin: int = 0) -> Weight:
        weight = self._weights[layer][name]
        if weight.stored is None:
            return _view(memory, weight.places[0], self._dtype, begin)
        dtypes = self._dtypes[layer]
        pieces = {
            place.piece.name: _view(memory, place, dtypes[name, place.piece.name], begin)
            for place in weight.places
            if place.piece is not None
        }
        outputs, inputs = weight.shape
        return StoredMatrix(format=weight.stored, shape=(outputs, inputs), pieces=pieces)

    def _unit_of(self, layer: int, offset: int) -> tuple[int, int]:
        """The unit that holds a byte of the layer's streamed bytes, and where the unit begins."""
        begins = self._unit_begins[layer]
        unit = bisect.bisect_right(begins, offset) - 1
        return unit, begins[unit]

    def close(self) -> None:
        self._host, self._slots, self._resident, self._tables = [], [], [], {}
        self._arena.close()


def _lay_out(
    spec: ModelSpec, layer: int, cut: LayerPlacement, plain_bytes: int
) -> tuple[Weights, int]:
    """The places of a layer's weights, and the bytes of its resident parts."""
    weights: Weights = {}
    offsets, resident_parts = {True: 0, False: 0}, _resident_parts(cut, spec.layers[layer])
    for part in layer_parts(spec.layers[layer], spec.hidden_size):
        is_resident = part.name in resident_parts
        formats = {
            name: spec.format_of(layer_prefix(layer) + name, shape)
            for name, shape in part.shapes.items()
        }
        places: dict[str, list[_Place]] = {name: [] for name in formats}
        offset = offsets[is_resident]
        for name, piece, shape in _tensors_of(part, formats, plain_bytes):
            place = _Place(
                piece=piece,
                shape=shape,
                item_bytes=plain_bytes if piece is None else piece.item_bytes,
                offset=offset,
                is_resident=is_resident,
            )
            places[name].append(place)
            offset += place.num_bytes
        offsets[is_resident] = PART_ALIGNMENT * ceil_div(offset, PART_ALIGNMENT)
        for name, stored in formats.items():
            weights[name] = _Weight(
                stored=stored, shape=part.shapes[name], places=tuple(places[name])
            )
    assert offsets[False] == sum(cut.page_bytes), (
        "the pages of a layer do not hold what is streamed"
    )
    return weights, offsets[True]


def _resident_parts(placed: LayerPlacement, layer: LayerSpec) -> frozenset[str]:
    """Names of the parts (`layer_parts`) that stay on the device."""
    is_dense = isinstance(layer.ffn, DenseSpec)
    parts = {"common" if is_dense else f"expert {n}" for n in range(placed.resident_experts)}
    if placed.is_common_resident:
        parts |= {"attention"} if is_dense else {"attention", "common"}
    return frozenset(parts)


def _tensors_of(
    part: WeightPart, formats: Mapping[str, WeightFormat | None], plain_bytes: int
) -> list[tuple[str, Piece | None, Shape]]:
    tensors: list[tuple[str, Piece | None, Shape]] = []
    for name, shape in part.shapes.items():
        stored = formats[name]
        if stored is None:
            tensors.append((name, None, shape))
        else:
            tensors += [(name, piece, piece.shape) for piece in stored.pieces(*shape)]
    return sorted(tensors, key=lambda item: -(item[1].item_bytes if item[1] else plain_bytes))


def _kept_dtype(piece: Piece, stored: torch.dtype) -> torch.dtype:
    kept = [TORCH_DTYPES[name] for name in piece.dtypes]
    return stored if stored in kept else kept[0]


def _view(memory: Tensor, place: _Place, dtype: torch.dtype, begin: int = 0) -> Tensor:
    """A tensor in memory that holds the bytes of its layer from `begin`."""
    offset = place.offset - begin
    return memory[offset : offset + place.num_bytes].view(dtype).view(place.shape)
