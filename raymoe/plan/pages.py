"""Which weights stay on the device, and how the rest of each layer is cut in pages.

A streamed layer is one run of bytes in this order: attention part (norms, projections, router), the
shared expert, the experts that do not stay. It is cut by bytes, so a page may end inside a matrix
and may hold both parts; whoever reads a part waits for all pages that hold some of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from raymoe.errors import ConfigError
from raymoe.plan.policy import PAGE_BYTES
from raymoe.schedule.program import LayerPages
from raymoe.specs.layer_weights import (
    PART_ALIGNMENT,
    Shape,
    attention_weights,
    common_weights,
    expert_weights,
)
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.units import ceil_div

PAGE_ALIGNMENT = 256


class LayerBytes(NamedTuple):
    """Bytes of the weights of one layer, by who reads them, whole `PART_ALIGNMENT`s each.

    A tuple, because a search looks up the cut of all layers all the time.

    Attributes:
        attention: Norms, Q, K, V and O projections, router.
        shared: Shared expert and its gate; 0 without one.
        expert: One expert, or the dense network.
        num_experts: Experts; 1 in a dense layer.
    """

    attention: int
    shared: int
    expert: int
    num_experts: int

    @classmethod
    def of(cls, model: ModelSpec, i: int, bytes_per_element: int) -> Self:
        layer, hidden = model.layers[i], model.hidden_size

        def count(weights: Iterable[tuple[str, Shape]]) -> int:
            num_bytes = model.bytes_of(weights, bytes_per_element, i)
            return PART_ALIGNMENT * ceil_div(num_bytes, PART_ALIGNMENT)

        attention = count(attention_weights(layer, hidden))
        common = count(common_weights(layer, hidden))
        if not isinstance(layer.ffn, MoeSpec):
            return cls(attention=attention, shared=0, expert=common, num_experts=1)
        return cls(
            attention=attention,
            shared=common,
            expert=count(expert_weights(layer.ffn, hidden)),
            num_experts=layer.ffn.num_experts,
        )

    @property
    def common(self) -> int:
        """What every token visits: attention part and shared expert."""
        return self.attention + self.shared

    @property
    def total(self) -> int:
        return self.common + self.num_experts * self.expert


@dataclass(frozen=True, kw_only=True)
class PageCut:
    """The resident share of a model's layers and the pages of the rest.

    Attributes:
        layers: Of each layer, the number of pages and which part is in which.
        page_length: Bytes of a full page. Page p of any layer lies p times this far into its slot,
            so that pages of two layers share memory only where they share the number.
        is_common_resident: Of each layer, whether attention part and shared expert never move.
        resident_experts: Of each layer, how many experts never move: its first ones.
    """

    layers: tuple[LayerPages, ...]
    page_bytes: tuple[tuple[int, ...], ...]
    page_length: int
    is_common_resident: tuple[bool, ...]
    resident_experts: tuple[int, ...]
    resident_bytes: int

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes that each step sends to the device."""
        return sum(map(sum, self.page_bytes))

    @cached_property
    def largest_layer_bytes(self) -> int:
        """Bytes that a step sends to the device for the layer that has most."""
        return max(map(sum, self.page_bytes), default=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of the two slots on the device: the pages of the largest layer."""
        return self.page_length * max(map(len, self.page_bytes), default=0)

    @property
    def device_bytes(self) -> int:
        """Device memory for the weights of all layers."""
        return self.resident_bytes + 2 * self.slot_bytes


def layer_pages(
    model: ModelSpec,
    bytes_per_element: int,
    *,
    page_bytes: int = PAGE_BYTES,
    resident_bytes: int = 0,
) -> PageCut:
    """Cut the layers of a model; see `cut_pages`.

    Args:
        model: The model; embedding and head are not part of its layers.
        resident_bytes: Device memory for weights that never move.
    """
    sizes = layer_sizes(model, bytes_per_element)
    return cut_pages(sizes, page_bytes=page_bytes, resident_bytes=resident_bytes)


def layer_sizes(model: ModelSpec, bytes_per_element: int) -> tuple[LayerBytes, ...]:
    return tuple(LayerBytes.of(model, i, bytes_per_element) for i in range(model.num_layers))


@lru_cache(maxsize=256)  # a search asks for the same cut again and again
def cut_pages(
    sizes: tuple[LayerBytes, ...], *, page_bytes: int = PAGE_BYTES, resident_bytes: int = 0
) -> PageCut:
    """Keep what fits in `resident_bytes` on the device and cut the rest in pages of like size.

    Args:
        page_bytes: Largest page, rounded up to `PAGE_ALIGNMENT` bytes.
        resident_bytes: Device memory for weights that never move.

    Raises:
        ConfigError: A size is out of range.
    """
    if page_bytes < 1 or resident_bytes < 0:
        raise ConfigError(
            f"page_bytes is {page_bytes} and resident_bytes is {resident_bytes}; "
            "pages need at least one byte, the resident share must not be negative"
        )
    stays = _choose_resident(sizes, resident_bytes)
    kept = [stay.num_bytes(size) for size, stay in zip(sizes, stays, strict=True)]
    largest = max((size.total - kept[i] for i, size in enumerate(sizes)), default=0)
    length = _page_length(largest, page_bytes)
    cut = lru_cache(maxsize=None)(_cut_layer)  # most layers are the same
    cuts = [cut(size, stay, length) for size, stay in zip(sizes, stays, strict=True)]
    return PageCut(
        layers=tuple(pages for pages, _ in cuts),
        page_bytes=tuple(num_bytes for _, num_bytes in cuts),
        page_length=length,
        is_common_resident=tuple(stay.common for stay in stays),
        resident_experts=tuple(stay.experts for stay in stays),
        resident_bytes=sum(kept),
    )


class _Stay(NamedTuple):
    common: bool = False
    experts: int = 0

    def num_bytes(self, size: LayerBytes) -> int:
        return self.common * size.common + self.experts * size.expert


def _choose_resident(sizes: Sequence[LayerBytes], budget: int) -> list[_Stay]:
    """Fill the budget: the common part of every layer, then one expert more of every layer.

    All streamed bytes cost the link the same, but a layer's pages travel only while the layer
    before it runs: layers that are as equal as possible keep the link busy all the time. Where a
    round does not reach all layers, those that it reaches lie far apart.
    """
    is_common, num_experts = [False] * len(sizes), [0] * len(sizes)
    spread = _spread(len(sizes))
    for i in spread:
        if sizes[i].common <= budget:
            is_common[i] = True
            budget -= sizes[i].common
    while True:
        growing = [i for i in spread if num_experts[i] < sizes[i].num_experts]
        rounds = _whole_rounds(
            [sizes[i] for i in growing], [num_experts[i] for i in growing], budget
        )
        before = budget
        for i in growing:
            more = rounds or int(sizes[i].expert <= budget)
            num_experts[i] += more
            budget -= more * sizes[i].expert
        if budget == before:
            return list(map(_Stay, is_common, num_experts))


def _whole_rounds(sizes: Sequence[LayerBytes], num_experts: Sequence[int], budget: int) -> int:
    left = (size.num_experts - count for size, count in zip(sizes, num_experts, strict=True))
    return min(budget // max(1, sum(size.expert for size in sizes)), min(left, default=0))


@lru_cache
def _spread(count: int) -> tuple[int, ...]:
    width = max(count - 1, 1).bit_length()
    return tuple(sorted(range(count), key=lambda i: f"{i:0{width}b}"[::-1]))


def _page_length(largest: int, page_bytes: int) -> int:
    if largest == 0:
        return PAGE_ALIGNMENT
    even = ceil_div(largest, ceil_div(largest, page_bytes))
    return PAGE_ALIGNMENT * ceil_div(even, PAGE_ALIGNMENT)


def _cut_layer(size: LayerBytes, stay: _Stay, length: int) -> tuple[LayerPages, tuple[int, ...]]:
    common, shared = (0, 0) if stay.common else (size.common, size.shared)
    total = size.total - stay.num_bytes(size)
    # The task of the experts computes the shared expert as well, so its pages count for both.
    experts_start = common - shared
    spans = [(start, min(start + length, total)) for start in range(0, total, length)]
    pages = LayerPages(
        num_pages=len(spans),
        attention_pages=tuple(p for p, (start, _) in enumerate(spans) if start < common),
        expert_pages=tuple(p for p, (_, end) in enumerate(spans) if end > experts_start),
    )
    return pages, tuple(end - start for start, end in spans)
