"""Steps that cannot be are refused; slots alternate from pass to pass."""

from typing import Any

import pytest

from raymoe.errors import ConfigError
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm, next_first_slot
from tests.unit.schedule.forms import grouped_layer, layer_of, streamed_layer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_pages": 2, "attention_pages": (0,)}, "name 1 pages; together .* each of the 2"),
        ({"num_pages": 1, "expert_pages": (0, 1)}, "name 2 pages; together .* each of the 1"),
        ({"num_pages": 2, "expert_pages": (1, 0)}, r"expert_pages is \(1, 0\); .* ascending"),
        ({"num_pages": 1, "attention_pages": (0, 0)}, "attention_pages is .* listed once"),
        (
            {"num_pages": 2, "expert_pages": (0, 1), "group_pages": ((0,),)},
            r"group_pages is \(\(0,\),\); .* the last of 2 pages",
        ),
        (
            {"num_pages": 1, "expert_pages": (0,), "group_pages": ((0,), ())},
            "each group has a page",
        ),
    ],
)
def test_pages_that_do_not_add_up_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_of(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ()}, "layers is empty"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"has_cpu_attention": False}, "must be true"),
        ({"staging_slots": -1}, "staging_slots is -1"),
        ({"first_slot": 2}, "first_slot is 2; the slots are 0 and 1"),
        ({"layers": (grouped_layer(),)}, "ring_slots is 0; groups of experts need"),
    ],
)
def test_a_pass_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepForm(**{"layers": (streamed_layer(),), "num_micro_batches": 1, **fields})


@pytest.mark.parametrize(("num_streamed", "slot"), [(0, 1), (1, 0), (2, 1), (3, 0)])
def test_streamed_layers_take_the_slots_in_turn_resident_ones_take_none(
    num_streamed: int, slot: int
) -> None:
    layers = (LayerPlacement(), *[streamed_layer()] * num_streamed, LayerPlacement())
    assert next_first_slot(StepForm(layers=layers, num_micro_batches=1, first_slot=1)) == slot
