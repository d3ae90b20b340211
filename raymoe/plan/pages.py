"""Choose the weights that stay on the device and divide the rest of each layer into pages.

A streamed layer is one run of bytes: attention part (norms, projections, router), shared expert,
experts that are not resident. It is cut by bytes, so a page may end inside a matrix or hold both
parts; a reader waits for all pages that hold some of its part.

The streamed experts of a layer may be divided into groups, each cut into pages of its own.

Cores may compute the last streamed experts of each layer in a step (`PageCut.on_cores`), which then
does not load the pages that hold nothing else.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from raymoe.errors import ConfigError
from raymoe.plan.policy import PAGE_BYTES
from raymoe.schedule.program import NUM_LAYER_SLOTS, LayerPages
from raymoe.specs.layer_weights import (
    PART_ALIGNMENT,
    Shape,
    attention_weights,
    common_weights,
    expert_weights,
)
from raymoe.specs.layers import MoeSpec, RecurrentSpec
from raymoe.specs.model import ModelSpec
from raymoe.units import ceil_div

PAGE_ALIGNMENT = 256


class LayerBytes(NamedTuple):
    """Bytes of a layer's weights by reader, in `PART_ALIGNMENT`s; a tuple for fast lookups."""

    attention: int  # norms, Q, K, V and O projections, router
    shared: int  # shared expert and its gate; 0 without one
    expert: int  # one expert, or the dense network
    num_experts: int  # 1 in a dense layer
    has_states: bool = False  # in place of KV

    @classmethod
    def of(cls, model: ModelSpec, i: int, bytes_per_element: int) -> Self:
        layer, hidden = model.layers[i], model.hidden_size

        def count(weights: Iterable[tuple[str, Shape]]) -> int:
            num_bytes = model.bytes_of(weights, bytes_per_element, i)
            return PART_ALIGNMENT * ceil_div(num_bytes, PART_ALIGNMENT)

        attention = count(attention_weights(layer, hidden))
        common = count(common_weights(layer, hidden))
        has_states = isinstance(layer.attention, RecurrentSpec)
        if not isinstance(layer.ffn, MoeSpec):
            return cls(attention, 0, common, 1, has_states)
        return cls(
            attention=attention,
            shared=common,
            expert=count(expert_weights(layer.ffn, hidden)),
            num_experts=layer.ffn.num_experts,
            has_states=has_states,
        )

    @property
    def common(self) -> int:
        return self.attention + self.shared

    @property
    def total(self) -> int:
        return self.common + self.num_experts * self.expert


