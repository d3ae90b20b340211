"""When pages are issued: while which wave of which layer, and into which slot."""

from collections.abc import Mapping
from typing import NamedTuple

from raymoe.schedule.builders.shape import PassForm, Step


class Load(NamedTuple):
    """One page to load: page `page` of layer `layer`, to slot `slot`."""

    layer: int
    page: int
    slot: int


def loads_of(form: PassForm, layer: int, slot: int) -> tuple[Load, ...]:
    """All pages of a layer, to one slot."""
    return tuple(Load(layer, page, slot) for page in range(form.layers[layer].num_pages))


def loads_of_first_layer(form: PassForm) -> tuple[Load, ...]:
    """The pages of the first streamed layer, to where a pass of this form looks for them."""
    return loads_of(form, form.streamed[0], form.first_slot) if form.streamed else ()


def plan_loads(form: PassForm, *, interleaves: bool) -> Mapping[Step, tuple[Load, ...]]:
    """The pages to issue in each step of a pass.

    While one streamed layer runs, and the resident layers behind it, the other slot takes the
    next streamed layer; the last one gives way to the first one, for the next pass.

    Args:
        form: The pass.
        interleaves: Spread the pages evenly over the steps from one streamed layer to the next;
            otherwise all of them go to the first of these steps.
    """
    plan: dict[Step, tuple[Load, ...]] = {}
    streamed = form.streamed
    for place, layer in enumerate(streamed):
        is_last = place + 1 == len(streamed)
        following = streamed[0] if is_last else streamed[place + 1]
        loads = loads_of(form, following, (form.first_slot + place + 1) % 2)
        begin = layer if place else 0  # at the start of a pass, the other slot is free already
        end = form.num_layers if is_last else following
        steps = form.steps[begin * form.num_waves : end * form.num_waves]
        if not interleaves:
            plan[steps[0]] = loads
            continue
        for index, step in enumerate(steps):
            first, last = (-(-at * len(loads) // len(steps)) for at in (index, index + 1))
            plan[step] = loads[first:last]
    return plan
