"""Passes of a model on a node with a GPU, simulated whole or from a few layers."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.load import PassLoad
from raymoe.plan.pages import PageCut
from raymoe.plan.streaming import StreamedPasses
from raymoe.plan.wave import WaveShape
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.builders.shape import LayerPages, PassForm
from raymoe.schedule.graph import Schedule
from raymoe.schedule.outline import Outline
from raymoe.schedule.simulate import simulate
from raymoe.schedule.task import Op, Resource, Task
from raymoe.schedule.timeline import Timeline
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import ceil_div

# Layers of a model are alike, and two slots make the pattern repeat after two of them: the time of
# a pass grows by the same amount with every pair of layers beyond the first. Over random policies
# this is 0.2 % from all layers in the mean, and 4 % at most.
FEW_LAYERS, MORE_LAYERS = 2, 4
# Of a layer: more are merged, with hardly a difference to when the tasks between them start.
ENOUGH_PAGES = 24
ONCE = frozenset({Op.EMBED, Op.UP, Op.HEAD})  # in a pass, not in every layer
OF_NO_WAVE = frozenset({Op.W, Op.STAGE, Op.HEAD, Op.SYNC})


@dataclass(frozen=True)
class DevicePass:
    """Passes of a model on a node with a GPU.

    Attributes:
        work: The model in numbers.
        hardware: The node.
        passes: Schedule and sizes.
    """

    work: ModelWork
    hardware: HardwareSpec
    passes: StreamedPasses

    def timeline(self, load: PassLoad) -> Timeline:
        """The whole pass, all layers."""
        schedule = self.schedule(load)
        return simulate(schedule, self._cost(self.work, self.passes.cut, self._waves(load)))

    def schedule(self, load: PassLoad) -> Schedule:
        """The schedule of the whole pass."""
        return _schedule(self.passes.schedule, self._form(load))

    def seconds(self, load: PassLoad) -> float:
        """Its length from a few of the layers; a pass of few layers is simulated whole."""
        if not load.tokens:
            return 0.0
        form, waves = self._form(load), self._waves(load)
        seconds = [self._sampled_s(sample, form, waves) for sample in self._samples]
        if len(seconds) == 1:
            return seconds[0]
        few_s, more_s = seconds
        each_s = (more_s - few_s) / (MORE_LAYERS - FEW_LAYERS)
        return more_s + each_s * (self.num_layers - MORE_LAYERS)

    def least_s(self, load: PassLoad) -> float:
        """What its busiest lane takes: no order of the tasks is faster."""
        if not load.tokens:
            return 0.0
        few = self._few_layers
        cost = self._cost(few, self.passes.cut, self._waves(load))
        form = replace(self._form(load), layers=(LayerPages(num_pages=0),) * len(few.layers))
        busy_s = dict.fromkeys(Resource, 0.0)
        often = self.num_layers / len(few.layers)
        alike = _Alike.of(cost)
        of_waves, of_groups = Counter(alike.waves), Counter(alike.groups)
        for tasks in _by_part(self.passes.schedule, form):
            op, resource = tasks[0].op, tasks[0].resource
            parts = {0: 1} if op in OF_NO_WAVE else of_groups if op is Op.EXPERTS else of_waves
            seconds = sum(number * cost.duration_s(tasks[part]) for part, number in parts.items())
            busy_s[resource] += seconds if op in ONCE else often * seconds
        busy_s[Resource.HTOD] += cost.pages_s
        return max(busy_s.values())

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.work.layers)

    def _sampled_s(self, sample: "_Sample", form: PassForm, waves: tuple[WaveShape, ...]) -> float:
        outline = _outline(
            self.passes.schedule, replace(form, layers=sample.cut.layers), sample.layer_kinds
        )
        cost = self._cost(sample.work, sample.cut, waves)
        return outline.makespan_s(_durations(outline.kinds, cost))

    def _form(self, load: PassLoad) -> PassForm:
        """Who attends for this load; see `runtime.waves.Division`."""
        fraction = self.passes.cpu_attention_fraction
        return replace(
            self.passes.form,
            has_device_attention=load.prompt_tokens > 0 or (load.decode_rows > 0 and fraction < 1),
            has_cpu_attention=load.decode_rows > 0 and fraction > 0,
        )

    def _waves(self, load: PassLoad) -> tuple[WaveShape, ...]:
        return load.waves(self.passes.num_waves, self.passes.cpu_attention_fraction)

    def _cost(self, work: ModelWork, cut: PageCut, waves: tuple[WaveShape, ...]) -> DeviceCost:
        return DeviceCost(
            work,
            self.hardware,
            waves=waves,
            page_bytes=cut.page_bytes,
            waves_per_group=self.passes.waves_per_group,
            is_staged=self.passes.device.staging_slots > 0,
        )

    @cached_property
    def _few_layers(self) -> ModelWork:
        return replace(self.work, layers=self.work.layers[-FEW_LAYERS:])

    @cached_property
    def _samples(self) -> tuple["_Sample", ...]:
        if self.num_layers <= MORE_LAYERS:
            return (_Sample.of(self.work, self.passes.cut, self.num_layers),)
        return tuple(
            _Sample.of(self.work, self.passes.cut, count) for count in (FEW_LAYERS, MORE_LAYERS)
        )


@dataclass(frozen=True, slots=True)
class _Sample:
    """The last layers of a model: the first ones may be dense.

    Attributes:
        work: Of these layers.
        cut: Their pages, as large as those of all layers are on average.
        layer_kinds: Of each layer the first one that is like it.
    """

    work: ModelWork
    cut: PageCut
    layer_kinds: tuple[int, ...]

    @classmethod
    def of(cls, work: ModelWork, cut: PageCut, count: int) -> "_Sample":
        layers = work.layers[-count:]
        return cls(
            work=replace(work, layers=layers),
            cut=_last_pages(cut, count),
            layer_kinds=tuple(map(layers.index, layers)),
        )


def _last_pages(cut: PageCut, count: int) -> PageCut:
    mean = sum(map(sum, cut.page_bytes)) / len(cut.page_bytes)
    of_these = sum(map(sum, cut.page_bytes[-count:])) / count
    scale = mean / of_these if of_these else 1.0
    by = max(1, max(map(len, cut.page_bytes)) // ENOUGH_PAGES)
    return replace(
        cut,
        layers=tuple(_merge(pages, by) for pages in cut.layers[-count:]),
        page_bytes=tuple(
            tuple(
                round(scale * sum(sizes[first : first + by])) for first in range(0, len(sizes), by)
            )
            for sizes in cut.page_bytes[-count:]
        ),
    )


def _merge(pages: LayerPages, by: int) -> LayerPages:
    """So many pages each as one."""
    return LayerPages(
        num_pages=ceil_div(pages.num_pages, by),
        attention_pages=tuple(sorted({page // by for page in pages.attention_pages})),
        expert_pages=tuple(sorted({page // by for page in pages.expert_pages})),
    )


@lru_cache(maxsize=4096)
def _outline(schedule: str, form: PassForm, layer_kinds: tuple[int, ...]) -> Outline:
    """Outlines of passes; policies that differ in sizes alone share them."""

    def kind_of(task: Task) -> Hashable:
        if task.op in {Op.W, Op.STAGE}:  # pages of a layer are alike, but for the last one
            is_last = task.part + 1 == form.layers[task.layer].num_pages
            return task.op, task.layer, is_last
        if task.op is Op.HEAD:
            return task.op
        return task.op, layer_kinds[task.layer], task.part

    return Outline.of(STREAMING_BUILDERS[schedule](form), kind_of)


@lru_cache(maxsize=2)
def _schedule(schedule: str, form: PassForm) -> Schedule:
    """Whole passes that are asked for again when a plan is shown."""
    return STREAMING_BUILDERS[schedule](form)


@lru_cache(maxsize=1024)
def _by_part(schedule: str, form: PassForm) -> tuple[tuple[Task, ...], ...]:
    """The tasks of each operation and layer, part after part."""
    tasks: dict[Hashable, list[Task]] = {}
    for task in STREAMING_BUILDERS[schedule](form).tasks:
        tasks.setdefault((task.op, task.layer), []).append(task)
    return tuple(tuple(sorted(each, key=lambda task: task.part)) for each in tasks.values())


class _Alike(NamedTuple):
    """Of each wave the first one of its shape, and of each group the first one with its tokens."""

    waves: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, cost: DeviceCost) -> Self:
        num_groups = ceil_div(len(cost.waves), cost.waves_per_group)
        return cls(
            _first_of_each(list(map(id, cost.waves))),  # equal waves are one object
            _first_of_each(list(map(cost.group_tokens, range(num_groups)))),
        )

    def part(self, task: Task) -> int:
        """The first part with which the operation takes as long in this layer."""
        if task.op is Op.EXPERTS:
            return self.groups[task.part]
        return task.part if task.op in OF_NO_WAVE else self.waves[task.part]


def _first_of_each(values: Sequence[float]) -> tuple[int, ...]:
    first = {value: number for number, value in reversed(list(enumerate(values)))}
    return tuple(first[value] for value in values)


def _durations(tasks: Sequence[Task], cost: DeviceCost) -> list[float]:
    """Seconds of each task; what does the same on waves of one shape is counted once."""
    alike = _Alike.of(cost)
    known: dict[Hashable, float] = {}
    durations = []
    for task in tasks:
        key = (task.op, task.layer, alike.part(task))
        if key not in known:
            known[key] = cost.duration_s(task)
        durations.append(known[key])
    return durations
