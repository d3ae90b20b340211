"""All weights where the work is done: no transfers, one wave through all layers in order.

The schedule of the device `cpu`, and of a GPU that holds the whole model (design, section 4.2).
"""

from raymoe.schedule.builders._program import Program
from raymoe.schedule.builders.shape import LayerPages, PassForm
from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Resource


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
