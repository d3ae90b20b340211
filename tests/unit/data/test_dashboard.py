"""The dashboard names series that exist, and the file in examples is the one that is built."""

import json
import re
from pathlib import Path

import pytest

from raymoe.data.observer import METRICS
from tests.unit.data.dashboard import dashboard, series

FILE = Path(__file__).parents[3] / "examples" / "grafana-raymoe.json"
NAMES = {metric.exported_name for metric in METRICS}
TARGETS = [
    (panel["title"], target) for panel in dashboard()["panels"] for target in panel["targets"]
]


def test_the_file_is_what_is_built():
    message = "python -m tests.unit.data.dashboard > examples/grafana-raymoe.json writes it anew"
    assert json.loads(FILE.read_text()) == dashboard(), message


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[title for title, _ in TARGETS])
def test_every_query_names_series_that_exist(title, target):
    expression = target["expr"]
    named = re.findall(r"[a-z_]+(?=\{)", expression)
    assert named
    assert set(named) <= NAMES
    assert expression.count("(") == expression.count(")")
    labels = {"model", "actor"} | ({"kind"} if "error_rows" in expression else set())
    assert set(re.findall(r"(\w+)=~", expression)) == {"model", "actor"}
    assert set(re.findall(r"by \((\w+)\)", expression)) <= labels
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_every_series_is_on_a_panel_and_no_two_panels_overlap():
    shown = {name for _, target in TARGETS for name in NAMES if f"{name}{{" in target["expr"]}
    assert shown == NAMES
    panels = dashboard()["panels"]
    places = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        places |= {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {one["name"] for one in dashboard()["templating"]["list"]} == {
        "source",
        "model",
        "actor",
    }


def test_a_name_that_does_not_exist_cannot_be_queried():
    with pytest.raises(KeyError):
        series("tokens_per_second")
