"""Drawings show what the timeline says."""

import functools
import itertools
import json
import math
import operator
import re
import xml.etree.ElementTree as ET

import pytest

from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.draw import LEFT, LOOKS, RIGHT, WIDTH, draw_chrome_trace, draw_svg, draw_text
from raymoe.schedule.graph import RESOURCES_OF, Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline, simulate
from tests.unit.schedule.costs import T4_LIKE
from tests.unit.schedule.forms import form_for

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
COLOUR_BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
SVG = "{http://www.w3.org/2000/svg}"


def span(op: Op, part: int, resource: Resource, *, start_s: float, end_s: float) -> Span:
    return Span(Task(op=op, layer=0, part=part, resource=resource), start_s, end_s)


BY_HAND = Timeline(
    "by <hand>",
    (
        span(Op.W, 0, Resource.HTOD, start_s=0.0, end_s=4.0),
        span(Op.W, 1, Resource.HTOD, start_s=4.0, end_s=10.0),
        span(Op.PRE, 0, Resource.GPU, start_s=4.0, end_s=6.0),
        span(Op.EXPERTS, 0, Resource.GPU, start_s=6.0, end_s=6.2),
    ),
)
SHORTER = Timeline("shorter", (span(Op.HEAD, 0, Resource.GPU, start_s=0.0, end_s=5.0),))


@functools.cache
def real_timelines() -> list[Timeline]:
    return [
        simulate(STREAMING_BUILDERS[name](form_for(name, 32, 14, 32)), T4_LIKE)
        for name in STREAMING_BUILDERS
    ]


def test_text_has_a_line_a_lane_on_one_axis() -> None:
    assert draw_text([BY_HAND, SHORTER], columns=10) == (
        "by <hand>  gpu  |    AA.   |  22%\n"
        "           htod |wwwwwwwwww| 100%\n"
        "shorter    gpu  |HHHHH     | 100%\n"
        "10 s wide: A norm, QKV  X FFN  w weight page  H logits"
    )


def test_text_of_nothing() -> None:
    assert draw_text([]) == "0 s wide: "
    assert draw_text([Timeline("empty", ())]) == "0 s wide: "


def test_every_operation_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == set(Op)
    assert len({look.letter for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.colour for look in LOOKS.values()}) == len(LOOKS)


def test_colours_of_a_lane_differ_for_every_kind_of_eye() -> None:
    for resource in Resource:
        ops = [op for op in Op if resource in RESOURCES_OF[op]]
        if resource is Resource.GPU:  # where these two run in place, nothing is split or streamed
            ops = [op for op in ops if op not in (Op.EMBED, Op.ATTN)]
        for kind, matrix in COLOUR_BLINDNESS.items():
            for one, other in itertools.combinations(ops, 2):
                distance = math.dist(seen(one, matrix), seen(other, matrix))
                assert distance > 15, f"{kind}: {one} and {other} on {resource}"


def seen(op: Op, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """The colour of an operation in CIELAB, as an eye with this matrix sees it."""
    channels = [int(LOOKS[op].colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(1.0, max(0.0, sum(map(operator.mul, row, linear)))) for row in matrix)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_svg_bars_lie_where_their_spans_do() -> None:
    root = ET.fromstring(draw_svg([BY_HAND, SHORTER], title="A & B"))
    bars = {
        (path.get("fill"), float(x), float(width))
        for path in root.iter(f"{SVG}path")
        for x, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path.get("d", ""))
    }
    scale = (WIDTH - LEFT - RIGHT) / 10.0
    hair = 0.6
    expected = {
        (LOOKS[op].colour, LEFT + start_s * scale, length_s * scale - hair)
        for op, start_s, length_s in (
            (Op.W, 0, 4),
            (Op.W, 4, 6),
            (Op.PRE, 4, 2),
            (Op.EXPERTS, 6, 0.2),
            (Op.HEAD, 0, 5),
        )
    }
    assert {(c, round(x, 1), round(w, 1)) for c, x, w in bars} == {
        (c, round(x, 1), round(w, 1)) for c, x, w in expected
    }


def test_svg_names_title_lanes_shares_and_operations() -> None:
    root = ET.fromstring(draw_svg([BY_HAND, SHORTER], title="A & B"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "A & B"
    for wanted in ("by <hand>: 10 s", "shorter: 5 s", "gpu", "htod", "22 %", "100 %", "w 1"):
        assert wanted in texts
    assert "experts: FFN" in texts
    assert "experts 0" not in texts  # no room in its bar, but for the number
    assert texts.count("0") == 1
    assert [text for text in texts if text and re.fullmatch(r"\d+ s", text)] == [
        f"{seconds} s" for seconds in range(11)
    ]


@pytest.mark.parametrize(
    ("end_s", "last_tick"), [(0.0123, "12 ms"), (4.5e-5, "45 µs"), (0.0, "0 µs"), (730.0, "700 s")]
)
def test_svg_chooses_the_unit_of_its_axis(end_s: float, last_tick: str) -> None:
    timeline = Timeline("t", (span(Op.PRE, 0, Resource.GPU, start_s=0.0, end_s=end_s),))
    assert f">{last_tick}</text>" in draw_svg([timeline], title="t")


def test_svg_of_many_tasks_stays_small_and_inside_its_page() -> None:
    picture = draw_svg(real_timelines(), title="All schedules")
    assert len(picture) < 2_000_000
    for path in ET.fromstring(picture).iter(f"{SVG}path"):
        for x, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path.get("d", "")):
            assert float(x) >= LEFT
            assert float(x) + float(width) <= WIDTH - RIGHT + 0.5


def test_svg_joins_short_tasks_without_losing_busy_time() -> None:
    for timeline in real_timelines():
        picture = ET.fromstring(draw_svg([timeline], title="t"))
        drawn = sum(
            float(width)
            for path in picture.iter(f"{SVG}path")
            for _, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path.get("d", ""))
            if path.get("fill") == LOOKS[Op.W].colour
        )
        share = timeline.seconds_by_op()["w"] / timeline.makespan_s
        assert drawn / (WIDTH - LEFT - RIGHT) == pytest.approx(share, abs=0.06)


def test_chrome_trace_has_a_process_a_timeline_and_a_thread_a_lane() -> None:
    events = json.loads(draw_chrome_trace([BY_HAND, SHORTER]))["traceEvents"]
    names = [
        (event["pid"], event["tid"], event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"].endswith("_name")
    ]
    assert names == [
        (0, 0, "by <hand>"),
        (0, 0, "gpu"),
        (0, 2, "htod"),
        (1, 0, "shorter"),
        (1, 0, "gpu"),
    ]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans][2:4] == [
        ("w[0,0]", 2, 0.0, 4e6),
        ("w[0,1]", 2, 4e6, 6e6),
    ]
    assert spans[0]["cat"] == "pre"


def test_chrome_trace_holds_every_task_with_its_buffers() -> None:
    timeline = real_timelines()[0]
    spans = [e for e in json.loads(draw_chrome_trace([timeline]))["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(timeline.spans)
    page = next(event for event in spans if event["name"] == "w[1,0]")
    assert page["args"]["reads"] == ["host_weights[1,0]"]
    assert page["args"]["writes"] == ["weights[1,0]"]
