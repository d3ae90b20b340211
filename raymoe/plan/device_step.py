"""Jobs, steps and memory footprints on a node with a GPU."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from raymoe.errors import ConfigError
from raymoe.plan.cost import ROUTING_BYTES, SUM_BYTES, StepCost
from raymoe.plan.pages import LayerBytes, PageCut, cut_pages, layer_sizes
from raymoe.plan.policy import DevicePolicy, Footprint, Policy
from raymoe.plan.work import LayerWork, MicroBatchShape, ModelWork, StepLoad
from raymoe.schedule.builders import (
    CPU_ATTENTION_FRACTIONS,
    MAX_MICRO_BATCHES,
    RING_SCHEDULES,
    STREAMING_BUILDERS,
)
from raymoe.schedule.graph import Op, Resource, Schedule, Task
from raymoe.schedule.program import NUM_RETURNED_SUMS, LayerPages, StepForm
from raymoe.schedule.timeline import Outline, Timeline, simulate
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.units import GIB, MIB, ceil_div


def blocks_of(tokens: int) -> int:
    return ceil_div(tokens, KV_BLOCK_TOKENS)


KV_BLOCK_TOKENS = 32
MIN_STAGED_BLOCKS = 256  # per micro-batch: the contexts of 16 rows of 512 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSteps:
    schedule: str
    policy: Policy
    device: DevicePolicy
    cut: PageCut

    @classmethod
    def of(cls, model: ModelSpec, schedule: str, policy: Policy, bytes_per_element: int) -> Self:
        """Divide a model's weights into resident parts and pages, as the policy says.

        The host attends for all rows of a model with states if it holds these.
        """
        if model.has_states and not (policy.device and policy.device.states_on_device):
            device = replace(policy.device or DevicePolicy(), staged_blocks=0)
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
        cut = cut_pages(
            sizes,
            page_bytes=device.page_bytes,
            resident_bytes=device.resident_bytes,
            num_groups=device.expert_groups,
            ring_slots=min(device.ring_slots, device.expert_groups),
        )
        if device.states_on_device:
            cut = cut.with_states()
        return cls(schedule=schedule, policy=policy, device=device, cut=cut)

    @property
    def splits(self) -> tuple["StreamedSteps", ...]:
        """The steps to choose from: cores compute no experts, the planned share, or all of them.

        One if cores never compute experts, or always the planned share.
        """
        planned = self.device.cpu_experts_fraction
        if not planned:
            return (self,)
        is_fixed = self.device.is_cpu_experts_fraction_fixed
        fractions = (planned,) if is_fixed else (0.0, planned, 1.0)
        device = replace(self.device, cpu_experts_fraction=0.0)
        cuts = dict.fromkeys(_on_cores(self.cut, fraction) for fraction in fractions)
        return tuple(replace(self, device=device, cut=cut) for cut in cuts)

    @property
    def build(self) -> Callable[[StepForm], Schedule]:
        return STREAMING_BUILDERS[self.schedule]

    @property
    def num_micro_batches(self) -> int:
        return min(
            self.device.num_micro_batches,
            MAX_MICRO_BATCHES.get(self.schedule, self.device.num_micro_batches),
        )

    @property
    def attends_on_host(self) -> bool:
        """Whether the device has no room for KV, so that the host attends for prompts too."""
        return self.device.staged_blocks == 0

    @property
    def cpu_attention_fraction(self) -> float:
        if self.attends_on_host:
            return 1.0
        return CPU_ATTENTION_FRACTIONS.get(self.schedule, self.device.cpu_attention_fraction)

    @property
    def form(self) -> StepForm:
        return StepForm(
            layers=self.cut.layers,
            num_micro_batches=self.num_micro_batches,
            has_device_attention=True,
            micro_batches_per_group=self.device.micro_batches_per_group,
            look_ahead=self.device.look_ahead,
            staging_slots=self.device.staging_slots,
            ring_slots=self.cut.ring_slots,
        )

    @property
    def has_host_experts(self) -> bool:
        """Whether cores compute experts in some steps."""
        return self.device.cpu_experts_fraction > 0

    @property
    def has_sums(self) -> bool:
        """Whether weighted sums of expert outputs are kept between tasks."""
        return self.cut.ring_slots > 0 or self.has_host_experts

    @property
    def launch_tokens(self) -> int:
        """Upper bound of the tokens of one launch of the experts."""
        tokens = self.micro_batches_per_group * self.micro_batch_tokens
        return min(tokens, self.policy.max_num_batched_tokens)

    @property
    def ring(self) -> int:
        """Micro-batches whose attention is in flight at once."""
        return _shape(self.schedule, self._bare_form).ring

    @property
    def micro_batches_per_group(self) -> int:
        return _shape(self.schedule, self._bare_form).micro_batches_per_group

    @property
    def _bare_form(self) -> StepForm:
        return replace(self.form, layers=(LayerPages(num_pages=0),) * min(2, len(self.cut.layers)))

    @property
    def micro_batch_tokens(self) -> int:
        """Upper bound: filling the smallest first exceeds the mean by at most one chunk."""
        policy = self.policy
        mean = ceil_div(policy.max_num_batched_tokens, self.num_micro_batches)
        return min(policy.max_num_batched_tokens, mean + policy.max_prefill_chunk_tokens)

    @property
    def staged_blocks(self) -> int:
        """KV blocks of one micro-batch for which the device reserves memory."""
        blocks = self.device.staged_blocks
        if blocks is None:
            blocks = max(MIN_STAGED_BLOCKS, 2 * ceil_div(self.micro_batch_tokens, KV_BLOCK_TOKENS))
        return min(blocks, self.policy.num_kv_blocks)


@lru_cache(maxsize=256)
def _on_cores(cut: PageCut, fraction: float) -> PageCut:
    return cut.on_cores(fraction) if fraction else cut


class _Shape(NamedTuple):
    ring: int
    micro_batches_per_group: int


@lru_cache(maxsize=1024)
def _shape(schedule: str, form: StepForm) -> _Shape:
    tasks = STREAMING_BUILDERS[schedule](form).tasks
    places = [buffer.key[0] for task in tasks for buffer in task.writes if buffer.name == "qkv"]
    groups = [len(task.writes) for task in tasks if task.op is Op.EXPERTS]
    return _Shape(ring=1 + max(places), micro_batches_per_group=max(groups))


# Kinds of layers repeat, and with two weight slots the timeline repeats after an even number of
# layers: step time grows linearly with them. Over random policies the extrapolation differs from a
# simulation of all layers by 0.2 % in the mean and 4 % at most. Where kinds do not repeat within
# `MAX_PERIOD` layers, as in Nemotron-3, all layers are simulated.
EXCERPT_LAYERS, MAX_PERIOD = 2, 10
LEADING_LAYERS = 4  # that may be of other kinds, as the dense ones of DeepSeek-V3
# Pages per layer to keep; more hardly change when the tasks between them start. Cuts that differ
# only in the size of their pages then share an outline.
MAX_PAGES = 24
ONCE = frozenset({Op.EMBED, Op.UP, Op.HEAD})  # per step, not per layer
OF_NO_MICRO_BATCH = frozenset({Op.W, Op.STAGE, Op.HEAD, Op.SYNC})
OF_A_LAUNCH = frozenset({Op.EXPERTS, Op.ROWS, Op.CEXPERTS, Op.SUMS})


@dataclass(frozen=True)
class DeviceStep:
    work: ModelWork
    hardware: HardwareSpec
    steps: StreamedSteps

    def timeline(self, load: StepLoad) -> Timeline:
        split = self.split(load)
        if split is not self:
            return split.timeline(load)
        cost = self._cost(self.work, self.steps.cut, self._micro_batches(load))
        return simulate(self.schedule(load), cost)

    def schedule(self, load: StepLoad) -> Schedule:
        split = self.split(load)
        if split is not self:
            return split.schedule(load)
        return _schedule(self.steps.schedule, self._form(load))

    @cached_property
    def splits(self) -> tuple["DeviceStep", ...]:
        """Steps that divide the experts between device and cores (`StreamedSteps.splits`)."""
        if not self.steps.has_host_experts:
            return (self,)
        return tuple(replace(self, steps=each) for each in self.steps.splits)

    def split(self, load: StepLoad) -> "DeviceStep":
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
        """Step time extrapolated from a few layers; shallow models are simulated whole."""
        if not load.tokens:
            return 0.0
        if self.steps.has_host_experts:
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
        if self.steps.has_host_experts:
            return min(split.min_s(load) for split in self.splits)
        few, (cut, layers) = self._excerpt, self._bare_cut
        cost = self._cost(few, cut, self._micro_batches(load))
        form = self._form(load, bare=layers)
        busy_s = dict.fromkeys(Resource, 0.0)
        often = self.num_layers / len(few.layers)
        duplicates = _Duplicate.of(cost)
        of_micro_batches = Counter(duplicates.micro_batches)
        of_launches = Counter(duplicates.launches)
        for tasks in _by_part(self.steps.schedule, form):
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
            busy_s[resource] += seconds if op in ONCE else often * seconds
        pages = self.steps.cut
        busy_s[Resource.HTOD] += cost.pages_s(pages.streamed_bytes, pages.num_pages)
        return max(busy_s.values())

    @cached_property
    def _bare_cut(self) -> tuple["_BareCut", tuple[LayerPages, ...]]:
        """The last layers without pages, all groups of the device in one; a mean page for rates."""
        cut, count = self.steps.cut, len(self._excerpt.layers)
        shares: tuple[tuple[float, ...], ...] = ()
        if cut.host_shares:
            shares = tuple(each and (sum(each),) for each in cut.group_shares[-count:])
        bare = _BareCut(
            page_bytes=((cut.streamed_bytes / max(1, len(cut.page_bytes)),),),
            group_shares=shares,
            host_shares=cut.host_shares[-count:],
        )
        return bare, tuple(
            LayerPages(num_pages=0, host_experts=each.host_experts, has_states=each.has_states)
            for each in cut.layers[-count:]
        )

    @property
    def num_layers(self) -> int:
        return len(self.work.layers)

    def _sampled_s(
        self, sample: "_Sample", form: StepForm, micro_batches: tuple[MicroBatchShape, ...]
    ) -> float:
        outline = _outline(
            self.steps.schedule, replace(form, layers=sample.cut.layers), sample.layer_kinds
        )
        cost = self._cost(sample.work, sample.cut, micro_batches)
        return outline.makespan_s(_durations(outline.kinds, cost))

    def _form(self, load: StepLoad, bare: tuple[LayerPages, ...] = ()) -> StepForm:
        """The form of a step, or of one with the given layers."""
        fraction, all_on_host = self.steps.cpu_attention_fraction, self.steps.attends_on_host
        on_device = load.prompt_tokens > 0 or (load.decode_rows > 0 and fraction < 1)
        on_host = all_on_host or (load.decode_rows > 0 and fraction > 0)
        key = (bare, on_device and not all_on_host, on_host)
        if key not in self._forms:
            form = self.steps.form
            self._forms[key] = replace(
                form,
                layers=bare or form.layers,
                has_device_attention=key[1],
                has_cpu_attention=key[2],
            )
        return self._forms[key]

    @cached_property
    def _forms(self) -> dict[tuple[tuple[LayerPages, ...], bool, bool], StepForm]:
        return {}

    def _micro_batches(self, load: StepLoad) -> tuple[MicroBatchShape, ...]:
        steps = self.steps
        fraction = steps.cpu_attention_fraction
        return _cut(load, steps.num_micro_batches, fraction, steps.attends_on_host)

    def _cost(
        self,
        work: ModelWork,
        cut: "PageCut | _BareCut",
        micro_batches: tuple[MicroBatchShape, ...],
    ) -> StepCost:
        return StepCost(
            work,
            self.hardware,
            micro_batches=micro_batches,
            page_bytes=cut.page_bytes,
            micro_batches_per_group=self.steps.micro_batches_per_group,
            group_shares=cut.group_shares if cut.has_sums else (),
            host_shares=cut.host_shares,
            is_staged=self.steps.device.staging_slots > 0,
            has_states=self.steps.device.states_on_device,
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
            return (_Sample.of(self.work, self.steps.cut, self.num_layers),)
        return tuple(_Sample.of(self.work, self.steps.cut, count) for count in (few, more))


class _BareCut(NamedTuple):
    """What costs take of a `PageCut`."""

    page_bytes: tuple[tuple[float, ...], ...]
    group_shares: tuple[tuple[float, ...], ...]
    host_shares: tuple[float, ...]
    has_sums: bool = True


@dataclass(frozen=True, slots=True)
class _Sample:
    """The last layers of a model (the first may be dense)."""

    work: ModelWork
    cut: PageCut  # pages of these layers, scaled to the mean size over all layers
    layer_kinds: tuple[int, ...]  # for each layer, the index of the first equal layer

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
    merged = [
        _merge(pages, sizes)
        for pages, sizes in zip(cut.layers[-count:], cut.page_bytes[-count:], strict=True)
    ]
    return replace(
        cut,
        layers=tuple(pages for pages, _ in merged),
        page_bytes=tuple(tuple(round(scale * size) for size in sizes) for _, sizes in merged),
        group_bounds=cut.group_bounds[-count:],
        sizes=cut.sizes[-count:],
    )


@lru_cache(maxsize=1024)
def _merge(pages: LayerPages, page_bytes: tuple[int, ...]) -> tuple[LayerPages, tuple[int, ...]]:
    """Divide what is common, and each group, into a few pages of equal size."""
    few: dict[int, range] = {}  # the new pages that hold some of each page
    sizes: list[int] = []
    groups = []
    in_groups = page_bytes[pages.num_common_pages :]
    for unit in (range(pages.num_common_pages), *pages.group_pages):
        first, count = len(sizes), min(len(unit), MAX_PAGES // max(1, len(pages.group_pages)))
        for place, page in enumerate(unit):
            last = ((place + 1) * count - 1) // len(unit)
            few[page] = range(first + place * count // len(unit), first + last + 1)
        groups.append(tuple(range(first, first + count)))
        sizes += [sum(page_bytes[page] for page in unit) // max(1, count)] * count
    if in_groups and not pages.host_experts:  # the groups are about equal
        first = len(groups[0])
        sizes[first:] = [sum(in_groups) // (len(sizes) - first)] * (len(sizes) - first)

    def merged(old: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(new for page in old for new in few[page]))

    form = replace(
        pages,
        num_pages=len(sizes),
        attention_pages=merged(pages.attention_pages),
        expert_pages=merged(pages.expert_pages),
        group_pages=tuple(groups[1:]),
    )
    return form, tuple(sizes)


@lru_cache(maxsize=4096)
def _outline(schedule: str, form: StepForm, layer_kinds: tuple[int, ...]) -> Outline:
    def kind_of(task: Task) -> Hashable:
        if task.op in {Op.W, Op.STAGE}:
            return task.op, task.layer, _kind_of_page(form.layers[task.layer], task.part)
        if task.op is Op.HEAD:
            return task.op
        num_groups = form.layers[task.layer].num_groups
        return task.op, layer_kinds[task.layer], num_groups, task.part

    return Outline.of(STREAMING_BUILDERS[schedule](form), kind_of)


def _kind_of_page(pages: LayerPages, page: int) -> int:
    """Equal for pages of equal size: common ones, those of a group, and of all groups if equal."""
    if page < pages.num_common_pages:
        return -1
    if not pages.host_experts:
        return 0
    return next(number for number, group in enumerate(pages.group_pages) if page <= group[-1])


@lru_cache(maxsize=4096)  # a search asks for the same loads repeatedly
def _cut(
    load: StepLoad, num_micro_batches: int, cpu_attention_fraction: float, attends_on_host: bool
) -> tuple[MicroBatchShape, ...]:
    return load.micro_batches(
        num_micro_batches, cpu_attention_fraction, has_prompts_on_host=attends_on_host
    )


@lru_cache(maxsize=2)
def _schedule(schedule: str, form: StepForm) -> Schedule:
    return STREAMING_BUILDERS[schedule](form)


@lru_cache(maxsize=1024)
def _by_part(schedule: str, form: StepForm) -> tuple[tuple[Task, ...], ...]:
    tasks: dict[Hashable, list[Task]] = {}
    for task in STREAMING_BUILDERS[schedule](form).tasks:
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


RUNTIME_BYTES = GIB  # interpreter, torch, tokenizer, request state
DEVICE_RUNTIME_BYTES = 512 * MIB  # kernels, workspaces of matrix products, rounding
DECODING_BYTES = 160 * MIB  # a block of a quantised matrix while it is dequantised
SCAN_BYTES = 256 * MIB  # matrices of the chunks of a prompt that are multiplied at once
LOGIT_CHUNK_ROWS = 256
STAGED_MICRO_BATCHES = 2  # micro-batches whose KV is on the device at once
FLOAT_BYTES = 4
UNEVENNESS = 4  # max over mean rows per expert


def device_footprint(model: ModelSpec, work: ModelWork, steps: StreamedSteps) -> Footprint:
    tokens = steps.policy.max_num_batched_tokens
    ring = steps.ring * steps.micro_batch_tokens * work.around_attention_bytes
    at_experts = steps.launch_tokens
    rows = tokens if steps.has_sums else 0
    if steps.has_host_experts:
        rows += NUM_RETURNED_SUMS * at_experts
    sums = rows * work.expert_input * SUM_BYTES
    intermediates, states = _intermediates(model, work, at_experts), 0
    if steps.device.states_on_device:
        states = steps.policy.num_state_slots * work.state_bytes
        intermediates += _state_intermediates(work, steps.micro_batch_tokens)
    return Footprint(
        memory="device memory",
        parts=(
            ("weights that stay", steps.cut.resident_bytes),
            ("weight slots", steps.cut.slots_bytes),
            ("final norm and head", _head_bytes(model, work)),
            ("activations", _routed(work, tokens) + ring + sums),
            ("staged KV", STAGED_MICRO_BATCHES * steps.staged_blocks * _layer_block_bytes(work)),
            ("states", states),
            ("intermediates", intermediates),
        ),
    )


def host_footprint(model: ModelSpec, work: ModelWork, steps: StreamedSteps) -> Footprint:
    element, hidden = work.bytes_per_element, work.hidden_size
    policy = steps.policy
    ring = steps.ring * steps.micro_batch_tokens * work.around_attention_bytes
    staging = steps.device.staging_slots * steps.cut.page_length
    num_cache_bytes = cache_bytes(work, policy)
    if steps.device.states_on_device:
        num_cache_bytes -= policy.num_state_slots * work.state_bytes
    of_token = hidden * element
    if steps.has_host_experts:  # their input, routing and sums
        top_k = max(layer.top_k for layer in work.kinds)
        of_token += work.expert_input * (element + SUM_BYTES) + top_k * ROUTING_BYTES
    return Footprint(
        memory="host memory",
        parts=(
            ("weights", steps.cut.streamed_bytes + model.vocab_size * hidden * element),
            ("KV cache", num_cache_bytes),
            ("activations", policy.max_num_batched_tokens * of_token + ring + staging),
            ("runtime", RUNTIME_BYTES + logit_bytes(model)),
        ),
    )


def resident_footprint(model: ModelSpec, work: ModelWork, policy: Policy) -> Footprint:
    element, hidden, tokens = (
        work.bytes_per_element,
        work.hidden_size,
        policy.max_num_batched_tokens,
    )
    embedding = model.vocab_size * hidden * element
    routed = _routed(work, tokens) + tokens * work.around_attention_bytes
    intermediates = _intermediates(model, work, tokens) + _state_intermediates(work, tokens)
    return Footprint(
        memory="device memory",
        parts=(
            ("weights", sum(layer.total for layer in layer_sizes(model, element))),
            ("embedding, final norm and head", embedding + _head_bytes(model, work)),
            ("KV cache", cache_bytes(work, policy)),
            ("activations", routed),
            ("intermediates", intermediates),
        ),
    )


def _head_bytes(model: ModelSpec, work: ModelWork) -> int:
    vectors = sum(shape[0] for shape in model.outer_weights().values() if len(shape) == 1)
    return work.head.num_bytes + vectors * work.bytes_per_element


def resident_host_footprint(model: ModelSpec) -> Footprint:
    return Footprint(memory="host memory", parts=(("runtime", RUNTIME_BYTES + logit_bytes(model)),))


def workspace_bytes(footprint: Footprint) -> int:
    """The part of the intermediates that operations allocate through torch."""
    return footprint.bytes_of("intermediates") - DEVICE_RUNTIME_BYTES


def kv_block_bytes(work: ModelWork) -> int:
    return KV_BLOCK_TOKENS * work.kv_token_bytes


def cache_bytes(work: ModelWork, policy: Policy) -> int:
    """Bytes of the KV cache, of the states of all sequences and of their snapshots."""
    return policy.num_kv_blocks * kv_block_bytes(work) + policy.num_state_slots * work.state_bytes


def logit_bytes(model: ModelSpec) -> int:
    """A chunk of logits, its float32 copy and the sampler's buffers."""
    return 3 * FLOAT_BYTES * LOGIT_CHUNK_ROWS * model.vocab_size


