"""Pictures show what the numbers say, and nothing outside of the page."""

import doctest
import random
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from raymoe.errors import ConfigError
from raymoe.plan import draw
from raymoe.plan.draw import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Curve,
    CurvePoint,
    draw_roofline,
    draw_throughput,
)
from raymoe.plan.papers.hrm import Hierarchy, Level, PaperModel, decode_attention, expert_ffn, place
from raymoe.specs.hardware import HARDWARE_PRESETS
from raymoe.specs.presets_models import model_preset
from raymoe.units import GIB

SVG = "{http://www.w3.org/2000/svg}"
MIXTRAL = PaperModel.of(model_preset("mixtral-8x7b"))
L4_HOST = Hierarchy(Level(242e12, 300e9), Level(1.3e12, 100e9), 16e9)
X_LENGTH, Y_LENGTH = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP


def figure_5(batch: float = 1024, micro_batch: float = 128) -> ET.Element:
    chosen = place(L4_HOST, expert_ffn(MIXTRAL, batch, micro_batch))
    attention = place(L4_HOST, decode_attention(MIXTRAL, 512))
    return ET.fromstring(draw_roofline(L4_HOST, chosen, [attention], title="A & B"))


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def diamonds(root: ET.Element) -> list[tuple[float, float]]:
    """Centres of the turning points."""
    outlines = [
        path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "mark"
    ]
    found = [re.match(r"M([\d.]+) ([\d.]+)l8 8", outline) for outline in outlines]
    return [(float(match[1]), float(match[2]) + 8) for match in found if match]


def coordinates(root: ET.Element) -> list[tuple[float, float]]:
    """All absolute points of lines and dots."""
    points = [
        (float(x), float(y))
        for path in root.iter(f"{SVG}path")
        for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path.get("d", ""))
    ]
    return points + [
        (float(dot.get("cx", "nan")), float(dot.get("cy", "nan")))
        for dot in root.iter(f"{SVG}circle")
    ]


def test_turning_points_lie_where_they_are() -> None:
    """Five decades of intensity from 0.1, six of speed from 1 GFLOP/s."""
    assert diamonds(figure_5()) == [
        (
            pytest.approx(LEFT + X_LENGTH * decades_x / 5, abs=0.1),
            pytest.approx(TOP + Y_LENGTH * (1 - decades_y / 6), abs=0.1),
        )
        for decades_x, decades_y in ((2.9098, 3.1139), (3.7774, 3.9815))
    ]


def test_roofs_points_and_regions_are_named() -> None:
    found = texts(figure_5())
    assert found[0] == "A & B"
    for wanted in (
        "GPU 242 TFLOP/s",
        "CPU 1.3 TFLOP/s",
        "GPU memory 300 GB/s",
        "host memory 100 GB/s",
        "link 16 GB/s",
        "P1 at 81.2",
        "P2 at 599",
        "kernel 9.58 TFLOP/s",
        "experts, 1024 tokens",
        "4.1 TFLOP/s, link",
        "attention at 512 tokens",
        "398 GFLOP/s, CPU",
        "better on the CPU",
        "link limits",
        "GPU memory limits",
    ):
        assert wanted in found


def test_a_micro_batch_beyond_the_peak_of_the_gpu_shows_no_kernel() -> None:
    found = texts(figure_5(batch=65536, micro_batch=8192))
    assert "GPU limits" in found
    assert not [text for text in found if text.startswith("kernel")]


def test_where_the_cpu_is_faster_than_p2_it_is_better_everywhere() -> None:
    """A micro-batch of one row: 0.25 operations a byte of device memory, 75 GFLOP/s."""
    found = texts(figure_5(batch=1024, micro_batch=1))
    assert "better on the CPU" in found
    assert "link limits" not in found
    assert "GPU memory limits" not in found


@pytest.mark.parametrize("name", HARDWARE_PRESETS)
def test_every_node_and_policy_fits_its_page(name: str) -> None:
    rng = random.Random()
    node = Hierarchy.of(HARDWARE_PRESETS[name])
    for resident in (0.0, rng.random(), 1.0):
        batch, micro_batch = 2 ** rng.uniform(0, 18), 2 ** rng.uniform(0, 14)
        chosen = place(node, expert_ffn(MIXTRAL, batch, micro_batch, resident_fraction=resident))
        attention = place(node, decode_attention(MIXTRAL, 2 ** rng.uniform(0, 20)))
        root = ET.fromstring(draw_roofline(node, chosen, [attention], title=name))
        points = coordinates(root)
        assert len(points) > 20
        for x, y in points:
            assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1, (batch, micro_batch, resident)
            assert TOP - 8.1 <= y <= HEIGHT - BOTTOM + 0.1, (batch, micro_batch, resident)


