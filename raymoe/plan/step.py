"""Seconds and timelines of steps of a placement."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from raymoe.plan.cost import StepCost
from raymoe.plan.placement import Placement
from raymoe.plan.work import MicroBatchShape, ModelWork, StepLoad
from raymoe.schedule.builders import BUILDERS
from raymoe.schedule.graph import Op, Resource, Schedule, Task
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm
from raymoe.schedule.timeline import Outline, Timeline, simulate
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import ceil_div

# Kinds of layers repeat, and with two weight slots the timeline repeats after an even number of
# layers: step time grows linearly with them. Over random policies the extrapolation differs from a
# simulation of all layers by 0.2 % in the mean and 4 % at most. Where kinds do not repeat within
# `MAX_PERIOD` layers, as in Nemotron-3, all layers are simulated.
EXCERPT_LAYERS, MAX_PERIOD = 2, 10
LEADING_LAYERS = 4  # that may be of other kinds, as the dense ones of DeepSeek-V3
# Pages per layer to keep; more hardly change when the tasks between them start. Placements that
# differ only in the size of their pages then share an outline.
MAX_PAGES = 24
ONCE = frozenset({Op.EMBED, Op.UP, Op.HEAD})  # per step, not per layer
OF_NO_MICRO_BATCH = frozenset({Op.W, Op.STAGE, Op.HEAD, Op.SYNC})
OF_A_LAUNCH = frozenset({Op.EXPERTS, Op.ROWS, Op.CEXPERTS, Op.SUMS})


@dataclass(frozen=True)
class StepModel:
    """Predicts the steps of a placement on a node."""

    work: ModelWork
    hardware: HardwareSpec
    placement: Placement

    def timeline(self, load: StepLoad) -> Timeline:
        """The predicted timeline of a step."""
        split = self.split(load)
        if split is not self:
            return split.timeline(load)
        layers = self.placement.layers if self.placement.streams else ()
        cost = self._cost(self.work, layers, self._mean_bytes, self._micro_batches(load))
        return simulate(self.schedule(load), cost)

    def schedule(self, load: StepLoad) -> Schedule:
        """The schedule of a step."""
        split = self.split(load)
        if split is not self:
            return split.schedule(load)
        return _schedule(self.placement.schedule, self._form(load))

    @cached_property
    def splits(self) -> tuple["StepModel", ...]:
        """Steps that divide the experts between device and cores (`Placement.splits`)."""
        if not self.placement.has_host_experts:
            return (self,)
        return tuple(replace(self, placement=each) for each in self.placement.splits)

    def split(self, load: StepLoad) -> "StepModel":
        """The fastest of the splits."""
        if len(self.splits) == 1 or not load.tokens:
            return self.splits[0]
        fastest, fastest_s = self.splits[0], math.inf
        for min_s, split in sorted(
            ((split.min_s(load), split) for split in self.splits), key=lambda each: each[0]
        ):
            if min_s < fastest_s and (seconds := split.seconds(load)) < fastest_s:
                fastest, fastest_s = split, seconds
        return fastest

    def seconds(self, load: StepLoad) -> float:
        """The predicted length of a step.

        Where weights stream, it is extrapolated from a few layers; shallow models are simulated
        whole.
        """
        if not load.tokens:
            return 0.0
        if not self.placement.streams:
            return self.timeline(load).makespan_s
        if self.placement.has_host_experts:
            return self.split(load).seconds(load)
        form, micro_batches = self._form(load), self._micro_batches(load)
        seconds = [self._sampled_s(sample, form, micro_batches) for sample in self._samples]
        if len(seconds) == 1:
            return seconds[0]
        excerpt_s, more_s = seconds
        few, more = (len(sample.work.layers) for sample in self._samples)
        each_s = (more_s - excerpt_s) / (more - few)
        extrapolated_s = more_s + each_s * (self.num_layers - more)
        # With few layers that stream, a lane may be busier than a few layers show.
        return max(extrapolated_s, self.min_s(load))

    def min_s(self, load: StepLoad) -> float:
        """Time of the busiest lane, a lower bound for any task order."""
        if not load.tokens:
            return 0.0
        if self.placement.has_host_experts:
            return min(split.min_s(load) for split in self.splits)
        few, layers, kinds = self._excerpt, self._bare_layers, self._bare_kinds
        cost = self._cost(few, layers, self._mean_bytes, self._micro_batches(load))
        form = self._form(load, bare=tuple(self._bare_form_layers[layer] for layer in kinds))
        busy_s = dict.fromkeys(Resource, 0.0)
        often = self.num_layers / len(few.layers)
        duplicates = _Duplicate.of(cost)
        of_micro_batches = Counter(duplicates.micro_batches)
        of_launches = Counter(duplicates.launches)
        for tasks in _by_part(self.placement.schedule, form, tuple(kinds)):
            op, resource = tasks[0].op, tasks[0].resource
            parts = (
                {0: 1}
                if op in OF_NO_MICRO_BATCH
                else of_launches
                if op in OF_A_LAUNCH
                else of_micro_batches
            )
            groups = cost.num_groups(tasks[0]) if op is Op.EXPERTS else 1
            seconds = sum(
                number * cost.duration_s(tasks[part * groups + group])
                for part, number in parts.items()
                for group in range(groups)
            )
            busy_s[resource] += seconds if op in ONCE else often * kinds[tasks[0].layer] * seconds
        placement = self.placement
        if placement.num_pages:
            busy_s[Resource.HTOD] += cost.pages_s(placement.streamed_bytes, placement.num_pages)
        return max(busy_s.values())

    @cached_property
    def _bare_layers(self) -> tuple[LayerPlacement, ...]:
        """The last layers without pages, all groups of the device in one."""
        return _without_pages(self.placement.layers[-len(self._excerpt.layers) :])

    @cached_property
    def _bare_form_layers(self) -> tuple[LayerPlacement, ...]:
        return tuple(map(_without_sizes, self._bare_layers))

    @cached_property
    def _bare_kinds(self) -> Counter[int]:
        """The first of these layers of each kind, and how many take as long."""
        kinds = list(zip(self._excerpt.layers, self._bare_layers, strict=True))
        return Counter(map(kinds.index, kinds))

    @cached_property
    def _mean_bytes(self) -> float:
        """Mean bytes of a layer that cross the link."""
        return self.placement.streamed_bytes / self.num_layers

    @property
    def num_layers(self) -> int:
        return len(self.work.layers)

    def _sampled_s(
        self, sample: "_Sample", form: StepForm, micro_batches: tuple[MicroBatchShape, ...]
    ) -> float:
        outline = _outline(
            self.placement.schedule, replace(form, layers=sample.form_layers), sample.layer_kinds
        )
        cost = self._cost(sample.work, sample.layers, sample.mean_bytes, micro_batches)
        return outline.makespan_s(_durations(outline.kinds, cost))

    def _form(self, load: StepLoad, bare: tuple[LayerPlacement, ...] = ()) -> StepForm:
        """The form of a step, or of one with the given layers."""
        placement = self.placement
        fraction, all_on_host = placement.cpu_attention_fraction, placement.attends_on_host
        on_device = load.prompt_tokens > 0 or (load.decode_rows > 0 and fraction < 1)
        on_host = all_on_host or (load.decode_rows > 0 and fraction > 0)
        key = (bare, on_device and not all_on_host, on_host)
        if key not in self._forms:
            form = placement.form
            self._forms[key] = replace(
                form,
                layers=bare or form.layers,
                has_device_attention=key[1],
                has_cpu_attention=key[2],
            )
        return self._forms[key]

    @cached_property
    def _forms(self) -> dict[tuple[tuple[LayerPlacement, ...], bool, bool], StepForm]:
        return {}

    def _micro_batches(self, load: StepLoad) -> tuple[MicroBatchShape, ...]:
        placement = self.placement
        fraction = placement.cpu_attention_fraction
        return _micro_batches(
            load, placement.num_micro_batches, fraction, placement.attends_on_host
        )

    def _cost(
        self,
        work: ModelWork,
        layers: tuple[LayerPlacement, ...],
        streamed_bytes: float,
        micro_batches: tuple[MicroBatchShape, ...],
    ) -> StepCost:
        return StepCost(
            work,
            self.hardware,
            micro_batches=micro_batches,
            layers=layers,
            streamed_bytes=streamed_bytes,
            micro_batches_per_group=self.placement.micro_batches_per_group,
            is_staged=self.placement.device.staging_slots > 0,
        )

    @cached_property
    def _period(self) -> int:
        """Layers after which their kinds repeat, an even number; all layers if they do not."""
        layers = self.work.layers
        for period in range(EXCERPT_LAYERS, MAX_PERIOD + 1, 2):
            pairs = zip(layers[LEADING_LAYERS:], layers[LEADING_LAYERS + period :], strict=False)
            if all(one == other for one, other in pairs):
                return period
        return len(layers)

    @cached_property
    def _excerpt(self) -> ModelWork:
        few = self.work.layers[-self._period :]
        return replace(self.work, layers=few[-1:] if len(set(few)) == 1 else few)

    @cached_property
    def _samples(self) -> tuple["_Sample", ...]:
        few, more = self._period, 2 * self._period
        if self.num_layers <= more:
            return (_Sample.of(self.work, self.placement, self.num_layers),)
        return tuple(_Sample.of(self.work, self.placement, count) for count in (few, more))


@dataclass(frozen=True, slots=True)
class _Sample:
    """The last layers of a model (the first may be dense).

    Attributes:
        layers: These layers with few pages, scaled to the mean size over all layers.
        form_layers: The same without sizes.
        mean_bytes: Mean bytes of these layers that cross the link.
        layer_kinds: For each layer, the index of the first equal layer.
    """

    work: ModelWork
    layers: tuple[LayerPlacement, ...]
    form_layers: tuple[LayerPlacement, ...]
    mean_bytes: float
    layer_kinds: tuple[int, ...]

    @classmethod
    def of(cls, work: ModelWork, placement: Placement, count: int) -> "_Sample":
        kinds, last = work.layers[-count:], placement.layers[-count:]
        mean = placement.streamed_bytes / len(placement.layers)
        of_these = sum(sum(layer.page_bytes) for layer in last) / count
        scale = mean / of_these if of_these else 1.0
        layers = tuple(_merged(layer, scale) for layer in last)
        return cls(
            work=replace(work, layers=kinds),
            layers=layers,
            form_layers=tuple(map(_without_sizes, layers)),
            mean_bytes=sum(sum(layer.page_bytes) for layer in layers) / count,
            layer_kinds=tuple(map(kinds.index, kinds)),
        )


@lru_cache(maxsize=1024)
def _without_sizes(layer: LayerPlacement) -> LayerPlacement:
    return layer.without_sizes()


@lru_cache(maxsize=1024)
def _without_pages(layers: tuple[LayerPlacement, ...]) -> tuple[LayerPlacement, ...]:
    return tuple(layer.without_pages() for layer in layers)


@lru_cache(maxsize=1024)
def _merged(layer: LayerPlacement, scale: float) -> LayerPlacement:
    """Divide what is common, and each group, into a few pages of equal size, times a factor."""
    few: dict[int, range] = {}  # the new pages that hold some of each page
    sizes: list[int] = []
    groups, page_bytes = [], layer.page_bytes
    in_groups = page_bytes[layer.num_common_pages :]
    for unit in (range(layer.num_common_pages), *layer.group_pages):
        first, count = len(sizes), min(len(unit), MAX_PAGES // max(1, len(layer.group_pages)))
        for place, page in enumerate(unit):
            last = ((place + 1) * count - 1) // len(unit)
            few[page] = range(first + place * count // len(unit), first + last + 1)
        groups.append(tuple(range(first, first + count)))
        sizes += [sum(page_bytes[page] for page in unit) // max(1, count)] * count
    if in_groups and not layer.host_experts:  # the groups are about equal
        first = len(groups[0])
        sizes[first:] = [sum(in_groups) // (len(sizes) - first)] * (len(sizes) - first)

    def merged(old: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(new for page in old for new in few[page]))

    return replace(
        layer,
        page_bytes=tuple(round(scale * size) for size in sizes),
        attention_pages=merged(layer.attention_pages),
        expert_pages=merged(layer.expert_pages),
        group_pages=tuple(groups[1:]),
    )


@lru_cache(maxsize=4096)
def _outline(schedule: str, form: StepForm, layer_kinds: tuple[int, ...]) -> Outline:
    def kind_of(task: Task) -> Hashable:
        if task.op in {Op.W, Op.STAGE}:
            return task.op, task.layer, _kind_of_page(form.layers[task.layer], task.part)
        if task.op is Op.HEAD:
            return task.op
        num_groups = form.layers[task.layer].num_groups
        return task.op, layer_kinds[task.layer], num_groups, task.part

    return Outline.of(BUILDERS[schedule](form), kind_of)


def _kind_of_page(pages: LayerPlacement, page: int) -> int:
    """Equal for pages of equal size: common ones, those of a group, and of all groups if equal."""
    if page < pages.num_common_pages:
        return -1
    if not pages.host_experts:
        return 0
    return next(number for number, group in enumerate(pages.group_pages) if page <= group[-1])


@lru_cache(maxsize=4096)  # a search asks for the same loads repeatedly
def _micro_batches(
    load: StepLoad, num_micro_batches: int, cpu_attention_fraction: float, attends_on_host: bool
) -> tuple[MicroBatchShape, ...]:
    return load.micro_batches(
        num_micro_batches, cpu_attention_fraction, has_prompts_on_host=attends_on_host
    )


@lru_cache(maxsize=2)
def _schedule(schedule: str, form: StepForm) -> Schedule:
    return BUILDERS[schedule](form)


@lru_cache(maxsize=1024)
def _by_part(
    schedule: str, form: StepForm, layers: tuple[int, ...]
) -> tuple[tuple[Task, ...], ...]:
    """Tasks of each operation of each layer; `layers` are the numbers of those of the form."""
    tasks: dict[Hashable, list[Task]] = {}
    for task in BUILDERS[schedule](form).tasks:
        if task.op not in ONCE:
            task = replace(task, layer=layers[task.layer])  # noqa: PLW2901 - the same elsewhere
        tasks.setdefault((task.op, task.layer), []).append(task)
    return tuple(tuple(sorted(each, key=lambda task: task.part)) for each in tasks.values())


class _Duplicate(NamedTuple):
    micro_batches: tuple[int, ...]
    launches: tuple[int, ...]

    @classmethod
    def of(cls, cost: StepCost) -> Self:
        num_launches = ceil_div(len(cost.micro_batches), cost.micro_batches_per_group)
        return cls(
            _first_of_each(list(map(id, cost.micro_batches))),  # equal micro-batches are one object
            _first_of_each(list(map(cost.launch_tokens, range(num_launches)))),
        )

    def part(self, task: Task, cost: StepCost) -> int:
        if task.op is Op.EXPERTS:
            num_groups = cost.num_groups(task)
            launch, group = divmod(task.part, num_groups)
            return self.launches[launch] * num_groups + group
        if task.op in OF_A_LAUNCH:
            return self.launches[task.part]
        return task.part if task.op in OF_NO_MICRO_BATCH else self.micro_batches[task.part]


def _first_of_each(values: Sequence[float]) -> tuple[int, ...]:
    first = {value: number for number, value in reversed(list(enumerate(values)))}
    return tuple(first[value] for value in values)


def _durations(tasks: Sequence[Task], cost: StepCost) -> list[float]:
    duplicates = _Duplicate.of(cost)
    known: dict[Hashable, float] = {}
    durations = []
    for task in tasks:
        key = (task.op, task.layer, duplicates.part(task, cost))
        if key not in known:
            known[key] = cost.duration_s(task)
        durations.append(known[key])
    return durations
