"""The builders of schedules, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from raymoe.errors import ConfigError
from raymoe.schedule.graph import Resource, Schedule
from raymoe.schedule.program import (
    LayerPages,
    PassForm,
    Program,
    Step,
    loads_of_first_layer,
    plan_loads,
)


def load_first_layer(form: PassForm) -> Schedule:
    """Load the first streamed layer to where a pass of this form looks for it."""
    program = Program("load_first_layer", form)
    for load in loads_of_first_layer(form):
        program.load_page(load)
    return program.schedule()


def build_in_place(num_layers: int) -> Schedule:
    """The pass of `num_layers` layers on the CPU."""
    return _build("in_place", num_layers, Resource.CPU)


def build_resident(num_layers: int) -> Schedule:
    """The pass of `num_layers` layers on a GPU that holds the model and the KV cache."""
    return _build("resident", num_layers, Resource.GPU)


def _build(name: str, num_layers: int, cores: Resource) -> Schedule:
    form = PassForm(layers=(LayerPages(num_pages=0),) * num_layers, num_waves=1)
    program = Program(name, form, cores=cores)
    program.embed_in_place(0)
    for layer in range(num_layers):
        program.pre(layer, 0)
        program.attend_in_place(layer, 0)
        program.post(layer, 0)
        program.experts(layer, 0, (0,))
    program.head()
    return program.schedule()


def build_layer_by_layer(form: PassForm) -> Schedule:
    """Each layer over all waves in turn, then the whole next layer, with device-wide waits."""
    program = Program("layer_by_layer", form, has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for wave in range(form.num_waves):
        program.embed(wave)
    for layer in range(form.num_layers):
        for wave in range(form.num_waves):
            step = Step(layer, wave)
            program.front(*step)
            if form.has_cpu_attention:
                program.load_hidden(*step)
            program.post(*step)
            program.experts(layer, wave, (wave,))
        program.sync(layer, 0)
        for load in loads.get(Step(layer, 0), ()):
            program.load_page(load)
        program.sync(layer, 1)
    program.head()
    return program.schedule()


def build_flexgen_s3(form: PassForm) -> Schedule:
    """Attention in line: pre, down to the CPU, up again, post, experts; nothing overlaps it."""
    program = Program("flexgen_s3", form, has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for wave in range(form.num_waves):
        program.embed(wave)
    for step in form.steps:
        for load in loads.get(step, ()):
            program.load_page(load)
        program.front(*step)
        if form.has_cpu_attention:
            program.load_hidden(*step)
        _finish(program, step)
    program.head()
    return program.schedule()


def build_flexgen_s4(form: PassForm) -> Schedule:
    """Attention on the GPU: the KV blocks of the next wave come while a wave is computed.

    New keys and values of a wave go to the host while the next wave is computed. Rows whose KV
    blocks the device has no room for attend on the CPU, in line as in S3.
    """
    steps = form.steps
    program = Program("flexgen_s4", form, ring=min(2, len(steps)), has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for wave in range(form.num_waves):
        program.embed(wave)
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


def _attend_s4(program: Program, form: PassForm, step: Step) -> None:
    program.pre(*step)
    if form.has_cpu_attention:
        program.store_qkv(*step)
        program.attend(*step)
        program.load_hidden(*step)
    if form.has_device_attention:
        program.attend_on_device(*step)


def _store_new_kv(program: Program, form: PassForm, step: Step) -> None:
    if not form.has_cpu_attention:
        program.store_qkv(*step)
    if form.has_device_attention:
        program.append(*step)


def _finish(program: Program, step: Step) -> None:
    program.post(*step)
    program.experts(step.layer, step.wave, (step.wave,))
    program.sync(*step)


def build_fastdecode(form: PassForm) -> Schedule:
    """Attention one wave ahead, weights as one block behind the first wave's hidden states."""
    apart = replace(form, waves_per_group=1, look_ahead=1)
    return build_waves(apart, interleaves_pages=False, name="fastdecode")


def build_waves(form: PassForm, *, interleaves_pages: bool = True, name: str = "waves") -> Schedule:
    """Build one pass with the form's own `waves_per_group` and `look_ahead`.

    Fronts are issued `look_ahead` waves beyond the wave whose back is next, as far as their own
    inputs have been issued.

    Args:
        interleaves_pages: Spread the pages of a layer evenly over the waves before it; otherwise
            all of them follow the first one's hidden states as one block.
    """
    program = Program(name, form, ring=min(form.look_ahead + 1, form.num_waves))
    return _Waves(program, form).build(interleaves_pages)