def test_numbers_in_pictures() -> None:
    assert doctest.testmod(draw).attempted == 1
    assert doctest.testmod(draw).failed == 0


def curve(name: str = "ours", *, gpu_from: int = 3) -> Curve:
    return Curve(
        name=name,
        points=tuple(
            CurvePoint(
                host_memory_bytes=100 * GIB * (1 + i),
                tokens_per_s=float(200 * min(1 + i, gpu_from)),
                bound="KV" if 1 + i < gpu_from else "GPU",
            )
            for i in range(6)
        ),
    )


def test_a_curve_lies_where_its_points_do() -> None:
    root = ET.fromstring(draw_throughput([curve()], title="t"))
    line = next(p for p in root.iter(f"{SVG}path") if p.get("fill") == "none" and p.get("d"))
    pixels = re.findall(r"[ML]([\d.]+) ([\d.]+)", line.get("d", ""))
    assert [float(x) for x, _ in pixels] == pytest.approx(
        [LEFT + X_LENGTH * (1 + i) / 6 / 1.05 for i in range(6)], abs=0.1
    )
    assert [float(y) for _, y in pixels] == pytest.approx(
        [HEIGHT - BOTTOM - (Y_LENGTH - 42) * min(1 + i, 3) / 3 for i in range(6)], abs=0.1
    )


def test_what_limits_a_curve_is_named_where_it_changes() -> None:
    root = ET.fromstring(draw_throughput([curve()], title="t"))
    found = texts(root)
    assert found.count("KV") == 1
    assert found.count("GPU") == 1
    dots = [float(dot.get("cx", "nan")) for dot in root.iter(f"{SVG}circle")]
    assert dots == pytest.approx([LEFT + X_LENGTH * 3 / 6 / 1.05], abs=0.1)


def test_weights_legend_and_the_chosen_plan() -> None:
    chosen = CurvePoint(host_memory_bytes=300 * GIB, tokens_per_s=345.6)
    bound = Curve(name="bound", points=curve(gpu_from=4).points, is_bound=True)
    root = ET.fromstring(
        draw_throughput([curve(), bound], title="t", weight_bytes=87 * GIB, chosen=chosen)
    )
    found = texts(root)
    for wanted in ("ours", "bound", "weights 87.00 GiB", "chosen: 345.6 tokens/s"):
        assert wanted in found
    ((x, y),) = diamonds(root)
    assert x == pytest.approx(LEFT + X_LENGTH * 3 / 6 / 1.05, abs=0.1)
    assert y == pytest.approx(HEIGHT - BOTTOM - (Y_LENGTH - 62) * 345.6 / 800, abs=0.1)
    dashed = [path for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray") == "8 5"]
    assert len(dashed) == 2, "the line and its sample in the legend"


@pytest.mark.parametrize("num_curves", [1, 5])
def test_a_flat_curve_lies_below_the_legend(num_curves: int) -> None:
    root = ET.fromstring(draw_throughput([curve(gpu_from=1)] * num_curves, title="t"))
    legend = [
        float(text.get("y", "nan")) for text in root.iter(f"{SVG}text") if text.text == "ours"
    ]
    assert len(legend) == num_curves
    line = next(p for p in root.iter(f"{SVG}path") if p.get("fill") == "none" and p.get("d"))
    assert min(float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", line.get("d", ""))) > max(
        legend
    )


@pytest.mark.parametrize("gib", [1, 400])
def test_the_name_of_the_weights_is_on_the_page(gib: int) -> None:
    root = ET.fromstring(draw_throughput([curve()], title="t", weight_bytes=gib * GIB))
    name = next(text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("weights"))
    x, length = float(name.get("x", "nan")), 6.4 * len(name.text or "")
    start = x - length if "end" in (name.get("class") or "") else x
    assert LEFT <= start < start + length < WIDTH


def test_ticks_are_round_and_inside() -> None:
    rng = random.Random()
    maximum = 10 ** rng.uniform(-2, 6)
    ticks = Chart.from_zero(maximum, maximum).x.ticks()
    assert 4 <= len(ticks) <= 10
    assert ticks[0] == 0
    assert max(ticks) <= maximum
    steps = [after - before for before, after in pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_nothing_to_draw_and_too_much_of_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 points on 0 curves"):
        draw_throughput([], title="t")
    with pytest.raises(ConfigError, match="at most 5 curves"):
        draw_throughput([curve()] * 6, title="t")
    with pytest.raises(ConfigError, match=r"CurvePoint\.tokens_per_s is 0; it must be positive"):
        CurvePoint(host_memory_bytes=GIB, tokens_per_s=0)
