"""The text form of a schedule can be read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import ScheduleError
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from tests.unit.schedule.forms import BUILDER_NAMES, step_forms

TEXT = """\
schedule by hand
inputs x y[1,2]
w[0,3] htod: -> weights[1,3]
pre[0,0] gpu: x weights[1,3] -> qkv[0]
head[1,0] gpu: qkv[0] ->
"""
SCHEDULE = Schedule(
    "by hand",
    (
        Task(
            op=Op.W,
            layer=0,
            part=3,
            resource=Resource.HTOD,
            writes=(Buffer("weights", (1, 3)),),
        ),
        Task(
            op=Op.PRE,
            layer=0,
            part=0,
            resource=Resource.GPU,
            reads=(Buffer("x"), Buffer("weights", (1, 3))),
            writes=(Buffer("qkv", (0,)),),
        ),
        Task(op=Op.HEAD, layer=1, part=0, resource=Resource.GPU, reads=(Buffer("qkv", (0,)),)),
    ),
    frozenset({Buffer("x"), Buffer("y", (1, 2))}),
)


def test_the_text_of_a_schedule_by_hand() -> None:
    assert SCHEDULE.to_text() == TEXT
    assert Schedule.from_text(TEXT) == SCHEDULE


def test_blank_lines_and_indentation_are_skipped() -> None:
    assert Schedule.from_text("\n" + TEXT.replace("\n", "\n\n  ")) == SCHEDULE


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_schedule_comes_back(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(BUILDER_NAMES))
    schedule = STREAMING_BUILDERS[name](data.draw(step_forms(name)))
    again = Schedule.from_text(schedule.to_text())
    assert again == schedule
    assert again.dependencies == schedule.dependencies


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pre[0,0] gpu", r"line 3: 'pre\[0,0\] gpu' is not a task; expected 'op\[layer,part\]"),
        ("pro[0,0] gpu: ->", "line 3: .*no operation is called 'pro'; known: embed, up, pre"),
        ("pre[0,0] tpu: ->", "line 3: .*no lane is called 'tpu'; known: gpu, cpu, htod"),
        ("pre[0,0] gpu: x[ ->", r"line 3: 'x\[' is not a buffer"),
        ("pre[0,0] gpu: z ->", "reads z, which no earlier task writes"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(f"schedule s\ninputs x\n{line}\n")


@pytest.mark.parametrize(
    "text", ["", "inputs x\nschedule s\n", "schedule\ninputs\n", "schedule s\n"]
)
def test_a_missing_header_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="begins with a line 'schedule NAME'"):
        Schedule.from_text(text)
