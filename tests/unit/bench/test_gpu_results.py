"""Lines of results, the tables made of them, and what a part depends on."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from raymoe.bench.gpu.report import COLUMNS, groups_of, write_report
from raymoe.bench.gpu.settings import NodeSettings, append_result, read_results
from raymoe.errors import ConfigError
from tests.unit.bench.gpu_results import FIGURES, SETTINGS, result


def test_rates_are_those_of_the_two_jobs() -> None:
    assert FIGURES.tokens_per_s == 160
    assert FIGURES.prefill_tokens_per_s == 770
    assert FIGURES.decode_tokens_per_s == (640 - 10) / 3
    assert FIGURES.share_of_bound == 0.75


def test_a_result_comes_back_as_it_was_and_a_later_one_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    first, other, again = (
        result("raymoe", None, reason="it broke"),
        result("vslpipe"),
        result("raymoe"),
    )
    for each in (first, other, again):
        append_result(path, each)
    assert len(path.read_text().splitlines()) == 3
    assert '"tokens_per_s": 160' in path.read_text()
    assert read_results(path) == [again, other]
    assert read_results(tmp_path / "none") == []


@pytest.mark.parametrize("line", ["{", "[]", '{"key": 1}'])
def test_a_line_that_is_no_result_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    append_result(path, result("raymoe"))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"gpu\.jsonl, line 2: .*; choose another --out"):
        read_results(path)


def test_any_setting_makes_another_part() -> None:
    others = [
        replace(SETTINGS, shape="tiny"),
        replace(SETTINGS, num_layers=15),
        replace(SETTINGS, limit_s=541.0),
        replace(SETTINGS, node=replace(SETTINGS.node, device_memory_bytes=None)),
    ]
    assert len({SETTINGS.key, *(each.key for each in others)}) == 5
    assert replace(SETTINGS).key == SETTINGS.key


def test_groups_are_of_one_shape_workload_and_node() -> None:
    node = NodeSettings(device="cuda")
    results = [
        result("raymoe"),
        result("raymoe", workload="512-256"),
        result("vslpipe"),
        result("raymoe", node=node),
    ]
    groups = groups_of(results)
    assert sorted(len(group.results) for group in groups) == [1, 1, 2]
    assert len({group.file_name for group in groups}) == 3
    (both,) = (group for group in groups if len(group.results) == 2)
    assert both.title == "mixtral-8x7b, 16 of 32 layers, mtbench-64: a device, 16.00 GiB"


def test_the_cells_of_a_table() -> None:
    slow = replace(FIGURES, total_s=8.0, num_measured_steps=9, model=None)
    (group,) = groups_of(
        [result("raymoe"), result("accelerate", slow), result("cgopipe", None, reason="no\nroom")]
    )
    mine, theirs = group.rows()
    assert mine[: len(COLUMNS)] == (
        "raymoe", "10", "210.0", "160.0", "1.00 x", "9.0/12.0", "44 %", "+25 %", "75 %",
    )  # fmt: skip
    assert mine[len(COLUMNS) :] == (
        "link", "75 %", "770.0", "50 %, 25 %, 90 %, 0 %", "1m10s", "micro_batches (planner)",
    )  # fmt: skip
    assert theirs[2:9] == ("~90.0", "~80.0", "2.00 x", "", "", "", "37.5 %")
    assert list(group.notes()) == ["cgopipe failed: no"]


def test_the_report_has_tables_bars_and_only_the_pictures_that_exist(tmp_path: Path) -> None:
    measured = result("raymoe")
    (tmp_path / f"{measured.settings.file_name}.svg").write_text("<svg/>")
    failed = result("vslpipe", None, reason="Error: gone", workload="512-256")
    text = write_report([measured, result("cgopipe"), failed], tmp_path).read_text()
    assert text.count("## mixtral-8x7b") == 2
    assert "| raymoe | 10 | 210.0 |" in text
    assert "- vslpipe failed: Error: gone" in text
    assert f"[raymoe]({measured.settings.file_name}.svg)" in text
    assert "[cgopipe](" not in text
    (bars,) = (path for path in tmp_path.glob("*.svg") if path.read_text() != "<svg/>")
    assert f"({bars.name})" in text
    root = ET.parse(bars).getroot()
    widths = [
        float(bar.get("width", "0"))
        for bar in root.iter("{http://www.w3.org/2000/svg}rect")
        if bar.get("class") is None
    ]
    assert len(widths) == 2
    assert widths[0] == widths[1] > 100