@dataclass(frozen=True, kw_only=True)
class PageCut:
    """The resident share of a model's layers and the pages of the rest."""

    layers: tuple[LayerPages, ...]  # number of pages per layer, and the parts in each page
    page_bytes: tuple[tuple[int, ...], ...]
    # Bytes of a full page. Page p of any layer starts at p times this in its slot, so pages of two
    # layers overlap only if they have the same number.
    page_length: int
    # Per layer, whether attention part and shared expert are resident.
    is_common_resident: tuple[bool, ...]
    # Per layer, the number of resident experts; these are the first ones.
    resident_experts: tuple[int, ...]
    resident_bytes: int

    # Per layer, the first expert of each group and the number of experts; empty where experts are
    # loaded and computed at once. Resident experts are in the first group.
    group_bounds: tuple[tuple[int, ...], ...] = ()
    ring_slots: int = 0  # slots for groups of experts; 0 if whole layers are loaded
    max_common_bytes: int = 0  # of a layer, without experts that are in groups
    max_group_bytes: int = 0
    sizes: tuple[LayerBytes, ...] = ()

    @cached_property
    def streamed_bytes(self) -> int:
        return sum(map(sum, self.page_bytes))

    @cached_property
    def num_pages(self) -> int:
        return sum(map(len, self.page_bytes))

    @property
    def slots_bytes(self) -> int:
        """Bytes of all weight slots: two of layers, and those of the ring."""
        return NUM_LAYER_SLOTS * self.max_common_bytes + self.ring_slots * self.max_group_bytes

    @property
    def expert_groups(self) -> tuple[tuple[range, ...], ...]:
        """Per layer, the experts of each group."""
        return tuple(
            tuple(range(begin, end) for begin, end in itertools.pairwise(bounds))
            for bounds in self.group_bounds
        )

    @cached_property
    def group_shares(self) -> tuple[tuple[float, ...], ...]:
        """Per layer, the share of its experts in each group."""
        return tuple(
            tuple(len(group) / size.num_experts for group in groups)
            for groups, size in zip(self.expert_groups, self.sizes, strict=True)
        )

    @cached_property
    def host_shares(self) -> tuple[float, ...]:
        """Per layer, the share of its experts that cores compute; empty if they compute none."""
        shares = tuple(
            len(pages.host_experts) / size.num_experts
            for pages, size in zip(self.layers, self.sizes, strict=True)
        )
        return shares if any(shares) else ()

    @property
    def has_sums(self) -> bool:
        """Whether weighted sums of expert outputs are kept between tasks."""
        return self.ring_slots > 0 or any(pages.host_experts for pages in self.layers)

    def on_cores(self, fraction: float) -> Self:
        """The pages of a step in which cores compute this share of each layer's streamed experts.

        Weights keep their places. A page that also holds anything else is loaded whole.
        """
        kept = [self._device_experts(i, fraction) for i in range(len(self.sizes))]
        layers = tuple(self._without(i, end) for i, end in enumerate(kept))
        return replace(
            self,
            layers=layers,
            page_bytes=tuple(
                page_bytes[: pages.num_pages]
                for page_bytes, pages in zip(self.page_bytes, layers, strict=True)
            ),
            group_bounds=tuple(
                self._bounds(bounds, pages, end)
                for bounds, pages, end in zip(self.group_bounds, layers, kept, strict=True)
            ),
        )

    def with_states(self) -> Self:
        """The pages of steps for which the device has the states of all rows."""
        layers = zip(self.layers, self.sizes, strict=True)
        return replace(
            self,
            layers=tuple(replace(pages, has_states=size.has_states) for pages, size in layers),
        )

    def _device_experts(self, i: int, fraction: float) -> int:
        """Experts of a layer that the device computes; dense networks stay there."""
        num_experts, resident = self.sizes[i].num_experts, self.resident_experts[i]
        on_host = round(fraction * (num_experts - resident)) if num_experts > 1 else 0
        return num_experts - on_host

    def _without(self, i: int, end: int) -> LayerPages:
        size, pages = self.sizes[i], self.layers[i]
        on_host = size.num_experts - end
        if not on_host:
            return pages
        left = sum(self.page_bytes[i]) - on_host * size.expert
        begins = itertools.accumulate(self.page_bytes[i], initial=0)
        count = sum(begin < left for begin in itertools.islice(begins, pages.num_pages))
        groups = (tuple(page for page in group if page < count) for group in pages.group_pages)
        return LayerPages(
            num_pages=count,
            attention_pages=pages.attention_pages,
            expert_pages=tuple(page for page in pages.expert_pages if page < count),
            group_pages=tuple(filter(None, groups)),
            host_experts=range(end, size.num_experts),
            num_host_pages=pages.num_pages - count,
            has_states=pages.has_states,
        )

    @staticmethod
    def _bounds(bounds: tuple[int, ...], pages: LayerPages, end: int) -> tuple[int, ...]:
        if not pages.host_experts:
            return bounds
        before = bounds[: len(pages.group_pages)] or (0,)
        return (*before, end) if end else ()


def layer_pages(
    model: ModelSpec,
    bytes_per_element: int,
    *,
    page_bytes: int = PAGE_BYTES,
    resident_bytes: int = 0,
) -> PageCut:
    """The pages of whole layers."""
    sizes = layer_sizes(model, bytes_per_element)
    return cut_pages(sizes, page_bytes=page_bytes, resident_bytes=resident_bytes)


def layer_sizes(model: ModelSpec, bytes_per_element: int) -> tuple[LayerBytes, ...]:
    return tuple(LayerBytes.of(model, i, bytes_per_element) for i in range(model.num_layers))


class _Layout(NamedTuple):
    stays: tuple["_Stay", ...]
    units: tuple["_Units", ...]
    resident_bytes: int
    max_common_bytes: int
    max_group_bytes: int

    def slots_bytes(self, ring_slots: int) -> int:
        return NUM_LAYER_SLOTS * self.max_common_bytes + ring_slots * self.max_group_bytes


@lru_cache(maxsize=1024)
def _lay_out(sizes: tuple[LayerBytes, ...], resident_bytes: int, num_groups: int) -> _Layout:
    stays = _choose_resident(sizes, resident_bytes)
    kept = [stay.num_bytes(size) for size, stay in zip(sizes, stays, strict=True)]
    units = [_units(size, stay, num_groups) for size, stay in zip(sizes, stays, strict=True)]
    return _Layout(
        stays=tuple(stays),
        units=tuple(units),
        resident_bytes=sum(kept),
        max_common_bytes=max((each.bytes[0] for each in units), default=0),
        max_group_bytes=max((size for each in units for size in each.bytes[1:]), default=0),
    )


