"""The family of schedules that cut a pass in waves, and the papers' own points in it.

Design, section 4.1. A wave goes through a layer in two halves. Its *front* ends in attention:
pre, qkv, attn, and for the device's share kv, append, gattn. Its *back* takes the result: hid,
post, and experts where the wave ends its expert group. Fronts run ahead of backs, so that the CPU
attends while the GPU computes, and pages of the next layer ride between the hidden states.
"""

from collections.abc import Sequence
from dataclasses import replace

from raymoe.errors import ConfigError
from raymoe.schedule.builders._pages import plan_loads
from raymoe.schedule.builders._program import Program
from raymoe.schedule.builders.shape import PassForm, Step
from raymoe.schedule.graph import Schedule


def build_waves(form: PassForm, *, interleaves_pages: bool = True, name: str = "waves") -> Schedule:
    """Build one pass with the form's own `waves_per_group` and `look_ahead`.

    Fronts are issued `look_ahead` waves beyond the wave whose back is next, as far as their own
    inputs have been issued.

    Args:
        form: The pass.
        interleaves_pages: Spread the pages of a layer evenly over the waves before it; otherwise
            all of them follow the first one's hidden states as one block.
        name: Name of the schedule.
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
    """Issues fronts and backs; knows how far both are."""

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
