"""DeviceJob: what is planned for on a node with a GPU, and the sequences that a KV cache is for."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple, Self

from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.pages import LayerBytes, PageCut, cut_pages, layer_sizes
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.work import ModelWork, PassLoad, WaveShape
from raymoe.schedule.builders import (
    CPU_ATTENTION_FRACTIONS,
    MOST_WAVES,
    STREAMING_BUILDERS,
)
from raymoe.schedule.graph import Op, Resource, Schedule, Task
from raymoe.schedule.program import LayerPages, PassForm
from raymoe.schedule.timeline import Outline, Timeline, simulate
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob:
    """A model, a node and a job.

    Attributes:
        model: The model.
        work: The same in numbers.
        hardware: The node.
        workload: The job.
        max_context_tokens: Longest sequence.
    """

    model: ModelSpec
    work: ModelWork
    hardware: HardwareSpec
    workload: Workload
    max_context_tokens: int

    def batch_size(self, num_blocks: int, share: float) -> int:
        """A share of the sequences whose KV fits on average: those that join later are shorter.

        0 where the longest sequence does not fit.
        """
        if num_blocks < self.least_blocks:
            return 0
        workload = self.workload
        mean = workload.prompt_tokens + workload.generated_tokens // 2
        return ceil(share * min(workload.num_rows, num_blocks // blocks_of(mean)))

    @property
    def balanced_tokens(self) -> int:
        """Tokens of a pass for which the GPU takes as long as the link for all weights.

        Source: MoE-Lens, section 6.3 (n_real).
        """
        pass_s = self.work.all_weight_bytes / self.hardware.htod_bytes_per_s
        return max(1, int(pass_s * self.hardware.gpu_flop_per_s / self.work.token_flop))

    def useful_blocks(self, num_blocks: int, batch_size: int) -> int:
        """Those of the blocks that so many sequences could fill; more would mostly stay empty."""
        roomy = min(self.max_context_tokens, 2 * self.workload.context_tokens)
        return min(num_blocks, max(self.least_blocks, batch_size * blocks_of(roomy)))

    @property
    def least_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return blocks_of(self.max_context_tokens)


def blocks_of(tokens: int) -> int:
    """KV blocks that tokens of one sequence take."""
    return ceil_div(tokens, KV_BLOCK_TOKENS)


KV_BLOCK_TOKENS = 32
LEAST_STAGED_BLOCKS = 256  # of a wave: the contexts of 16 rows of 512 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedPasses:
    """The passes of one schedule with one policy.

    Attributes:
        schedule: A name of `STREAMING_BUILDERS`.
        policy: Sizes of passes.
        device: How the device is used.
        cut: Which weights stay on the device, and the pages of the rest.
    """

    schedule: str
    policy: Policy
    device: DevicePolicy
    cut: PageCut

    @classmethod
    def of(cls, model: ModelSpec, schedule: str, policy: Policy, bytes_per_element: int) -> Self:
        """Cut the weights of a model, which take `bytes_per_element` where they are not quantised.

        Raises:
            ConfigError: The policy's sizes are out of range.
        """
        return cls.of_layers(layer_sizes(model, bytes_per_element), schedule, policy)

    @classmethod
    def of_layers(cls, sizes: tuple[LayerBytes, ...], schedule: str, policy: Policy) -> Self:
        """Cut layers of these sizes.

        Raises:
            ConfigError: The policy's sizes are out of range.
        """
        device = policy.device or DevicePolicy()
        cut = cut_pages(sizes, page_bytes=device.page_bytes, resident_bytes=device.resident_bytes)
        return cls(schedule=schedule, policy=policy, device=device, cut=cut)

    @property
    def build(self) -> Callable[[PassForm], Schedule]:
        """The builder of the schedule."""
        return STREAMING_BUILDERS[self.schedule]

    @property
    def num_waves(self) -> int:
        """Into how many waves a pass is cut."""
        return min(self.device.num_waves, MOST_WAVES.get(self.schedule, self.device.num_waves))

    @property
    def cpu_attention_fraction(self) -> float:
        """Share of the decoding sequences for which the CPU attends."""
        return CPU_ATTENTION_FRACTIONS.get(self.schedule, self.device.cpu_attention_fraction)

    @property
    def form(self) -> PassForm:
        """A pass in which both sides attend."""
        return PassForm(
            layers=self.cut.layers,
            num_waves=self.num_waves,
            has_device_attention=True,
            waves_per_group=self.device.waves_per_group,
            look_ahead=self.device.look_ahead,
            staging_slots=self.device.staging_slots,
        )

    @property
    def ring(self) -> int:
        """Waves whose attention is under way at once."""
        return _shape(self.schedule, self._bare_form).ring

    @property
    def waves_per_group(self) -> int:
        """Waves whose tokens meet in one expert launch."""
        return _shape(self.schedule, self._bare_form).waves_per_group

    @property
    def _bare_form(self) -> PassForm:
        """As many layers as tell how waves follow each other, without pages."""
        return replace(self.form, layers=(LayerPages(num_pages=0),) * min(2, len(self.cut.layers)))

    @property
    def wave_tokens(self) -> int:
        """No wave is larger: dealing to the smallest exceeds the mean by one chunk at most."""
        policy = self.policy
        mean = ceil_div(policy.pass_tokens, self.num_waves)
        return min(policy.pass_tokens, mean + policy.prefill_chunk_tokens)

    @property
    def staged_blocks(self) -> int:
        """KV blocks of one wave that the device has room for."""
        blocks = self.device.staged_blocks
        if blocks is None:
            blocks = max(LEAST_STAGED_BLOCKS, 2 * ceil_div(self.wave_tokens, KV_BLOCK_TOKENS))
        return min(blocks, self.policy.num_kv_blocks)


class _Shape(NamedTuple):
    ring: int
    waves_per_group: int


@lru_cache(maxsize=1024)
def _shape(schedule: str, form: PassForm) -> _Shape:
    """What the tasks of a schedule say of the buffers they take."""
    tasks = STREAMING_BUILDERS[schedule](form).tasks
    places = [buffer.key[0] for task in tasks for buffer in task.writes if buffer.name == "qkv"]
    groups = [len(task.writes) for task in tasks if task.op is Op.EXPERTS]
    return _Shape(ring=1 + max(places), waves_per_group=max(groups))


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