def build_cgopipe(form: PassForm) -> Schedule:
    """CGOPipe: an expert group for each wave, attention two waves ahead, pages in between.

    Algorithm 1 issues the front of wave j+2 right behind the back of wave j. Here it comes right
    before it, so that the CPU has its next wave at hand while the GPU waits for wave j's hidden
    states. Pages are cut by bytes, not by the number of waves.

    Source: MoE-Lightning (ASPLOS 2025), section 4.1, figure 6 (S1) and algorithm 1.
    """
    return build_waves(replace(form, waves_per_group=1, look_ahead=2), name="cgopipe")


def build_vslpipe(form: PassForm) -> Schedule:
    """VSLPipe: two waves, alpha and beta, take turns on CPU and GPU; prefill rides along.

    The paper ends each phase with a barrier of CPU and GPU; here each task waits for its inputs
    only, which is never later.

    Source: MoE-Lens, section 6.4, figures 8 and 9.

    Raises:
        ConfigError: The pass has more than two waves.
    """
    if form.num_waves > 2:
        raise ConfigError(f"num_waves is {form.num_waves}; vslpipe cuts a pass in at most 2 waves")
    return build_waves(replace(form, waves_per_group=1, look_ahead=1), name="vslpipe")


def build_module_batching(form: PassForm) -> Schedule:
    """Module-based batching: all waves attend, then the experts run once over all of their tokens.

    Source: MoE-Gen, section 4.
    """
    whole = replace(form, waves_per_group=form.num_waves, look_ahead=form.num_waves - 1)
    return build_waves(whole, name="module_batching")


class _Waves:
    def __init__(self, program: Program, form: PassForm) -> None:
        self._program = program
        self._form = form
        self._num_fronts = 0
        self._num_groups = [0] * form.num_layers  # expert groups issued, by layer

    def build(self, interleaves_pages: bool) -> Schedule:
        program, form = self._program, self._form
        steps, loads = form.steps, plan_loads(form, interleaves=interleaves_pages)
        for wave in range(form.num_waves):
            program.embed(wave)
        for index, step in enumerate(steps):
            self._issue_fronts(steps[self._num_fronts : index + self._form.look_ahead + 1])
            if form.has_cpu_attention:
                program.load_hidden(*step)
            for load in loads.get(step, ()):
                program.load_page(load)
            program.post(*step)
            self._end_group(step)
        program.head()
        return program.schedule()

    def _issue_fronts(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if not self._front_has_inputs(step):
                return
            self._program.front(*step)
            self._num_fronts += 1

    def _front_has_inputs(self, step: Step) -> bool:
        layer, wave = step
        pages = self._form.layers[layer].attention_pages
        entered = not layer or self._num_groups[layer - 1] > wave // self._form.waves_per_group
        return entered and self._program.holds(layer, pages)

    def _end_group(self, step: Step) -> None:
        layer, wave = step
        group, place = divmod(wave, self._form.waves_per_group)
        if place + 1 == self._form.waves_per_group or wave + 1 == self._form.num_waves:
            self._program.experts(layer, group, range(wave - place, wave + 1))
            self._num_groups[layer] += 1


STREAMING_BUILDERS: Mapping[str, Callable[[PassForm], Schedule]] = MappingProxyType(
    {
        "waves": build_waves,
        "cgopipe": build_cgopipe,
        "vslpipe": build_vslpipe,
        "module_batching": build_module_batching,
        "flexgen_s3": build_flexgen_s3,
        "flexgen_s4": build_flexgen_s4,
        "fastdecode": build_fastdecode,
        "layer_by_layer": build_layer_by_layer,
    }
)
"""Those that take a `PassForm`: weights, KV or hidden states move between host and device."""

BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"in_place": build_in_place, "resident": build_resident, **STREAMING_BUILDERS}
)
"""All of them; "in_place" and "resident" take a number of layers."""

MOST_WAVES: Mapping[str, int] = MappingProxyType({"vslpipe": 2, "layer_by_layer": 1})
"""Schedules whose papers say into how many waves a pass is cut, at most."""

CPU_ATTENTION_FRACTIONS: Mapping[str, float] = MappingProxyType(
    {
        "cgopipe": 1.0,
        "vslpipe": 1.0,
        "flexgen_s3": 1.0,
        "fastdecode": 1.0,
        "flexgen_s4": 0.0,
        "layer_by_layer": 0.0,
    }
)
"""Schedules whose papers say who attends for decoding sequences: the share of the CPU."""