def slots_bytes(
    sizes: tuple[LayerBytes, ...], resident_bytes: int, *, num_groups: int = 1, ring_slots: int = 0
) -> int:
    """What `PageCut.slots_bytes` of such a cut is."""
    layout = _lay_out(sizes, resident_bytes, num_groups)
    return layout.slots_bytes(ring_slots if num_groups > 1 else 0)


@lru_cache(maxsize=256)  # the search asks for the same cut repeatedly
def cut_pages(
    sizes: tuple[LayerBytes, ...],
    *,
    page_bytes: int = PAGE_BYTES,
    resident_bytes: int = 0,
    num_groups: int = 1,
    ring_slots: int = 0,
) -> PageCut:
    """Keep `resident_bytes` on the device and divide the rest into similar pages.

    Pages have at most `page_bytes`, rounded up to `PAGE_ALIGNMENT`. With several groups, the
    streamed experts of each layer are in so many groups of about equal size, or one each.
    """
    if page_bytes < 1 or resident_bytes < 0:
        raise ConfigError(
            f"page_bytes is {page_bytes} and resident_bytes is {resident_bytes}; "
            "pages need at least one byte, the resident share must not be negative"
        )
    layout = _lay_out(sizes, resident_bytes, num_groups)
    stays, units = layout.stays, layout.units
    length = _page_length(max((max(each.bytes) for each in units), default=0), page_bytes)
    cut = lru_cache(maxsize=None)(_cut_layer)  # most layers are the same
    cuts = [
        cut(size, stay, each, length) for size, stay, each in zip(sizes, stays, units, strict=True)
    ]
    return PageCut(
        layers=tuple(pages for pages, _ in cuts),
        page_bytes=tuple(num_bytes for _, num_bytes in cuts),
        page_length=length,
        is_common_resident=tuple(stay.common for stay in stays),
        resident_experts=tuple(stay.experts for stay in stays),
        resident_bytes=layout.resident_bytes,
        group_bounds=tuple(each.bounds for each in units),
        ring_slots=ring_slots if num_groups > 1 else 0,
        max_common_bytes=layout.max_common_bytes,
        max_group_bytes=layout.max_group_bytes,
        sizes=sizes,
    )


class _Stay(NamedTuple):
    common: bool = False
    experts: int = 0

    def num_bytes(self, size: LayerBytes) -> int:
        return self.common * size.common + self.experts * size.expert


def _choose_resident(sizes: Sequence[LayerBytes], budget: int) -> list[_Stay]:
    """Fill the budget: the common part of every layer, then one more expert of every layer.

    Pages of a layer are sent only while the layer before it runs, so layers of equal size keep the
    link busy. If a round does not reach all layers, it takes layers that lie far apart.
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


class _Units(NamedTuple):
    """What is cut into pages: a layer, or what is common to its experts and each group of them."""

    bytes: tuple[int, ...]
    bounds: tuple[int, ...] = ()  # of groups, in experts


@lru_cache(maxsize=1024)
def _units(size: LayerBytes, stay: _Stay, num_groups: int) -> _Units:
    num_streamed = size.num_experts - stay.experts
    common = 0 if stay.common else size.common
    count = min(num_groups, num_streamed)
    if num_groups == 1 or not count:
        return _Units((common + num_streamed * size.expert,))
    ends = [stay.experts + ceil_div(group * num_streamed, count) for group in range(count + 1)]
    groups = ((end - begin) * size.expert for begin, end in itertools.pairwise(ends))
    return _Units((common, *groups), (0, *ends[1:]))


def _cut_layer(
    size: LayerBytes, stay: _Stay, units: _Units, length: int
) -> tuple[LayerPages, tuple[int, ...]]:
    common, shared = (0, 0) if stay.common else (size.common, size.shared)
    # The experts' task computes the shared expert too, so its pages count for both parts.
    experts_start = common - shared
    spans: list[tuple[int, int]] = []
    groups, offset = [], 0
    for total in units.bytes:
        groups.append(tuple(range(len(spans), len(spans) + ceil_div(total, length))))
        end = offset + total
        spans += [(start, min(start + length, end)) for start in range(offset, end, length)]
        offset = end
    pages = LayerPages(
        num_pages=len(spans),
        attention_pages=tuple(p for p, (start, _) in enumerate(spans) if start < common),
        expert_pages=tuple(p for p, (_, end) in enumerate(spans) if end > experts_start),
        group_pages=tuple(groups[1:]),
    )
    return pages, tuple(end - start for start, end in spans)