def _layer_block_bytes(work: ModelWork) -> int:
    return KV_BLOCK_TOKENS * max(layer.kv_token_bytes for layer in work.kinds)


def _routed(work: ModelWork, tokens: int) -> int:
    top_k = max(layer.top_k for layer in work.kinds)
    elements = 2 * work.hidden_size + work.has_latent_experts * work.expert_input
    return tokens * (elements * work.bytes_per_element + top_k * 2 * FLOAT_BYTES)


def _intermediates(model: ModelSpec, work: ModelWork, tokens: int) -> int:
    largest = max(_ffn_intermediates(layer, work, tokens) for layer in work.kinds)
    decoding = 0 if model.quantization is None else DECODING_BYTES
    return largest + decoding + logit_bytes(model) + DEVICE_RUNTIME_BYTES


def _state_intermediates(work: ModelWork, tokens: int) -> int:
    """Bytes of a layer with states: its mixed inputs, decays and gains, and what is read.

    Chunks of long prompts come on top (`kernels.gpu_state`).
    """
    layers = [layer for layer in work.kinds if layer.state_bytes]
    if not layers:
        return 0
    element = work.bytes_per_element
    of_token = max(
        (mixed + 2 * read) * element + 4 * FLOAT_BYTES * (decays + gains)
        for mixed, decays, gains, read in (layer.token_sizes for layer in layers)
    )
    return tokens * of_token + SCAN_BYTES


def _ffn_intermediates(layer: LayerWork, work: ModelWork, tokens: int) -> int:
    """Bytes of a layer's feed-forward intermediates: torch experts, our tiled kernel or dense.

    Torch's experts hold float32 sums of all tokens, and of one expert's rows the inputs and three
    matrices, or results and float32 weighted results and sums. Our kernel holds gated products and
    float32 results of all rows and a copy of the inputs.
    """
    element, size = work.bytes_per_element, layer.expert_input
    rows, wide = tokens * layer.top_k, layer.expert_hidden
    busiest = min(tokens, UNEVENNESS * rows // max(layer.num_experts, 1))
    of_row = size * element + max(3 * wide * element, 2 * size * FLOAT_BYTES)
    one_by_one = tokens * size * FLOAT_BYTES + busiest * of_row
    in_tiles = rows * (wide * element + size * FLOAT_BYTES) + tokens * size * element
    dense = 3 * tokens * layer.common_hidden * element
    return max(one_by_one, in_tiles, dense)
