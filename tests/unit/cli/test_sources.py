"""Inputs: files, directories, globs, and ids that identify rows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymoe.cli.sources import check_ids, find_files, open_source
from raymoe.cli.storage import Location
from raymoe.errors import ConfigError


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def open_ids(pattern):
    return open_source(str(pattern), id_column="id")


def test_directories_and_globs_give_their_files_by_name(tmp_path):
    first = write(tmp_path / "in" / "a.parquet", id=[1])
    second = write(tmp_path / "in" / "deep" / "b.parquet", id=[2])
    write(tmp_path / "in" / "_hidden" / "c.parquet", id=[3])
    (tmp_path / "in" / "notes.txt").write_text("x")
    first, second = Location.local(first), Location.local(second)
    assert find_files(str(tmp_path / "in")) == (first, second)
    assert find_files(str(tmp_path / "in" / "*.parquet")) == (first,)


def test_nothing_to_read_and_mixed_formats_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no file that ends in"):
        find_files(str(tmp_path / "absent"))
    write(tmp_path / "a.parquet", id=[1])
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="both parquet and JSON lines"):
        find_files(str(tmp_path))


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as parquet"):
        open_ids(tmp_path)


def test_parquet_files_give_rows_columns_and_ids(tmp_path):
    write(tmp_path / "a.parquet", id=[1, 2], prompt=["x", "y"])
    write(tmp_path / "b.parquet", id=[3], prompt=["z"], more=[1.5])
    source = open_ids(tmp_path)
    assert (source.num_rows, source.ids.to_pylist()) == (3, [1, 2, 3])
    assert source.schema.names == ["id", "prompt", "more"]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([1, None, None], "has no id in 2 rows, the first is row 1"),
        ([1, 2, 2, 3, 3], "has 2 ids that occur more than once, such as 2"),
        (["a", "a"], "such as 'a'"),
    ],
)
def test_ids_that_identify_no_row_are_refused(ids, reason):
    with pytest.raises(ConfigError, match=reason):
        check_ids(pa.array(ids), "id")


def test_a_missing_id_column_names_those_there_are(tmp_path):
    write(tmp_path / "a.parquet", key=[1])
    with pytest.raises(ConfigError, match=r"no column 'id' \(--id-column\); it has key"):
        open_ids(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(ConfigError, match="no line has the key 'id'"):
        open_ids(tmp_path / "b.jsonl")


def test_ids_of_json_lines_are_text_or_whole_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{"id": "x"}\n')
    with pytest.raises(ConfigError, match="not all text or all whole numbers"):
        open_ids(path)
    path.write_text('{"id": 1}\n{broken\n{"id": 7}\n')
    assert open_ids(path).ids.to_pylist() == [1, 7]


def test_an_id_that_is_no_text_for_arrow_is_an_error_of_its_row(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "\\ud800", "prompt": "y"}\n')
    source = open_source(str(path), id_column="id")
    assert source.ids.to_pylist() == ["a"]
    assert source.num_rows == 2
