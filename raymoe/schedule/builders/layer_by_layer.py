"""Plain weight streaming: run a layer, load the next one, and wait for both.

What a loop over layers with a blocking copy does; no transfer of weights is hidden.
"""

from raymoe.schedule.builders._pages import plan_loads
from raymoe.schedule.builders._program import Program
from raymoe.schedule.builders.shape import PassForm, Step
from raymoe.schedule.graph import Schedule


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
