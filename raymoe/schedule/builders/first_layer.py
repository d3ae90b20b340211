"""The loads that come before the first pass: what every pass leaves behind for the next one."""

from raymoe.schedule.builders._pages import loads_of_first_layer
from raymoe.schedule.builders._program import Program
from raymoe.schedule.builders.shape import PassForm
from raymoe.schedule.graph import Schedule


def load_first_layer(form: PassForm) -> Schedule:
    """Load the first streamed layer to where a pass of this form looks for it."""
    program = Program("load_first_layer", form)
    for load in loads_of_first_layer(form):
        program.load_page(load)
    return program.schedule()
