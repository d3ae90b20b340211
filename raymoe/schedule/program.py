"""The form of a step for builders: pages per layer and micro-batches."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from raymoe.errors import ConfigError
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.placement import LayerPlacement


class Cell(NamedTuple):
    """A layer of a micro-batch."""

    layer: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """Division of a step, and the slot of its first streamed layer.

    A layer with pages is *streamed*, whether or not a step loads them. Streamed layers alternate
    between the two weight slots of the device, also from step to step. Groups of experts have slots
    of their own, a ring: group g of any layer is in the ring's slot g modulo `ring_slots`, and its
    slot is free for the next one once all micro-batches are computed with it.
    """

    layers: tuple[LayerPlacement, ...]
    num_micro_batches: int  # slices of the step that pass through attention together
    has_cpu_attention: bool = True  # some rows attend on the CPU
    # Some rows attend on the device, which receives their KV blocks.
    has_device_attention: bool = False
    # Micro-batches per expert launch (schedule "micro_batches"); the last group of a layer may have
    # fewer.
    micro_batches_per_group: int = 1
    # Micro-batches by which attention is issued ahead of the experts (schedule "micro_batches").
    look_ahead: int = 2
    staging_slots: int = 0  # pages in the pinned staging ring; 0 if weights are pinned themselves
    first_slot: int = 0  # the weight slot, 0 or 1, that holds the first streamed layer
    ring_slots: int = 0  # slots for groups of experts; 0 if all layers are loaded as a whole

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("layers is empty; a step goes through at least one layer")
        if self.num_micro_batches < 1:
            raise ConfigError(
                f"num_micro_batches is {self.num_micro_batches}; it must be at least 1"
            )
        if self.micro_batches_per_group < 1:
            raise ConfigError(
                f"micro_batches_per_group is {self.micro_batches_per_group}; it must be at least 1"
            )
        if self.look_ahead < 0:
            raise ConfigError(f"look_ahead is {self.look_ahead}; it must be at least 0")
        if not (self.has_cpu_attention or self.has_device_attention):
            raise ConfigError("has_cpu_attention or has_device_attention must be true")
        if self.staging_slots < 0:
            raise ConfigError(f"staging_slots is {self.staging_slots}; it must be at least 0")
        if self.first_slot not in (0, 1):
            raise ConfigError(f"first_slot is {self.first_slot}; the slots are 0 and 1")
        if self.ring_slots < any(pages.group_pages for pages in self.layers):
            raise ConfigError(
                f"ring_slots is {self.ring_slots}; groups of experts need at least one slot"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(
            layer
            for layer, pages in enumerate(self.layers)
            if pages.num_pages or pages.num_host_pages
        )

    @property
    def steps(self) -> tuple[Cell, ...]:
        return tuple(
            Cell(layer, micro_batch)
            for layer in range(self.num_layers)
            for micro_batch in range(self.num_micro_batches)
        )


def next_first_slot(form: StepForm) -> int:
    """The slot into which this step loads the first streamed layer for the next step."""
    return (form.first_slot + len(form.streamed)) % 2


NUM_LAYER_SLOTS = 2  # slots of whole layers, or of what is not in a group of experts
NO_GROUP = -1


class Load(NamedTuple):
    layer: int
    page: int
    slot: int
    place: int  # number of the page in its slot
    group: int = NO_GROUP


def _common_loads(form: StepForm, layer: int, slot: int) -> tuple[Load, ...]:
    """The pages of a layer that are in no group of experts: all where there are no groups."""
    return tuple(
        Load(layer, page, slot, page) for page in range(form.layers[layer].num_common_pages)
    )


def group_loads(form: StepForm, layer: int, group: int) -> tuple[Load, ...]:
    """The pages of a group of experts; none if the layer has fewer groups."""
    groups = form.layers[layer].group_pages
    if group >= len(groups):
        return ()
    slot = NUM_LAYER_SLOTS + group % form.ring_slots
    return tuple(Load(layer, page, slot, place, group) for place, page in enumerate(groups[group]))


def _ring_loads(form: StepForm, layer: int) -> tuple[Load, ...]:
    """The groups of a layer that fill the ring before the first of them is computed."""
    return tuple(
        load for group in range(form.ring_slots) for load in group_loads(form, layer, group)
    )


def loads_of_first_layer(form: StepForm) -> tuple[Load, ...]:
    """What a step finds loaded: the first streamed layer, or as much of it as slots hold."""
    if not form.streamed:
        return ()
    first = form.streamed[0]
    return _common_loads(form, first, form.first_slot) + _ring_loads(form, first)


def loads_of_second_layer(form: StepForm) -> tuple[Load, ...]:
    """What a step loads first, into the slot that is free when it begins."""
    if len(form.streamed) < 2:
        return ()
    return _common_loads(form, form.streamed[1], 1 - form.first_slot)


def plan_loads(form: StepForm, *, interleaves: bool) -> Mapping[Cell, tuple[Load, ...]]:
    """The pages to issue with each micro-batch of each layer.

    While a streamed layer and the resident layers after it run, the other slot receives the next
    streamed layer; after the last comes the first one, for the next step. Pages are spread evenly
    if `interleaves`, and otherwise issued with the first micro-batch.

    A ring of expert groups is filled again while the next layer attends, with the groups that come
    first; `group_loads` of the others follow as groups are computed. What the next step needs of
    the ring is at layer `num_layers` if no layer is left in this one.
    """
    plan: dict[Cell, tuple[Load, ...]] = {}
    streamed = form.streamed
    for place, layer in enumerate(streamed):
        is_last = place + 1 == len(streamed)
        following = streamed[0] if is_last else streamed[place + 1]
        loads = _common_loads(form, following, (form.first_slot + place + 1) % 2)
        end = form.num_layers if is_last else following
        begin = layer if place else 0  # when a step begins, the other slot is free
        if form.ring_slots:
            refilled_since = streamed[place - 1] + 1 if place else 0
            loads = (_ring_loads(form, layer) if place else ()) + loads
            begin, end = refilled_since, layer + 1
        _spread(form, plan, range(begin, end), loads, interleaves=interleaves)
    if form.ring_slots and streamed:
        left = range(streamed[-1] + 1, form.num_layers) or range(
            form.num_layers, form.num_layers + 1
        )
        _spread(form, plan, left, _ring_loads(form, streamed[0]), interleaves=interleaves)
    return plan


def _spread(
    form: StepForm,
    plan: dict[Cell, tuple[Load, ...]],
    layers: range,
    loads: tuple[Load, ...],
    *,
    interleaves: bool,
) -> None:
    steps = [Cell(layer, part) for layer in layers for part in range(form.num_micro_batches)]
    if not interleaves or layers.start == form.num_layers:
        plan[steps[0]] = loads
        return
    for index, step in enumerate(steps):
        first, last = (-(-at * len(loads) // len(steps)) for at in (index, index + 1))
        plan[step] = loads[first:last]


TURN = Buffer("turn")


class Program:
    """Collects tasks in issue order; one method per operation of a step.

    Args:
        ring: Micro-batches that may have buffers in flight at once.
        has_barriers: Every task waits for the last `sync`, and every `sync` for all tasks before.
        cores: Resource of all computation but attention.

    Raises:
        ConfigError: A program with barriers loads whole layers, but the form has groups of experts.
    """

    def __init__(
        self,
        name: str,
        form: StepForm,
        *,
        ring: int = 1,
        has_barriers: bool = False,
        cores: Resource = Resource.GPU,
    ) -> None:
        if has_barriers and form.ring_slots:
            raise ConfigError(
                f"schedule {name!r} loads whole layers; set expert_groups to 1 or choose another"
            )
        if has_barriers and any(pages.host_experts for pages in form.layers):
            raise ConfigError(
                f"schedule {name!r} computes all experts on the device; set cpu_experts_fraction "
                "to 0 or choose another"
            )
        self._name = name
        self._form = form
        self._ring = ring
        self._has_barriers = has_barriers
        self._cores = cores
        self._tasks: list[Task] = []
        self._inputs: set[Buffer] = {TURN} if has_barriers else set()
        self._num_staged = 0
        first = loads_of_first_layer(form)
        # Layer and group whose page a place of a slot holds; a task that reads it must be issued
        # while it is there.
        self._held: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        for load in first:
            self._held[load.slot][load.place] = load.layer, load.group
        self._unwritten = {_slot_page(load.slot, load.place) for load in first}
        self._slot_of = {form.streamed[0]: form.first_slot} if first else {}

    def schedule(self) -> Schedule:
        return Schedule(self._name, tuple(self._tasks), frozenset(self._inputs))

    def embed(self, micro_batch: int) -> None:
        """Embed the tokens of a micro-batch on the CPU and send them to the device."""
        embedded = Buffer("embedded", (micro_batch,))
        tokens = self._input("tokens", micro_batch)
        self._add(Op.EMBED, 0, micro_batch, Resource.CPU, reads=(tokens,), writes=(embedded,))
        self._add(
            Op.UP, 0, micro_batch, Resource.HTOD, reads=(embedded,), writes=(_hidden(micro_batch),)
        )

    def embed_in_place(self, micro_batch: int) -> None:
        """Embed the tokens of a micro-batch where computation runs."""
        tokens = self._input("tokens", micro_batch)
        self._add(
            Op.EMBED, 0, micro_batch, self._cores, reads=(tokens,), writes=(_hidden(micro_batch),)
        )

    def pre(self, layer: int, micro_batch: int) -> None:
        pages = self._form.layers[layer].attention_pages
        reads = (_hidden(micro_batch), *self._weights(layer, pages))
        writes = (self._ringed("qkv", layer, micro_batch),)
        self._add(Op.PRE, layer, micro_batch, self._cores, reads=reads, writes=writes)

    def store_qkv(self, layer: int, micro_batch: int) -> None:
        if self._form.layers[layer].states_on_device:
            return
        reads = (self._ringed("qkv", layer, micro_batch),)
        writes = (self._ringed("host_qkv", layer, micro_batch),)
        self._add(Op.QKV, layer, micro_batch, Resource.DTOH, reads=reads, writes=writes)

    def attend(self, layer: int, micro_batch: int) -> None:
        if self._form.layers[layer].states_on_device:
            return
        cache = self._input("kv", layer, micro_batch)
        reads = (self._ringed("host_qkv", layer, micro_batch), cache)
        writes = (cache, self._ringed("host_attention", layer, micro_batch))
        self._add(Op.ATTN, layer, micro_batch, Resource.CPU, reads=reads, writes=writes)

    def attend_in_place(self, layer: int, micro_batch: int) -> None:
        """Append to the KV cache and attend, without transfers."""
        cache = self._input("kv", layer, micro_batch)
        reads = (self._ringed("qkv", layer, micro_batch), cache)
        writes = (cache, self._ringed("attention", layer, micro_batch))
        self._add(Op.ATTN, layer, micro_batch, self._cores, reads=reads, writes=writes)

    def load_kv(self, layer: int, micro_batch: int) -> None:
        if self._form.layers[layer].states_on_device:
            return
        reads = (self._input("device_kv", layer, micro_batch),)
        writes = (self._staged_kv(layer, micro_batch),)
        self._add(Op.KV, layer, micro_batch, Resource.HTOD, reads=reads, writes=writes)

    def append(self, layer: int, micro_batch: int) -> None:
        if self._form.layers[layer].states_on_device:
            return
        cache = self._input("device_kv", layer, micro_batch)
        reads = (self._ringed("host_qkv", layer, micro_batch), cache)
        self._add(Op.APPEND, layer, micro_batch, Resource.CPU, reads=reads, writes=(cache,))

    def attend_on_device(self, layer: int, micro_batch: int) -> None:
        """Attend to staged KV, or update states; nothing if no row attends on the device."""
        qkv = self._ringed("qkv", layer, micro_batch)
        writes: tuple[Buffer, ...] = (self._ringed("device_attention", layer, micro_batch),)
        if self._form.layers[layer].states_on_device:
            states = self._input("device_states", layer, micro_batch)
            reads, writes = (qkv, states), (states, *writes)
        elif self._form.has_device_attention:
            reads = (qkv, self._staged_kv(layer, micro_batch))
        else:
            return
        self._add(Op.GATTN, layer, micro_batch, Resource.GPU, reads=reads, writes=writes)

    def front(self, layer: int, micro_batch: int) -> None:
        """Attention half of a layer for a micro-batch."""
        self.pre(layer, micro_batch)
        self.store_qkv(layer, micro_batch)
        if self._form.has_cpu_attention:
            self.attend(layer, micro_batch)
        if self._form.has_device_attention:
            self.load_kv(layer, micro_batch)
            self.append(layer, micro_batch)
        self.attend_on_device(layer, micro_batch)

    def load_hidden(self, layer: int, micro_batch: int) -> None:
        if self._form.layers[layer].states_on_device:
            return
        reads = (self._ringed("host_attention", layer, micro_batch),)
        writes = (self._ringed("attention", layer, micro_batch),)
        self._add(Op.HID, layer, micro_batch, Resource.HTOD, reads=reads, writes=writes)

    def post(self, layer: int, micro_batch: int) -> None:
        has_states = self._form.layers[layer].states_on_device
        on_host = self._form.has_cpu_attention and not has_states
        on_device = self._form.has_device_attention or has_states
        attended = [self._ringed("attention", layer, micro_batch)] * on_host
        attended += [self._ringed("device_attention", layer, micro_batch)] * on_device
        weights = self._weights(layer, self._form.layers[layer].attention_pages)
        reads = (_hidden(micro_batch), *attended, *weights)
        writes = (_hidden(micro_batch), _routed(micro_batch))
        self._add(Op.POST, layer, micro_batch, self._cores, reads=reads, writes=writes)

    def experts(
        self, layer: int, launch: int, micro_batches: Sequence[int], group: int = 0
    ) -> None:
        """Compute one group of experts, and after the last the rest of the layer.

        Before the last group, weighted sums of expert outputs are kept for each token. Where cores
        compute experts, the last group is their sums.
        """
        pages = self._form.layers[layer]
        is_last = group + 1 == pages.num_groups
        hidden, sums = tuple(map(_hidden, micro_batches)), tuple(map(_expert_sum, micro_batches))
        reads = (*hidden, *map(_routed, micro_batches), *(sums if group else ()))
        if group == pages.num_device_groups:
            reads = (*reads, _returned_sum(launch))
        self._add(
            Op.EXPERTS,
            layer,
            launch * pages.num_groups + group,
            self._cores,
            reads=(*reads, *self._expert_weights(layer, group)),
            writes=hidden if is_last else sums,
        )

    def host_experts(self, layer: int, launch: int, micro_batches: Sequence[int]) -> None:
        """Compute the experts of the cores for a launch, if the layer has such."""
        if not self._form.layers[layer].host_experts:
            return
        hidden, routed = map(_hidden, micro_batches), map(_routed, micro_batches)
        rows = tuple(Buffer("host_rows", (each,)) for each in micro_batches)
        sums = tuple(Buffer("host_sum", (each,)) for each in micro_batches)
        weights = self._input("host_experts", layer)
        self._add(Op.ROWS, layer, launch, Resource.DTOH, reads=(*hidden, *routed), writes=rows)
        self._add(Op.CEXPERTS, layer, launch, Resource.CPU, reads=(*rows, weights), writes=sums)

    def host_sums(self, layer: int, launch: int, micro_batches: Sequence[int]) -> None:
        """Send what the cores' experts add to the tokens of a launch to the device."""
        sums = tuple(Buffer("host_sum", (each,)) for each in micro_batches)
        writes = (_returned_sum(launch),)
        self._add(Op.SUMS, layer, launch, Resource.HTOD, reads=sums, writes=writes)

    def head(self) -> None:
        reads = tuple(map(_hidden, range(self._form.num_micro_batches)))
        writes = (Buffer("logits"),)
        self._add(Op.HEAD, self._form.num_layers, 0, self._cores, reads=reads, writes=writes)

    def load_page(self, load: Load) -> None:
        """Load a page of weights into its slot, through the staging ring if there is one."""
        source = self._input("host_weights", load.layer, load.page)
        if self._form.staging_slots:
            staged = Buffer("staging", (self._num_staged % self._form.staging_slots,))
            self._num_staged += 1
            where = (load.layer, load.page, Resource.HOST_COPY)
            self._add(Op.STAGE, *where, reads=(source,), writes=(staged,))
            source = staged
        slot_page = _slot_page(load.slot, load.place)
        where = (load.layer, load.page, Resource.HTOD)
        self._add(Op.W, *where, reads=(source,), writes=(slot_page,))
        self._held[load.slot][load.place] = load.layer, load.group
        self._unwritten.discard(slot_page)
        # The next step's copy of the first layer must not hide the one this step reads.
        if load.slot < NUM_LAYER_SLOTS:
            self._slot_of.setdefault(load.layer, load.slot)

    def sync(self, layer: int, part: int) -> None:
        """A device-wide wait, in programs with barriers only."""
        assert self._has_barriers
        task = Task(op=Op.SYNC, layer=layer, part=part, resource=Resource.GPU, writes=(TURN,))
        self._tasks.append(task)

    def holds(self, layer: int, pages: Sequence[int]) -> bool:
        """Whether these common pages of a layer are issued, so that tasks may read them."""
        if layer not in self._slot_of:
            return not pages
        return {(layer, NO_GROUP)}.issuperset(map(self._held[self._slot_of[layer]].get, pages))

    def _weights(self, layer: int, pages: tuple[int, ...]) -> tuple[Buffer, ...]:
        assert self.holds(layer, pages), f"pages {pages} of layer {layer} are not in their slot"
        resident = self._input("resident", layer)
        if not pages:
            return (resident,)
        return (resident, *self._in_slot(self._slot_of[layer], pages))

    def _expert_weights(self, layer: int, group: int) -> tuple[Buffer, ...]:
        pages = self._form.layers[layer]
        common = tuple(page for page in pages.expert_pages if page < pages.num_common_pages)
        if not pages.group_pages or group == pages.num_device_groups:
            return self._weights(layer, common)
        is_last = group + 1 == pages.num_groups
        places = tuple(range(len(pages.group_pages[group])))
        slot = NUM_LAYER_SLOTS + group % self._form.ring_slots
        held = {(layer, group)}.issuperset(map(self._held[slot].get, places))
        assert held, f"group {group} of layer {layer} is not in its slot"
        return (*self._weights(layer, common if is_last else ()), *self._in_slot(slot, places))

    def _in_slot(self, slot: int, places: tuple[int, ...]) -> tuple[Buffer, ...]:
        slot_pages = _slot_pages(slot, places)
        if self._unwritten:
            self._inputs.update(self._unwritten.intersection(slot_pages))
        return slot_pages

    def _add(  # noqa: PLR0917 - private constructor of a task
        self,
        op: Op,
        layer: int,
        part: int,
        resource: Resource,
        reads: tuple[Buffer, ...],
        writes: tuple[Buffer, ...],
    ) -> None:
        if self._has_barriers:
            reads = (*reads, TURN)
        self._tasks.append(
            Task(op=op, layer=layer, part=part, resource=resource, reads=reads, writes=writes)
        )

    def _input(self, name: str, *key: int) -> Buffer:
        buffer = Buffer(name, key)
        self._inputs.add(buffer)
        return buffer

    def _ringed(self, name: str, layer: int, micro_batch: int) -> Buffer:
        return Buffer(name, (self._step(layer, micro_batch) % self._ring,))

    def _staged_kv(self, layer: int, micro_batch: int) -> Buffer:
        return Buffer("staged_kv", (self._step(layer, micro_batch) % 2,))

    def _step(self, layer: int, micro_batch: int) -> int:
        # Counted through the step: by micro-batch alone, the last micro-batches of a layer and the
        # first of the next could share a buffer where num_micro_batches is no multiple of the ring.
        return layer * self._form.num_micro_batches + micro_batch


@lru_cache(maxsize=1024)
def _slot_pages(slot: int, places: tuple[int, ...]) -> tuple[Buffer, ...]:
    return tuple(_slot_page(slot, place) for place in places)


def _slot_page(slot: int, place: int) -> Buffer:
    return Buffer("weights", (slot, place))


def _hidden(micro_batch: int) -> Buffer:
    return Buffer("hidden", (micro_batch,))


def _expert_sum(micro_batch: int) -> Buffer:
    return Buffer("expert_sum", (micro_batch,))


NUM_RETURNED_SUMS = 2  # launches whose sums from the host are on the device at once


def _returned_sum(launch: int) -> Buffer:
    return Buffer("returned_sum", (launch % NUM_RETURNED_SUMS,))


def _routed(micro_batch: int) -> Buffer:
    return Buffer("routed", (micro_batch,))
