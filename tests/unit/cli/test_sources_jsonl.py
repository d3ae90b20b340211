"""JSON lines: one type for each column, one reason for each bad line."""

import gzip
import itertools
import json

import pyarrow as pa
import pytest

from raymoe.cli import sources
from raymoe.cli.sources import open_source, read_jsonl, scan
from raymoe.cli.storage import Location
from raymoe.data import json_lines
from raymoe.data.prompt_template import INPUT_ERROR_COLUMN
from raymoe.errors import ConfigError


def read(path, *lines, prompt_column="prompt"):
    path.write_bytes(b"\n".join(lines))
    scanned = scan([Location.local(path)], [prompt_column], None)
    return scanned, read_all(scanned, path)


def read_all(scanned, path):
    root, layout = Location.local(path), scanned.layout
    tables = [read_jsonl(one, layout=layout, root=root) for one in scanned.splits]
    return pa.concat_tables(itertools.chain.from_iterable(tables))


def lines_of(*records):
    return [json.dumps(record).encode() for record in records]


def test_columns_get_the_type_that_holds_all_their_values(tmp_path):
    records = [
        {"text": "a", "whole": 1, "real": 1, "flag": True, "mixed": 1, "nested": [1], "none": None},
        {"text": None, "whole": 2, "real": 0.5, "flag": False, "mixed": "x", "nested": {"a": 1}},
        {"text": "b", "whole": 2**60, "real": 2, "big": 2**70},
    ]
    scanned, table = read(tmp_path / "a.jsonl", *lines_of(*records))
    types = {field.name: str(field.type) for field in scanned.layout.schema}
    assert types == {
        "text": "string",
        "whole": "int64",
        "real": "double",
        "flag": "bool",
        "mixed": "string",
        "nested": "string",
        "none": "string",
        "big": "string",
    }
    assert scanned.layout.json_columns == {"mixed", "nested", "big"}
    assert table.column("whole").to_pylist() == [1, 2, 2**60]
    assert table.column("mixed").to_pylist() == ["1", '"x"', None]
    assert table.column("nested").to_pylist() == ["[1]", '{"a": 1}', None]
    assert table.column(INPUT_ERROR_COLUMN).to_pylist() == ["", "", ""]


def test_bad_lines_are_rows_with_a_reason_and_blank_lines_are_none(tmp_path):
    path = tmp_path / "a.jsonl"
    scanned, table = read(
        path,
        b'{"id": 1, "prompt": "a"}',
        b"",
        b"{broken",
        b'{"id": 2, "prompt": "\xff"}',
        b'{"id": 3, "prompt": 5}',
        b'{"id": 4, "prompt": "\\ud800"}',
        b"[1]",
        b"[" * 100_000,
        b'{"id": 5, "prompt": "b"}',
    )
    errors = table.column(INPUT_ERROR_COLUMN).to_pylist()
    assert scanned.num_rows == table.num_rows == 8
    assert [bool(error) for error in errors] == [False, *[True] * 6, False]
    assert "not JSON" in errors[1]
    assert errors[1].endswith(f"({path}, line 3)")
    assert "not UTF-8" in errors[2]
    assert "column 'prompt' is 5 (int)" in errors[3]
    assert "lone surrogate" in errors[4]
    assert "not a JSON object: [1]" in errors[5]
    assert table.column("id").to_pylist() == [1, None, 2, 3, 4, None, None, 5]
    assert len(set(errors)) == 7


def test_prompts_that_are_all_token_ids_are_lists(tmp_path):
    _, table = read(tmp_path / "a.jsonl", *lines_of({"prompt": [1, 2]}, {"prompt": ["x"]}))
    assert table.column("prompt").to_pylist() == [[1, 2], None]
    assert "column 'prompt' is ['x'] (list)" in table.column(INPUT_ERROR_COLUMN).to_pylist()[1]


@pytest.mark.parametrize("split_rows", [1, 3, 1000])
def test_splits_cover_every_line_once(tmp_path, monkeypatch, split_rows):
    monkeypatch.setattr(sources, "SPLIT_ROWS", split_rows)
    records = [{"prompt": "é" * (index % 7), "id": index} for index in range(20)]
    scanned, table = read(tmp_path / "a.jsonl", *lines_of(*records))
    assert len(scanned.splits) == -(-20 // split_rows)
    assert table.column("id").to_pylist() == list(range(20))


def test_a_file_without_an_object_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no JSON object"):
        read(tmp_path / "a.jsonl", b"", b"nothing here")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_without_measure_are_error_rows_with_file_and_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "DISCARD_BYTES", 1000)
    monkeypatch.setattr(sources, "MAX_COLUMNS", 4)
    path = tmp_path / name
    deep, wide = "[" * 200 + "]" * 200, dict.fromkeys("cdefg", 1)
    lines = [
        b'{"id": 1, "prompt": "a", "x": 1}',
        b'{"id": 2, "prompt": "' + b"a" * 900_000 + b'"}',
        b'{"id": 3, "prompt": "a", "x": %b}' % deep.encode(),
        b'{"id": 4, "prompt": "a", "\\ud800": 1}',
        b'{"id": 5, "prompt": "a", "y": 1}',
        *lines_of({"id": 6} | wide, {"id": 7, "y": 1}),
        b'{"prompt": "\\udfff", "\\ud800": 1}',
    ]
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    source = open_source(str(path), id_column="id")
    assert source.schema.names == ["id", "prompt", "x", "y"]
    assert source.ids.to_pylist() == [1, 3, 4, 5, 6, 7]
    rows = pa.concat_tables(source.tables(["id", "prompt", INPUT_ERROR_COLUMN])).to_pylist()
    assert [row["id"] for row in rows] == [1, None, 3, 4, 5, 6, 7, None]
    errors = [row[INPUT_ERROR_COLUMN] for row in rows]
    problems = ["", "bytes; at most 1,000", "nested more", "surrogate", "", "'c' is no column", "",
                "surrogate"]  # fmt: skip
    for number, (error, problem) in enumerate(zip(errors, problems, strict=True), 1):
        assert error.endswith(f" ({path}, line {number})" if problem else "")
        assert problem in error


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, end):
    path = tmp_path / "a.jsonl"
    path.write_bytes(BOM + b'{"prompt": "a"}' + end + BOM + end + BOM + b'{"prompt": "b"}' + end)
    scanned = scan([Location.local(path)], ["prompt"], None)
    table = read_all(scanned, path)
    assert scanned.num_rows == 2
    assert table.column("prompt").to_pylist() == ["a", "b"]
    assert table.column(INPUT_ERROR_COLUMN).to_pylist() == ["", ""]


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_a_file_of_another_encoding_is_refused_by_its_name(tmp_path, encoding):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "b"}\n'.encode(encoding))
    with pytest.raises(ConfigError, match=f"is text in {encoding[:6].upper()}; convert it"):
        scan([Location.local(path)], ["prompt"], None)


def test_zeros_in_a_line_make_no_other_encoding(tmp_path):
    scanned, table = read(tmp_path / "a.jsonl", b"\0\0ab", b'{"prompt": "a"}')
    assert scanned.num_rows == 2
    assert "not JSON" in table.column(INPUT_ERROR_COLUMN)[0].as_py()
