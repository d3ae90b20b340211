"""A report says what happened, and nothing in it runs, loads, or was written by a row."""

import dataclasses
import os
import re
from html.parser import HTMLParser

import pytest

from raymoe.data.error_groups import ErrorGroup
from raymoe.data.status import RowCounts, read_status
from raymoe.errors import ConfigError
from raymoe.report import (
    MAX_LINES,
    MOMENTS,
    WHY_SLOWER,
    Line,
    Sample,
    draw_series,
    is_report,
    levels,
    make_report,
    rates,
    slowest,
    total_rates,
    write_report,
)
from raymoe.schedule.draw import shorten, svg_page
from raymoe.status_view import ActorView, JobView
from tests.unit.data.jobs import made
from tests.unit.data.statuses import NOW_S, actor, job, passed, planned, with_plan, write

HOSTILE = (
    "</pre></svg><script>alert(1)</script><img src=x onerror=alert(2)>"
    "<style>*{display:none}</style>\"'&<!-- \x1b[2J\u202e --><a href='javascript:alert(3)'>"
)
VOID = {"meta", "path", "rect", "line", "circle"}


class Reader(HTMLParser):
    """Collects tags, attributes and text; checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def report(tmp_path, *, manifest=None, samples=(), **content):
    view = JobView.of(read_status(write(tmp_path / "answers.status", **content)), NOW_S)
    return Reader(make_report(view, "answers", manifest, samples=samples)), view


@pytest.fixture(scope="module", params=[True, False], ids=["gpu", "host"])
def plan(request):
    return planned(has_gpu=request.param)


def test_a_report_has_all_that_happened(tmp_path, plan):
    actors = [with_plan(actor(), plan), actor("node-b-2-def")]
    page, _ = report(tmp_path, manifest=made(), job=job(), actors=actors, steps=[passed(plan)])
    for title in (
        "Summary",
        "Rows with errors",
        "Over time",
        "Predicted and measured",
        "Roofline",
        "Actors",
        "Settings and manifest",
    ):
        assert title in page.texts, title
    assert "214 of 400" in page.texts  # of each actor 97 by the engine and 10 found
    assert "+25 %" in page.texts
    assert "ConfigError: column 'prompt' is empty" in page.texts
    assert page.tags.count("svg") == 5
    for name in ("node-a-1-abc", "node-b-2-def", "all", "max_tokens", "d" * 64):
        assert name in page.texts, name
    assert any("FFN of" in text for text in page.texts)


def test_steps_that_take_much_longer_have_a_reason(tmp_path, plan):
    quick, _ = report(tmp_path / "1", actors=[with_plan(actor(), plan)])
    assert WHY_SLOWER not in quick.texts
    one = actor()
    slow = dataclasses.replace(one.engine, busy_s=7.66 * one.engine.predicted_s)
    page, _ = report(
        tmp_path / "2", actors=[with_plan(dataclasses.replace(one, engine=slow), plan)]
    )
    assert "+666 %" in page.texts
    assert WHY_SLOWER in page.texts


@pytest.mark.parametrize("name", ["models/" + "very-long-" * 9 + "name", "m" * 500])
def test_titles_of_pictures_stay_within_them(name):
    title = f"{name} on a node, schedule micro_batches"
    page = svg_page(title, 960, 100, ())
    assert f"<title>{title}</title>" in page
    size, shown = re.search(r'font-size:([0-9.]+)px">(.*)</text>', page).groups()
    assert shown.startswith(name[:50])
    assert shown.endswith("schedule micro_batches")
    assert 10 <= float(size) < 16
    assert 0.6 * float(size) * len(shown) <= 960 - 16
    assert "font-size:" not in svg_page("short", 960, 100, ()).partition("</style>")[2]


@pytest.mark.parametrize("has_samples", [False, True])
def test_a_report_quotes_no_cells_unless_asked(tmp_path, has_samples):
    said = "ConfigError: column 'prompt' is 'my secret'"
    rows = RowCounts(num_rows=3, error_groups=(ErrorGroup.of(said),))
    page, _ = report(
        tmp_path, samples=() if has_samples else None,
        job=job(state="failed", reason=said, error_groups=(ErrorGroup.of(said),)),
        actors=[actor(rows=rows, state="failed", reason=said)],
    )  # fmt: skip
    assert page.text.count("my secret") == 3 * has_samples
    assert "ConfigError" in page.text
    assert ("raymoe report --samples" in page.text) != has_samples
    assert "column 'prompt' is" in page.text


def test_a_job_of_which_nothing_is_known_yet_has_a_report_too(tmp_path):
    page, _ = report(tmp_path)
    assert "0" in page.texts
    page, _ = report(
        tmp_path / "loading", job=job(num_rows=0), actors=[actor(engine=None, history=())]
    )
    assert any("No actor ran long enough" in text for text in page.texts)
    assert "svg" not in page.tags


def test_nothing_that_a_row_or_a_model_says_becomes_part_of_the_page(tmp_path, plan):
    rows = RowCounts(num_rows=3, errors=(("ConfigError", 3),))
    bad = with_plan(actor(model=HOSTILE, node=HOSTILE, reason=HOSTILE, rows=rows), plan)
    bad = dataclasses.replace(
        bad, plan=dataclasses.replace(bad.plan, description=HOSTILE, schedule=HOSTILE)
    )
    record = passed(plan)
    record = dataclasses.replace(
        record,
        model=HOSTILE,
        schedule=HOSTILE,
        hardware=dataclasses.replace(record.hardware, name=HOSTILE),
        operations=tuple((HOSTILE, *rest) for _, *rest in record.operations),
    )
    hostile_job = job(
        name=HOSTILE, model=HOSTILE, reason=HOSTILE, settings=((HOSTILE, HOSTILE),),
        error_groups=(ErrorGroup(num_rows=3, template=HOSTILE),), currency=HOSTILE,
    )  # fmt: skip
    (tmp_path / "answers.status").mkdir()
    (tmp_path / "answers.status" / "actor-torn.json").write_text(HOSTILE)
    page, view = report(
        tmp_path,
        manifest=made(chat_template=HOSTILE),
        job=hostile_job,
        actors=[bad],
        steps=[record],
        samples=[
            Sample(name=HOSTILE, prompt=HOSTILE, answers=(HOSTILE, HOSTILE)),
            Sample(name=HOSTILE, prompt=HOSTILE, error=HOSTILE),
        ],
    )
    assert view.unreadable
    assert not {"script", "img", "a", "iframe", "object", "link", "form"} & set(page.tags)
    # Only our own two kinds of style: of the page and of each picture.
    assert page.tags.count("style") == 1 + page.tags.count("svg")
    assert page.text.count("alert(1)") >= 8
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


def test_the_page_loads_and_runs_nothing(tmp_path, plan):
    page, view = report(tmp_path, job=job(), actors=[actor()], steps=[passed(plan)])
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on") or name in {"src", "href"}}
    html = make_report(view, "answers")
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", html)
    assert "default-src 'none'" in html


def test_a_report_is_written_whole_and_replaces_only_reports(tmp_path):
    status = write(tmp_path / "answers.status", job=job(), actors=[actor()])
    path = tmp_path / "answers.report.html"
    before = os.umask(0o022)
    write_report(status, path)
    os.umask(before)
    assert is_report(path)
    assert path.stat().st_mode & 0o777 == 0o600
    write_report(status, path)
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == [path.name]
    other = tmp_path / "thesis.html"
    other.write_text("<html>mine</html>")
    with pytest.raises(ConfigError, match=r"thesis\.html is there and no report of raymoe"):
        write_report(status, other)
    assert other.read_text() == "<html>mine</html>"


def test_rates_are_what_was_generated_between_two_moments():
    history = ((0.0, 0.0, 0.0, 0.0, 0.5, 0.1), (2.0, 1.0, 5.0, 10.0, 1.0, 0.2))
    assert rates(history) == [(2.0, 5.0)]
    assert levels(history, 4) == [(0.0, 50.0), (2.0, 100.0)]
    later = tuple(
        (2 * time_s, rows, prompt, 3 * tokens, a, b)
        for time_s, rows, prompt, tokens, a, b in history
    )
    total = total_rates([history, later])
    assert len(total) == MOMENTS
    assert total[10][1] == pytest.approx(5.0 + 7.5)
    assert total[-1] == (pytest.approx(4.0), pytest.approx(7.5))
    step_s = 4.0 / MOMENTS
    assert sum(rate * step_s for _, rate in total) == pytest.approx(10.0 + 30.0)
    assert total_rates([history[:1]]) == []


def test_of_many_actors_the_slowest_are_drawn():
    names = [f"node-{i:03d}-1-abc" for i in range(100)]
    views = [
        view_of(actor(name, history=tuple((t, 0.0, 0.0, t * i, 0.0, 0.0) for t in (0.0, 1.0))))
        for i, name in enumerate(names)
    ]
    assert [one.status.actor for one in slowest(views[::-1])] == names[:MAX_LINES]


def view_of(status):
    return ActorView(status=status, state="running", age_s=0.0)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 59.0, 3600.0, 86_400.0, 30 * 86_400.0])
def test_a_chart_of_any_length_stays_in_its_frame(seconds):
    points = tuple((seconds * i / 10, float(i)) for i in range(11))
    svg = draw_series(
        [Line(name="x" * 300, points=points), Line(name="one", points=points[:1])],
        title="t",
    )
    numbers = [float(one) for one in re.findall(r"[ML](-?[\d.]+) ", svg)]
    assert all(0 <= one <= 960 for one in numbers)
    assert svg.count('class="tick"') < 40
    assert "..." in svg
    assert len(shorten("x" * 300, 36)) <= 36
