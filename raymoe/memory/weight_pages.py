"""Weights in pages: where each lies in host memory, and where on the device it will be found.

The host holds every layer in the order of `specs.weight_parts`, in the type that the kernels read.
The device holds the resident parts of each layer for good, and two *slots*, each as large as the
largest rest of a layer: a layer that is not wholly resident is copied page by page into the slot
that the last but one has left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe.memory.arena import HostArena, aligned_bytes
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import Shape, layer_prefix
from raymoe.specs.weight_parts import layer_parts

NUM_SLOTS = 2

GetWeight = Callable[[str], Tensor]
Allocate = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPaging:
    """What of one layer moves, and in which pieces.

    Attributes:
        page_bytes: Bytes of each page, in order; together the layer's streamed parts.
        resident_parts: Names of the parts (`specs.weight_parts`) that stay on the device.
    """

    page_bytes: tuple[int, ...]
    resident_parts: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Place:
    """Offset in bytes from the begin of the layer's streamed, or of its resident, bytes."""

    offset: int
    shape: Shape
    is_resident: bool


class WeightPages:
    """The host's copy of all layers, the device's slots, and the way from one to the other."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: GetWeight,
        paging: Sequence[LayerPaging],
        *,
        dtype: torch.dtype,
        allocate_on_device: Allocate,
        release: Callable[[list[str]], None] = lambda _names: None,
    ) -> None:
        """Copy all layers to the host arena, and the resident parts to the device.

        Args:
            spec: The model.
            weights: Canonical name -> stored tensor.
            paging: Of each layer.
            dtype: Type that the kernels read; stored weights of another are converted.
            allocate_on_device: Bytes -> uint8 tensor of device memory.
            release: Called with the names of a layer once it is copied.
        """
        self._dtype, self._paging = dtype, tuple(paging)
        self._places = [_places(spec, i, cut, dtype) for i, cut in enumerate(paging)]
        streamed = [sum(cut.page_bytes) for cut in paging]
        self._arena = HostArena(sum(map(aligned_bytes, streamed)))
        self._host = [self._arena.allocate(num_bytes) for num_bytes in streamed]
        slot_bytes = max(streamed, default=0)
        self._slots = [allocate_on_device(slot_bytes) for _ in range(NUM_SLOTS)]
        self._resident = [
            allocate_on_device(_bytes_of(places, dtype)) for places in map(_resident, self._places)
        ]
        for i, places in enumerate(self._places):
            for name, place in places.items():
                memory = self._resident[i] if place.is_resident else self._host[i]
                _view(memory, place, dtype).copy_(weights(layer_prefix(i) + name))
            release([layer_prefix(i) + name for name in places])

    @property
    def host_memory(self) -> Tensor:
        """The streamed parts of all layers, uint8."""
        return self._arena.memory

    def names(self, layer: int) -> tuple[str, ...]:
        """The weights of a layer, without its prefix, in the order in which they lie."""
        return tuple(self._places[layer])

    def host_page(self, layer: int, page: int) -> Tensor:
        """One page where it lies in host memory, uint8."""
        return _page(self._host[layer], self._paging[layer], page)

    def slot_page(self, layer: int, page: int, slot: int) -> Tensor:
        """Where that page goes in a slot, uint8."""
        return _page(self._slots[slot], self._paging[layer], page)

    def device_weight(self, layer: int, name: str, first_slot: int) -> Tensor:
        """A weight as the device will find it when the first streamed layer is in `first_slot`.

        Args:
            layer: Its layer.
            name: Its name without the prefix of the layer.
            first_slot: Streamed layers take the two slots in turn from here on.
        """
        place = self._places[layer][name]
        if place.is_resident:
            return _view(self._resident[layer], place, self._dtype)
        streamed_before = sum(bool(cut.page_bytes) for cut in self._paging[:layer])
        slot = (first_slot + streamed_before) % NUM_SLOTS
        return _view(self._slots[slot], place, self._dtype)

    def close(self) -> None:
        """Let go of all memory."""
        self._host, self._slots, self._resident = [], [], []
        self._arena.close()


def _places(spec: ModelSpec, layer: int, cut: LayerPaging, dtype: torch.dtype) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    offsets = {True: 0, False: 0}
    for part in layer_parts(spec.layers[layer], spec.hidden_size):
        is_resident = part.name in cut.resident_parts
        for name, shape in part.shapes.items():
            places[name] = _Place(offsets[is_resident], shape, is_resident)
            offsets[is_resident] += _num_bytes(shape, dtype)
    assert offsets[False] == sum(cut.page_bytes), (
        "the pages of a layer do not hold what is streamed"
    )
    return places


def _resident(places: dict[str, _Place]) -> list[_Place]:
    return [place for place in places.values() if place.is_resident]


def _bytes_of(places: list[_Place], dtype: torch.dtype) -> int:
    return sum(_num_bytes(place.shape, dtype) for place in places)


def _num_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _view(memory: Tensor, place: _Place, dtype: torch.dtype) -> Tensor:
    end = place.offset + _num_bytes(place.shape, dtype)
    return memory[place.offset : end].view(dtype).view(place.shape)


def _page(memory: Tensor, paging: LayerPaging, page: int) -> Tensor:
    begin = sum(paging.page_bytes[:page])
    return memory[begin : begin + paging.page_bytes[page]]
