"""All weights where the work is done: no transfers, one wave through all layers in order.

The schedule of the device `cpu`, and of a GPU that holds the whole model (design, section 4.2).
"""

from raymoe.schedule.builders._program import Program
from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Resource


def build_in_place(num_layers: int, *, resource: Resource = Resource.CPU) -> Schedule:
    """Build the pass of `num_layers` layers on one resource."""
    program = Program("in_place")
    program.embed(0, resource)
    for layer in range(num_layers):
        program.pre(layer, 0, resource)
        program.attend(layer, 0, resource)
        program.post(layer, 0, resource)
        program.experts(layer, 0, resource)
    program.head(num_layers, 0, resource)
    return program.schedule()
