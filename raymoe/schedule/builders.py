"""Builders of schedules, by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from raymoe.errors import ConfigError
from raymoe.schedule.graph import Resource, Schedule
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import (
    Cell,
    Load,
    Program,
    StepForm,
    group_loads,
    loads_of_first_layer,
    loads_of_second_layer,
    plan_loads,
)


def load_first_layer(form: StepForm) -> Schedule:
    """Load the first streamed layer into the slot where a step of this form reads it."""
    return _load("load_first_layer", form, loads_of_first_layer(form))


def load_second_layer(form: StepForm) -> Schedule:
    """Load what a step of this form loads first, before the step begins."""
    return _load("load_second_layer", form, loads_of_second_layer(form))


def _load(name: str, form: StepForm, loads: Iterable[Load]) -> Schedule:
    program = Program(name, form)
    for load in loads:
        program.load_page(load)
    return program.schedule()


def build_in_place(num_layers: int) -> Schedule:
    """A step on the CPU, with all weights and KV in host memory."""
    return _build("in_place", num_layers, Resource.CPU)


def build_resident(num_layers: int) -> Schedule:
    """A step on a GPU that holds the model and the KV cache."""
    return _build("resident", num_layers, Resource.GPU)


def _build(name: str, num_layers: int, cores: Resource) -> Schedule:
    form = StepForm(layers=(LayerPlacement(),) * num_layers, num_micro_batches=1)
    program = Program(name, form, cores=cores)
    program.embed_in_place(0)
    for layer in range(num_layers):
        program.pre(layer, 0)
        program.attend_in_place(layer, 0)
        program.post(layer, 0)
        program.experts(layer, 0, (0,))
    program.head()
    return program.schedule()


def build_layer_by_layer(form: StepForm) -> Schedule:
    """Each layer over all micro-batches in turn, with device-wide waits between layers."""
    program = Program("layer_by_layer", form, has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for micro_batch in range(form.num_micro_batches):
        program.embed(micro_batch)
    for layer in range(form.num_layers):
        for micro_batch in range(form.num_micro_batches):
            step = Cell(layer, micro_batch)
            program.front(*step)
            if form.has_cpu_attention:
                program.load_hidden(*step)
            program.post(*step)
            program.experts(layer, micro_batch, (micro_batch,))
        program.sync(layer, 0)
        for load in loads.get(Cell(layer, 0), ()):
            program.load_page(load)
        program.sync(layer, 1)
    program.head()
    return program.schedule()


def build_flexgen_s3(form: StepForm) -> Schedule:
    """CPU attention without overlap: pre, to the CPU, back, post, experts."""
    program = Program("flexgen_s3", form, has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for micro_batch in range(form.num_micro_batches):
        program.embed(micro_batch)
    for step in form.steps:
        for load in loads.get(step, ()):
            program.load_page(load)
        program.front(*step)
        if form.has_cpu_attention:
            program.load_hidden(*step)
        _finish(program, step)
    program.head()
    return program.schedule()


def build_flexgen_s4(form: StepForm) -> Schedule:
    """Attention on the GPU; KV blocks of the next micro-batch load while one is computed.

    New keys and values go to the host while the next micro-batch is computed. Rows whose KV blocks
    do not fit on the device attend on the CPU, without overlap as in S3.
    """
    steps = form.steps
    program = Program("flexgen_s4", form, ring=min(2, len(steps)), has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for micro_batch in range(form.num_micro_batches):
        program.embed(micro_batch)
    if form.has_device_attention:
        program.load_kv(*steps[0])
    for index, step in enumerate(steps):
        for load in loads.get(step, ()):
            program.load_page(load)
        if form.has_device_attention and index + 1 < len(steps):
            program.load_kv(*steps[index + 1])
        if index:
            _store_new_kv(program, form, steps[index - 1])
        _attend_s4(program, form, step)
        _finish(program, step)
    _store_new_kv(program, form, steps[-1])
    program.head()
    return program.schedule()


def _attend_s4(program: Program, form: StepForm, step: Cell) -> None:
    program.pre(*step)
    if form.has_cpu_attention:
        program.store_qkv(*step)
        program.attend(*step)
        program.load_hidden(*step)
    program.attend_on_device(*step)


def _store_new_kv(program: Program, form: StepForm, step: Cell) -> None:
    if not form.has_cpu_attention:
        program.store_qkv(*step)
    if form.has_device_attention:
        program.append(*step)


def _finish(program: Program, step: Cell) -> None:
    program.post(*step)
    program.experts(step.layer, step.micro_batch, (step.micro_batch,))
    program.sync(*step)


def build_fastdecode(form: StepForm) -> Schedule:
    """Attention one micro-batch ahead; weights follow the first hidden states as one block."""
    apart = replace(form, micro_batches_per_group=1, look_ahead=1)
    return build_micro_batches(apart, interleaves_pages=False, name="fastdecode")


def build_micro_batches(
    form: StepForm, *, interleaves_pages: bool = True, name: str = "micro_batches"
) -> Schedule:
    """Build a step with the form's own `micro_batches_per_group` and `look_ahead`.

    Attention is issued `look_ahead` micro-batches ahead of the experts, as far as its inputs are.
    Pages of a layer are spread evenly over the preceding micro-batches if `interleaves_pages`, and
    otherwise follow the first one's hidden states as one block.

    In a layer whose experts are in groups, all micro-batches attend, and then each group of experts
    in turn is computed for all of them. Experts of the cores are computed meanwhile.
    """
    program = Program(name, form, ring=min(form.look_ahead + 1, form.num_micro_batches))
    return _MicroBatches(program, form).build(interleaves_pages)


def build_cgopipe(form: StepForm) -> Schedule:
    """CGOPipe: one expert group per micro-batch, attention two ahead, pages in between.

    Algorithm 1 issues attention of micro-batch j+2 right after the experts of j. Here it comes
    right before them, so the CPU has work while the GPU waits for the hidden states of j. Pages are
    cut by bytes, not by the number of micro-batches.

    Source: MoE-Lightning (ASPLOS 2025), section 4.1, figure 6 (S1) and algorithm 1.
    """
    return build_micro_batches(
        replace(form, micro_batches_per_group=1, look_ahead=2), name="cgopipe"
    )


def build_vslpipe(form: StepForm) -> Schedule:
    """VSLPipe: at most two micro-batches alternate between CPU and GPU, with prefill mixed in.

    The paper ends each phase with a barrier of CPU and GPU; here each task waits only for its
    inputs, which is never later. Source: MoE-Lens, section 6.4, figures 8 and 9.
    """
    if form.num_micro_batches > 2:
        raise ConfigError(
            f"num_micro_batches is {form.num_micro_batches}; vslpipe cuts a step in at most 2 "
            "micro-batches"
        )
    return build_micro_batches(
        replace(form, micro_batches_per_group=1, look_ahead=1), name="vslpipe"
    )


def build_module_batching(form: StepForm) -> Schedule:
    """Module-based batching (MoE-Gen, section 4): experts run once after all attention."""
    whole = replace(
        form, micro_batches_per_group=form.num_micro_batches, look_ahead=form.num_micro_batches - 1
    )
    return build_micro_batches(whole, name="module_batching")


class _MicroBatches:
    def __init__(self, program: Program, form: StepForm) -> None:
        self._program = program
        self._form, self._steps = form, form.steps
        self._num_fronts = 0
        self._num_launches = [0] * form.num_layers  # of the last experts of each layer

    def build(self, interleaves_pages: bool) -> Schedule:
        program, form = self._program, self._form
        loads = plan_loads(form, interleaves=interleaves_pages)
        for micro_batch in range(form.num_micro_batches):
            program.embed(micro_batch)
        for index, step in enumerate(self._steps):
            ahead = index + self._form.look_ahead + 1
            self._issue_fronts(ahead)
            if form.has_cpu_attention and not form.ring_slots:
                program.load_hidden(*step)
            for load in loads.get(step, ()):
                program.load_page(load)
            if form.has_cpu_attention and form.ring_slots:
                program.load_hidden(*step)
            program.post(*step)
            if form.layers[step.layer].group_pages:
                if step.micro_batch + 1 == form.num_micro_batches:
                    self._compute_groups(step.layer, ahead)
            else:
                self._end_launch(step)
        for load in loads.get(Cell(form.num_layers, 0), ()):
            program.load_page(load)
        program.head()
        return program.schedule()

    def _issue_fronts(self, ahead: int) -> None:
        for step in self._steps[self._num_fronts : ahead]:
            if not self._front_has_inputs(step):
                return
            self._program.front(*step)
            self._num_fronts += 1

    def _front_has_inputs(self, step: Cell) -> bool:
        layer, micro_batch = step
        pages = self._form.layers[layer].attention_pages
        entered = (
            not layer
            or self._num_launches[layer - 1] > micro_batch // self._form.micro_batches_per_group
        )
        return entered and self._program.holds(layer, pages)

    def _end_launch(self, step: Cell) -> None:
        layer, micro_batch = step
        launch, place = divmod(micro_batch, self._form.micro_batches_per_group)
        if (
            place + 1 == self._form.micro_batches_per_group
            or micro_batch + 1 == self._form.num_micro_batches
        ):
            micro_batches = range(micro_batch - place, micro_batch + 1)
            self._program.host_experts(layer, launch, micro_batches)
            for group in range(self._form.layers[layer].num_groups):
                self._compute_group(layer, launch, micro_batches, group)
            self._num_launches[layer] += 1

    def _compute_groups(self, layer: int, ahead: int) -> None:
        """Compute the groups of a layer; what fits into a slot that becomes free is loaded."""
        form, count = self._form, self._form.num_micro_batches
        num_groups = form.layers[layer].num_groups
        launches = [
            range(begin, min(begin + form.micro_batches_per_group, count))
            for begin in range(0, count, form.micro_batches_per_group)
        ]
        for launch, micro_batches in enumerate(launches):
            self._program.host_experts(layer, launch, micro_batches)
        for group in range(num_groups):
            for launch, micro_batches in enumerate(launches):
                self._compute_group(layer, launch, micro_batches, group)
                if group + 1 == num_groups:
                    self._num_launches[layer] += 1
                    self._issue_fronts(ahead)
            for load in group_loads(form, layer, group + form.ring_slots):
                self._program.load_page(load)

    def _compute_group(
        self, layer: int, launch: int, micro_batches: Sequence[int], group: int
    ) -> None:
        if group == self._form.layers[layer].num_device_groups:
            self._program.host_sums(layer, launch, micro_batches)
        self._program.experts(layer, launch, micro_batches, group)


STREAMING_BUILDERS: Mapping[str, Callable[[StepForm], Schedule]] = MappingProxyType(
    {
        "micro_batches": build_micro_batches,
        "cgopipe": build_cgopipe,
        "vslpipe": build_vslpipe,
        "module_batching": build_module_batching,
        "flexgen_s3": build_flexgen_s3,
        "flexgen_s4": build_flexgen_s4,
        "fastdecode": build_fastdecode,
        "layer_by_layer": build_layer_by_layer,
    }
)
"""Builders that take a `StepForm`: weights, KV or hidden states move between host and device."""

BUILDERS: Mapping[str, Callable[[StepForm], Schedule]] = MappingProxyType(
    {
        "in_place": lambda form: build_in_place(form.num_layers),
        "resident": lambda form: build_resident(form.num_layers),
        **STREAMING_BUILDERS,
    }
)
"""All builders; "in_place" and "resident" read nothing but the number of layers."""

RING_SCHEDULES = frozenset(("micro_batches", "cgopipe", "vslpipe", "module_batching", "fastdecode"))
"""Schedules that can load experts group by group, and leave some to the cores."""

MAX_MICRO_BATCHES: Mapping[str, int] = MappingProxyType(
    {"in_place": 1, "resident": 1, "vslpipe": 2, "layer_by_layer": 1}
)
"""Maximum number of micro-batches in schedules that fix it, as their papers do."""

CPU_ATTENTION_FRACTIONS: Mapping[str, float] = MappingProxyType(
    {
        "cgopipe": 1.0,
        "vslpipe": 1.0,
        "flexgen_s3": 1.0,
        "fastdecode": 1.0,
        "flexgen_s4": 0.0,
        "layer_by_layer": 0.0,
        "in_place": 1.0,
        "resident": 0.0,
    }
)
"""CPU share of decode attention in schedules that fix it, as their papers do."""
