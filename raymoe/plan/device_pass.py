"""DeviceJob: what is planned for on a node with a GPU, and the sequences that a KV cache is for."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple, Self

from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.pages import LayerBytes, PageCut, cut_pages, layer_sizes
from raymoe.plan.policy import DevicePolicy, Footprint, Policy
from raymoe.plan.work import LayerWork, ModelWork, PassLoad, WaveShape
from raymoe.schedule.builders import CPU_ATTENTION_FRACTIONS, MOST_WAVES, STREAMING_BUILDERS
from raymoe.schedule.graph import Op, Resource, Schedule, Task
from raymoe.schedule.program import LayerPages, PassForm
from raymoe.schedule.timeline import Outline, Timeline, simulate
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import GIB, MIB, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob:
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
    """Passes of a model on a node with a GPU."""

    work: ModelWork
    hardware: HardwareSpec
    passes: StreamedPasses

    def timeline(self, load: PassLoad) -> Timeline:
        schedule = self.schedule(load)
        return simulate(schedule, self._cost(self.work, self.passes.cut, self._waves(load)))

    def schedule(self, load: PassLoad) -> Schedule:
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
        return len(self.work.layers)

    def _sampled_s(self, sample: "_Sample", form: PassForm, waves: tuple[WaveShape, ...]) -> float:
        outline = _outline(
            self.passes.schedule, replace(form, layers=sample.cut.layers), sample.layer_kinds
        )
        cost = self._cost(sample.work, sample.cut, waves)
        return outline.makespan_s(_durations(outline.kinds, cost))

    def _form(self, load: PassLoad) -> PassForm:
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
    return LayerPages(
        num_pages=ceil_div(pages.num_pages, by),
        attention_pages=tuple(sorted({page // by for page in pages.attention_pages})),
        expert_pages=tuple(sorted({page // by for page in pages.expert_pages})),
    )


@lru_cache(maxsize=4096)
def _outline(schedule: str, form: PassForm, layer_kinds: tuple[int, ...]) -> Outline:
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
    return STREAMING_BUILDERS[schedule](form)


@lru_cache(maxsize=1024)
def _by_part(schedule: str, form: PassForm) -> tuple[tuple[Task, ...], ...]:
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
        if task.op is Op.EXPERTS:
            return self.groups[task.part]
        return task.part if task.op in OF_NO_WAVE else self.waves[task.part]


def _first_of_each(values: Sequence[float]) -> tuple[int, ...]:
    first = {value: number for number, value in reversed(list(enumerate(values)))}
    return tuple(first[value] for value in values)


def _durations(tasks: Sequence[Task], cost: DeviceCost) -> list[float]:
    alike = _Alike.of(cost)
    known: dict[Hashable, float] = {}
    durations = []
    for task in tasks:
        key = (task.op, task.layer, alike.part(task))
        if key not in known:
            known[key] = cost.duration_s(task)
        durations.append(known[key])
    return durations


RUNTIME_BYTES = GIB  # interpreter, torch, tokenizer, request state
DEVICE_RUNTIME_BYTES = 512 * MIB  # kernels, workspaces of matrix products, rounding
DECODING_BYTES = 160 * MIB  # a block of a quantised matrix on its way to numbers
LOGIT_CHUNK_ROWS = 256
NUM_SLOTS = 2
STAGED_WAVES = 2  # KV of this many waves is on the device at once
FLOAT_BYTES = 4
UNEVENNESS = 4  # rows of the busiest expert over the mean


def device_footprint(model: ModelSpec, work: ModelWork, passes: StreamedPasses) -> Footprint:
    tokens = passes.policy.pass_tokens
    ring = passes.ring * _around_attention(model, work, passes.wave_tokens)
    at_experts = min(passes.waves_per_group * passes.wave_tokens, tokens)
    return Footprint(
        memory="device memory",
        parts=(
            ("weights that stay", passes.cut.resident_bytes),
            ("weight slots", weight_slots_bytes(passes.cut)),
            ("final norm and head", _head_bytes(model, work)),
            ("activations", _routed(work, tokens) + ring),
            ("staged KV", STAGED_WAVES * passes.staged_blocks * _layer_block_bytes(work)),
            ("intermediates", _intermediates(model, work, at_experts)),
        ),
    )


def host_footprint(model: ModelSpec, work: ModelWork, passes: StreamedPasses) -> Footprint:
    """Host memory of a policy; arguments as in `device_footprint`."""
    element, hidden = work.bytes_per_element, work.hidden_size
    policy = passes.policy
    ring = passes.ring * _around_attention(model, work, passes.wave_tokens)
    staging = passes.device.staging_slots * passes.cut.page_length
    return Footprint(
        memory="host memory",
        parts=(
            ("weights", passes.cut.streamed_bytes + model.vocab_size * hidden * element),
            ("KV cache", policy.num_kv_blocks * kv_block_bytes(work)),
            ("activations", policy.pass_tokens * hidden * element + ring + staging),
            ("runtime", RUNTIME_BYTES + logit_bytes(model)),
        ),
    )


def resident_footprint(model: ModelSpec, work: ModelWork, policy: Policy) -> Footprint:
    """Device memory of a policy with all weights and the KV cache on the device."""
    element, hidden, tokens = work.bytes_per_element, work.hidden_size, policy.pass_tokens
    embedding = model.vocab_size * hidden * element
    routed = _routed(work, tokens) + _around_attention(model, work, tokens)
    return Footprint(
        memory="device memory",
        parts=(
            ("weights", sum(layer.total for layer in layer_sizes(model, element))),
            ("embedding, final norm and head", embedding + _head_bytes(model, work)),
            ("KV cache", policy.num_kv_blocks * kv_block_bytes(work)),
            ("activations", routed),
            ("intermediates", _intermediates(model, work, tokens)),
        ),
    )


def _head_bytes(model: ModelSpec, work: ModelWork) -> int:
    vectors = sum(shape[0] for shape in model.outer_weights().values() if len(shape) == 1)
    return work.head.num_bytes + vectors * work.bytes_per_element


def resident_host_footprint(model: ModelSpec) -> Footprint:
    """Host memory of a model that lies on the device."""
    return Footprint(memory="host memory", parts=(("runtime", RUNTIME_BYTES + logit_bytes(model)),))


def workspace_bytes(footprint: Footprint) -> int:
    """Of the intermediates of a device, what operations allocate through torch."""
    return footprint.bytes_of("intermediates") - DEVICE_RUNTIME_BYTES


def weight_slots_bytes(cut: PageCut) -> int:
    return NUM_SLOTS * cut.largest_layer_bytes


def kv_block_bytes(work: ModelWork) -> int:
    """One block of the KV cache, all layers."""
    return KV_BLOCK_TOKENS * work.kv_token_bytes


def logit_bytes(model: ModelSpec) -> int:
    """A chunk of logits, its float copy and what sampling makes of it."""
    return 3 * FLOAT_BYTES * LOGIT_CHUNK_ROWS * model.vocab_size


def _around_attention(model: ModelSpec, work: ModelWork, wave_tokens: int) -> int:
    width = model.layers[0].attention.token_shapes.num_elements
    return wave_tokens * width * work.bytes_per_element


def _layer_block_bytes(work: ModelWork) -> int:
    return KV_BLOCK_TOKENS * max(layer.kv_token_bytes for layer in work.kinds)


def _routed(work: ModelWork, tokens: int) -> int:
    top_k = max(layer.top_k for layer in work.kinds)
    return tokens * (2 * work.hidden_size * work.bytes_per_element + top_k * 2 * FLOAT_BYTES)


def _intermediates(model: ModelSpec, work: ModelWork, tokens: int) -> int:
    largest = max(_ffn_intermediates(layer, work, tokens) for layer in work.kinds)
    decoding = 0 if model.quantization is None else DECODING_BYTES
    return largest + decoding + logit_bytes(model) + DEVICE_RUNTIME_BYTES


def _ffn_intermediates(layer: LayerWork, work: ModelWork, tokens: int) -> int:
    """What a layer's network takes: torch's experts one by one, or ours in tiles, or a dense one.

    Torch's: results of all routed rows, weighted in float32, and three matrices of one expert's
    rows. Ours: gated products and float32 results of all rows, and a copy of the inputs.
    """
    element, hidden = work.bytes_per_element, work.hidden_size
    rows, wide = tokens * layer.top_k, layer.expert.parameters // (3 * hidden)
    busiest = min(tokens, UNEVENNESS * rows // max(layer.num_experts, 1))
    one_by_one = rows * hidden * (element + FLOAT_BYTES) + 3 * busiest * wide * element
    in_tiles = rows * (wide * element + hidden * FLOAT_BYTES) + tokens * hidden * element
    dense = 3 * tokens * (layer.common.parameters // (3 * hidden)) * element
    return max(one_by_one, in_tiles, dense)
