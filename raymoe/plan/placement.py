"""Where a model's weights, KV and states are, and how a step uses them.

A streamed layer is one run of bytes: attention part (norms, projections, router), shared expert,
experts that are not resident. It is cut by bytes, so a page may end inside a matrix or hold both
parts; a reader waits for all pages that hold some of its part.

The streamed experts of a layer may be divided into groups, each cut into pages of its own.

Cores may compute the last streamed experts of each layer in a step (`Placement.on_cores`), which
then does not load the pages that hold nothing else.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from raymoe.errors import ConfigError
from raymoe.plan.policy import Choice, DevicePolicy, Policy
from raymoe.schedule.builders import (
    BUILDERS,
    CPU_ATTENTION_FRACTIONS,
    MAX_MICRO_BATCHES,
    RING_SCHEDULES,
)
from raymoe.schedule.graph import Op, Schedule
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import NUM_LAYER_SLOTS, StepForm
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.layer_weights import (
    PART_ALIGNMENT,
    attention_weights,
    common_weights,
    expert_weights,
)
from raymoe.specs.model import ModelSpec
from raymoe.specs.weights import Weight
from raymoe.units import UNLIMITED_BYTES, ceil_div

PAGE_ALIGNMENT = 256
MIN_STAGED_BLOCKS = 256  # per micro-batch: the contexts of 16 rows of 512 tokens


class LayerBytes(NamedTuple):
    """Bytes of a layer's weights by reader, in `PART_ALIGNMENT`s; a tuple for fast lookups."""

    attention: int  # norms, Q, K, V and O projections, router
    shared: int  # shared expert and its gate; 0 without one
    expert: int  # one expert, or the dense network
    num_experts: int  # 1 in a dense layer
    has_states: bool = False  # in place of KV, or beside it

    @classmethod
    def of(cls, model: ModelSpec, i: int, bytes_per_element: int) -> Self:
        layer, hidden = model.layers[i], model.hidden_size

        def count(weights: Iterable[Weight]) -> int:
            num_bytes = model.bytes_of(weights, bytes_per_element, i)
            return PART_ALIGNMENT * ceil_div(num_bytes, PART_ALIGNMENT)

        attention = count(attention_weights(layer, hidden))
        common = count(common_weights(layer, hidden))
        has_states = layer.attention.has_state
        if layer.moe is None:
            return cls(attention, 0, common, 1, has_states)
        return cls(
            attention=attention,
            shared=common,
            expert=count(expert_weights(layer.moe, hidden)),
            num_experts=layer.moe.num_experts,
            has_states=has_states,
        )

    @property
    def common(self) -> int:
        return self.attention + self.shared

    @property
    def total(self) -> int:
        return self.common + self.num_experts * self.expert


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a search proposes, the step model prices, and builders, memory and runner follow.

    On schedule "in_place" the host has everything and its cores compute; on "resident" the device
    has and computes everything; on all others weights stream, and KV is on the host.

    Attributes:
        sizes: Bytes of each layer's parts.
        layers: What of each layer is where.
        page_length: Bytes of a full page. Page p of any layer starts at p times this in its slot,
            so pages of two layers overlap only if they have the same number.
        resident_bytes: Weights of layers that the device holds.
        ring_slots: Slots for groups of experts; 0 if whole layers are loaded.
        max_common_bytes: Largest layer, without experts that are in groups.
        max_group_bytes: Largest group of experts.
    """

    schedule: str
    policy: Policy
    sizes: tuple[LayerBytes, ...]
    layers: tuple[LayerPlacement, ...]
    page_length: int
    resident_bytes: int
    ring_slots: int = 0
    max_common_bytes: int = 0
    max_group_bytes: int = 0

    @classmethod
    def of(cls, model: ModelSpec, schedule: str, policy: Policy, bytes_per_element: int) -> Self:
        """Divide a model's weights into resident parts and pages, as the policy says.

        Where weights stream, the host attends for all rows of a model whose states it holds, unless
        these can be staged beside KV.

        Raises:
            ConfigError: The schedule cannot run with this policy.
        """
        device = policy.device or DevicePolicy()
        streams = schedule not in WHOLE_MODEL_SCHEDULES
        if model.has_states_beside_kv and streams and device.states_on_device:
            raise ConfigError(
                f"states_on_device is set, but {model.name} has layers with a state and KV at "
                "once, which stay together on the host where weights stream; leave it out"
            )
        stay = model.has_states and not model.has_states_beside_kv
        if stay and streams and not device.states_on_device:
            device = replace(device, staged_blocks=0)
            policy = replace(policy, device=device)
        return cls.of_layers(layer_sizes(model, bytes_per_element), schedule, policy)

    @classmethod
    def of_layers(cls, sizes: tuple[LayerBytes, ...], schedule: str, policy: Policy) -> Self:
        device = policy.device or DevicePolicy()
        if device.cpu_experts_fraction and schedule not in RING_SCHEDULES:
            raise ConfigError(
                f"cpu_experts_fraction is {device.cpu_experts_fraction}, but schedule {schedule!r} "
                f"computes all experts on the device; set it to 0 or choose one of "
                f"{', '.join(sorted(RING_SCHEDULES))}"
            )
        streams = schedule not in WHOLE_MODEL_SCHEDULES
        cut = _cut(
            sizes,
            page_bytes=device.page_bytes,
            resident_bytes=device.resident_bytes if streams else UNLIMITED_BYTES,
            num_groups=device.expert_groups,
            ring_slots=min(device.ring_slots, device.expert_groups),
            states_on_device=device.states_on_device or schedule == "resident",
        )
        return cls(schedule=schedule, policy=policy, sizes=sizes, **cut._asdict())

    def with_staging(self, num_slots: int) -> Self:
        """The same with pages that go through a pinned ring of so many."""
        device = replace(self.device, staging_slots=num_slots)
        return replace(self, policy=replace(self.policy, device=device))

    @property
    def choice(self) -> Choice:
        return Choice(schedule=self.schedule, policy=self.policy)

    @cached_property
    def device(self) -> DevicePolicy:
        return self.policy.device or DevicePolicy()

    @property
    def streams(self) -> bool:
        """Whether weights may cross the link, and host and device work together."""
        return self.schedule not in WHOLE_MODEL_SCHEDULES

    @property
    def is_in_place(self) -> bool:
        """Whether the cores compute all, on host memory."""
        return self.schedule == "in_place"

    @property
    def is_resident(self) -> bool:
        """Whether the device has all weights, KV and states."""
        return self.schedule == "resident"

    @property
    def states_on_device(self) -> bool:
        return self.is_resident or self.device.states_on_device

    @cached_property
    def streamed_bytes(self) -> int:
        """Weights that cross the link in a step."""
        return sum(sum(layer.page_bytes) for layer in self.layers)

    @cached_property
    def num_pages(self) -> int:
        return sum(layer.num_pages for layer in self.layers)

    @property
    def slots_bytes(self) -> int:
        """Bytes of all weight slots: two of layers, and those of the ring."""
        return NUM_LAYER_SLOTS * self.max_common_bytes + self.ring_slots * self.max_group_bytes

    @property
    def splits(self) -> tuple[Self, ...]:
        """The steps to choose from: cores compute no experts, the planned share, or all of them.

        One if cores never compute experts, or always the planned share.
        """
        planned = self.device.cpu_experts_fraction
        if not planned:
            return (self,)
        is_fixed = self.device.is_cpu_experts_fraction_fixed
        fractions = (planned,) if is_fixed else (0.0, planned, 1.0)
        layers = dict.fromkeys(
            _on_cores(self.sizes, self.layers, fraction) for fraction in fractions
        )
        device = replace(self.device, cpu_experts_fraction=0.0)
        policy = replace(self.policy, device=device)
        return tuple(replace(self, policy=policy, layers=each) for each in layers)

    @property
    def build(self) -> Callable[[StepForm], Schedule]:
        return BUILDERS[self.schedule]

    @cached_property
    def num_micro_batches(self) -> int:
        return min(
            self.device.num_micro_batches,
            MAX_MICRO_BATCHES.get(self.schedule, self.device.num_micro_batches),
        )

    @property
    def attends_on_host(self) -> bool:
        """Whether the device has no room for KV, so that the host attends for prompts too."""
        return self.is_in_place or (self.streams and self.device.staged_blocks == 0)

    @property
    def cpu_attention_fraction(self) -> float:
        if self.attends_on_host:
            return 1.0
        return CPU_ATTENTION_FRACTIONS.get(self.schedule, self.device.cpu_attention_fraction)

    @cached_property
    def form(self) -> StepForm:
        device = self.device
        return StepForm(
            layers=self.layers,
            num_micro_batches=self.num_micro_batches,
            has_device_attention=True,
            micro_batches_per_group=device.micro_batches_per_group,
            look_ahead=device.look_ahead,
            staging_slots=device.staging_slots,
            ring_slots=self.ring_slots,
        )

    @property
    def has_host_experts(self) -> bool:
        """Whether cores compute experts in some steps."""
        return self.device.cpu_experts_fraction > 0

    @property
    def has_sums(self) -> bool:
        """Whether weighted sums of expert outputs are kept between tasks."""
        return self.ring_slots > 0 or self.has_host_experts

    @property
    def launch_tokens(self) -> int:
        """Upper bound of the tokens of one launch of the experts."""
        tokens = self.micro_batches_per_group * self.micro_batch_tokens
        return min(tokens, self.policy.max_num_batched_tokens)

    @property
    def ring(self) -> int:
        """Micro-batches whose attention is in flight at once."""
        return self._ring_and_group[0]

    @property
    def micro_batches_per_group(self) -> int:
        return self._ring_and_group[1]

    @cached_property
    def _ring_and_group(self) -> tuple[int, int]:
        bare = replace(self.form, layers=(LayerPlacement(),) * min(2, len(self.layers)))
        return _ring_and_group(self.schedule, bare)

    @property
    def micro_batch_tokens(self) -> int:
        """Upper bound: filling the smallest first exceeds the mean by at most one chunk."""
        policy = self.policy
        mean = ceil_div(policy.max_num_batched_tokens, self.num_micro_batches)
        return min(policy.max_num_batched_tokens, mean + policy.max_prefill_chunk_tokens)

    @property
    def staged_rows(self) -> int:
        """Rows of one micro-batch that attend on the device; each has a block there."""
        return min(self.staged_blocks, self.policy.max_num_seqs)

    @property
    def staged_blocks(self) -> int:
        """KV blocks of one micro-batch for which the device reserves memory."""
        if not self.streams:
            return 0
        blocks = self.device.staged_blocks
        if blocks is None:
            blocks = max(MIN_STAGED_BLOCKS, 2 * ceil_div(self.micro_batch_tokens, KV_BLOCK_TOKENS))
        return min(blocks, self.policy.num_kv_blocks)


WHOLE_MODEL_SCHEDULES = frozenset(("in_place", "resident"))
"""Schedules without transfers: one memory has all weights and KV."""


@lru_cache(maxsize=1024)
def _ring_and_group(schedule: str, form: StepForm) -> tuple[int, int]:
    """Micro-batches in flight around attention, and in a launch of the experts."""
    tasks = BUILDERS[schedule](form).tasks
    places = [buffer.key[0] for task in tasks for buffer in task.writes if buffer.name == "qkv"]
    groups = [len(task.writes) for task in tasks if task.op is Op.EXPERTS]
    return 1 + max(places), max(groups)


@lru_cache(maxsize=256)
def _on_cores(
    sizes: tuple[LayerBytes, ...], layers: tuple[LayerPlacement, ...], fraction: float
) -> tuple[LayerPlacement, ...]:
    """The layers of a step in which cores compute this share of each layer's streamed experts.

    Weights keep their places. A page that also holds anything else is loaded whole.
    """
    without = lru_cache(maxsize=None)(_without)  # most layers are the same
    return tuple(
        without(size, layer, fraction) if fraction else layer
        for size, layer in zip(sizes, layers, strict=True)
    )


def _without(size: LayerBytes, layer: LayerPlacement, fraction: float) -> LayerPlacement:
    """The layer with this share of its streamed experts on cores; dense networks stay."""
    streamed = size.num_experts - layer.resident_experts
    on_host = round(fraction * streamed) if size.num_experts > 1 else 0
    if not on_host:
        return layer
    end = size.num_experts - on_host
    left = sum(layer.page_bytes) - on_host * size.expert
    begins = itertools.accumulate(layer.page_bytes, initial=0)
    count = sum(begin < left for begin in itertools.islice(begins, layer.num_pages))
    groups = (tuple(page for page in group if page < count) for group in layer.group_pages)
    group_pages = tuple(filter(None, groups))
    before = layer.group_bounds[: len(group_pages)] or (0,)
    return replace(
        layer,
        page_bytes=layer.page_bytes[:count],
        expert_pages=tuple(page for page in layer.expert_pages if page < count),
        group_pages=group_pages,
        group_bounds=(*before, end) if end else (),
        host_experts=range(end, size.num_experts),
        num_host_pages=layer.num_pages - count,
    )


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
    """What `Placement.slots_bytes` is with so many resident bytes."""
    layout = _lay_out(sizes, resident_bytes, num_groups)
    return layout.slots_bytes(ring_slots if num_groups > 1 else 0)


class _Cut(NamedTuple):
    """The fields of a `Placement` that its weights and device memory decide."""

    layers: tuple[LayerPlacement, ...]
    page_length: int
    resident_bytes: int
    ring_slots: int
    max_common_bytes: int
    max_group_bytes: int


@lru_cache(maxsize=256)  # the search asks for the same cut repeatedly
def _cut(
    sizes: tuple[LayerBytes, ...],
    *,
    page_bytes: int,
    resident_bytes: int,
    num_groups: int,
    ring_slots: int,
    states_on_device: bool,
) -> _Cut:
    """Keep `resident_bytes` on the device and divide the rest into similar pages.

    Pages have at most `page_bytes`, rounded up to `PAGE_ALIGNMENT`. With several groups, the
    streamed experts of each layer are in so many groups of about equal size, or one each.
    """
    layout = _lay_out(sizes, resident_bytes, num_groups)
    stays, units = layout.stays, layout.units
    length = _page_length(max((max(each.bytes) for each in units), default=0), page_bytes)
    cut = lru_cache(maxsize=None)(_cut_layer)  # most layers are the same
    return _Cut(
        layers=tuple(
            cut(size, stay, each, length, states_on_device)
            for size, stay, each in zip(sizes, stays, units, strict=True)
        ),
        page_length=length,
        resident_bytes=layout.resident_bytes,
        ring_slots=ring_slots if num_groups > 1 else 0,
        max_common_bytes=layout.max_common_bytes,
        max_group_bytes=layout.max_group_bytes,
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


def _cut_layer(  # noqa: PLR0917 - what decides about a layer
    size: LayerBytes, stay: _Stay, units: _Units, length: int, states_on_device: bool
) -> LayerPlacement:
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
    return LayerPlacement(
        page_bytes=tuple(end - start for start, end in spans),
        attention_pages=tuple(p for p, (start, _) in enumerate(spans) if start < common),
        expert_pages=tuple(p for p, (_, end) in enumerate(spans) if end > experts_start),
        group_pages=tuple(groups[1:]),
        group_bounds=units.bounds,
        num_experts=size.num_experts,
        resident_experts=stay.experts,
        is_common_resident=stay.common,
        states_on_device=states_on_device and size.has_states,
    )
