"""A report shows rows of the output if asked: prompts beside answers, escaped and cut."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymoe.cli import run
from raymoe.cli.samples import read_samples
from raymoe.errors import ConfigError
from tests.unit.data.statuses import actor, job, write

EVIL = "<script>alert(1)</script>\x1b[2J"


def rows(count, **changes):
    return [
        {"id": f"row {i}", "prompt": f"ask {i}", "generated_text": f"say {i}",
         "__inference_error__": "", **changes}
        for i in range(count)
    ]  # fmt: skip


def lines(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def status(tmp_path, name="out.jsonl", **changes):
    return write(tmp_path / f"{name}.status", job=job(**changes), actors=[actor()])


def texts(samples):
    return [(one.name, one.prompt, *one.answers) for one in samples]


def test_samples_come_from_all_over_a_file(tmp_path):
    lines(tmp_path / "out.jsonl", rows(1000))
    found = read_samples(status(tmp_path), job(), 10)
    assert len({one.name for one in found}) == 10
    assert all(one.prompt.replace("ask", "say") == one.answers[0] for one in found)
    numbers = [int(one.name.split()[1]) for one in found]
    assert numbers[0] == 0
    assert max(numbers) > 800
    assert len(read_samples(status(tmp_path), job(), 5000)) == 1000  # each row once


def test_samples_of_a_job_that_is_not_over_are_of_its_parts(tmp_path):
    lines(tmp_path / "out.jsonl", rows(3))  # of a former job: the parts count
    parts = tmp_path / "out.jsonl.partial"
    parts.mkdir()
    for number in range(3):
        lines(parts / f"part-{number:06d}.jsonl", rows(20, prompt=f"in part {number}"))
    (parts / ".part-000003.jsonl.tmp").write_text('{"id"')
    found = read_samples(status(tmp_path), job(), 6)
    assert sorted({one.prompt for one in found}) == [f"in part {number}" for number in range(3)]
    assert len(found) == 6


def test_samples_of_parquet(tmp_path):
    (tmp_path / "out").mkdir()
    pq.write_table(pa.Table.from_pylist(rows(9)), tmp_path / "out" / "part-000000.parquet")
    found = read_samples(status(tmp_path, "out"), job(), 3)
    assert [one.name for one in found] == ["row 0", "row 3", "row 6"]


@pytest.mark.parametrize(
    ("record", "settings", "text"),
    [
        ({"prompt": "a", "generated_text": "b"}, {}, ("", "a", "b")),
        ({"q": "a", "generated_text": "b"}, {"prompt_column": "q"}, ("", "a", "b")),
        ({"prompt": [1, 2], "generated_text": "b"}, {}, ("", "[1, 2]", "b")),
        ({"messages": [{"role": "user", "content": "a"}], "generated_text": "b"}, {},
         ("", "user: a", "b")),
        ({"prompt": "a", "generated_text": "b", "generated_texts": ["b", "c"]}, {},
         ("", "a", "b", "c")),
        ({"prompt": "a", "choices": [{"text": "b"}, {"text": None}]}, {}, ("", "a", "b", "null")),
        ({"id": 7, "x": 1, "generated_text": "b", "num_input_tokens": 3}, {},
         ("7", '{"id": 7, "x": 1}', "b")),
        ({"custom_id": "c", "error": None, "response": {"body": {"choices": [
            {"message": {"content": "b"}}, {"text": "d"}]}}}, {},
         ("c", "(in the input)", "b", "d")),
    ],
)  # fmt: skip
def test_a_sample_has_what_was_asked_and_answered(tmp_path, record, settings, text):
    lines(tmp_path / "out.jsonl", [record])
    shown = job(settings=tuple(settings.items()))
    assert texts(read_samples(status(tmp_path), shown, 1)) == [text]


def test_errors_are_shown_instead_of_answers(tmp_path):
    failed = {
        "id": "c",
        "prompt": "a",
        "generated_text": "",
        "__inference_error__": "ValueError: no",
    }
    lines(tmp_path / "out.jsonl", [failed])
    (one,) = read_samples(status(tmp_path), job(), 1)
    assert one.error == "ValueError: no"


def test_without_rows_there_is_a_reason(tmp_path):
    directory = status(tmp_path)
    with pytest.raises(ConfigError, match="leave out --samples, or wait"):
        read_samples(directory, job(), 3)
    (tmp_path / "out.jsonl").write_text("no row\n")
    with pytest.raises(ConfigError, match="has a line that is no row"):
        read_samples(directory, job(), 3)


@pytest.mark.parametrize("options", [(), ("--samples", "3")])
def test_a_report_shows_cells_only_if_asked(tmp_path, options, capsys):
    long = "long " * 10_000
    lines(tmp_path / "out.jsonl", rows(3, prompt=EVIL, generated_text=long))
    status(tmp_path)
    assert run(["report", str(tmp_path / "out.jsonl"), *options]) == 0
    page = (tmp_path / "out.jsonl.report.html").read_text()
    is_asked = bool(options)
    assert ("row 2" in page) == is_asked
    assert ("&lt;script&gt;" in page) == is_asked
    assert ("[... 48,000 characters ...]" in page) == is_asked
    assert ("my cell" in page) == is_asked
    assert ("Parts of cells are left out" in page) != is_asked
    assert "<script" not in page
    assert "\x1b" not in page
    assert len(page) < 60_000
    for path in (tmp_path / "out.jsonl.status").iterdir():
        assert "script" not in path.read_text()
