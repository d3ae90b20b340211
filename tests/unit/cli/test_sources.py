"""Inputs: files, directories, globs, and ids that identify rows."""

import bz2
import gzip
import json
import uuid

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from raymoe.cli import sources
from raymoe.cli.one_schema import check_id_of_lines
from raymoe.cli.sources import TemplatedSource, check_ids, find_files, open_source
from raymoe.cli.storage import Location
from raymoe.data.prompt_template import PromptTemplate
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


def rows_of(source, *columns):
    return [row for table in source.tables(columns) for row in table.to_pylist()]


def save_to_disk(directory, table, names=("data-00000-of-00001.arrow",), rows_per_batch=2):
    """Write what `Dataset.save_to_disk` of the library `datasets` writes."""
    directory.mkdir(parents=True)
    each = -(-table.num_rows // len(names))
    for index, name in enumerate(names):
        part = table.slice(index * each, each)
        with (
            pa.OSFile(str(directory / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(part, max_chunksize=rows_per_batch)
    (directory / "dataset_info.json").write_text('{"features": {}}')
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (directory / "state.json").write_text(json.dumps(state))
    return directory


SAVED = pa.table({"id": list(range(7)), "prompt": [f"p{one}" for one in range(7)]})


@pytest.mark.parametrize("split_rows", [1, 3, 1000])
@pytest.mark.parametrize("limit", [None, 1, 4, 6])
def test_a_saved_dataset_is_read_by_its_list_of_files(tmp_path, monkeypatch, split_rows, limit):
    monkeypatch.setattr(sources, "SPLIT_ROWS", split_rows)
    saved = save_to_disk(tmp_path / "d", SAVED, ("data-0.arrow", "data-1.arrow"))
    (saved / "cache-0123.arrow").write_bytes(b"of a map")
    source = open_source(str(saved), id_column="id", limit=limit)
    expected = SAVED.slice(0, limit)
    assert source.num_rows == expected.num_rows
    assert source.ids.to_pylist() == expected.column("id").to_pylist()
    assert rows_of(source, "id", "prompt") == expected.to_pylist()


def test_a_dict_of_datasets_says_which_splits_there_are(tmp_path):
    save_to_disk(tmp_path / "d" / "train", SAVED)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"a DatasetDict with train, test; name one .*d/train$"):
        open_source(str(tmp_path / "d"), id_column=None)
    assert open_source(str(tmp_path / "d" / "train"), id_column=None).num_rows == 7
    (tmp_path / "d" / "train" / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(ConfigError, match="is a dataset without rows"):
        open_source(str(tmp_path / "d" / "train"), id_column=None)


@pytest.mark.parametrize(
    "state",
    ["{}", "[]", "{", '{"_data_files": [{"filename": "../x.arrow"}]}', '{"_data_files": [3]}',
     '{"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "b"}]}'],
)  # fmt: skip
def test_a_list_of_files_that_is_not_known_is_refused(tmp_path, state):
    saved = save_to_disk(tmp_path / "d", SAVED)
    (saved / "state.json").write_text(state)
    with pytest.raises(ConfigError, match=r"state\.json"):
        open_source(str(saved), id_column=None)


def test_arrow_files_of_both_forms_are_read_and_damaged_ones_named(tmp_path):
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SAVED.schema) as writer:
        writer.write_table(SAVED, max_chunksize=3)
    assert rows_of(open_source(str(path), id_column="id"), "id") == SAVED.select(["id"]).to_pylist()
    saved = save_to_disk(tmp_path / "d", SAVED)
    damaged = saved / "data-00000-of-00001.arrow"
    content = damaged.read_bytes()
    for cut in (0, 3, 40, len(content) // 2, len(content) - 30):
        damaged.write_bytes(content[:cut])
        with pytest.raises(ConfigError, match=r"00001\.arrow cannot be read as Arrow"):
            open_source(str(saved), id_column=None)
    with pytest.raises(ConfigError, match=r"a\.arrow has no column 'key' \(--id-column\)"):
        open_source(str(path), id_column="key")


@pytest.mark.parametrize("limit", [1, 3, 4, 6, 100])
def test_the_first_rows_of_parquet_are_those_of_the_first_files(tmp_path, limit):
    table = SAVED.slice(0, 4)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    write(tmp_path / "b.parquet", id=[4, 5, 6], prompt=["p4", "p5", "p6"])
    source = open_source(str(tmp_path), id_column="id", limit=limit)
    expected = SAVED.slice(0, limit)
    assert source.ids.to_pylist() == expected.column("id").to_pylist()
    assert rows_of(source, "prompt", "id") == expected.select(["prompt", "id"]).to_pylist()


@pytest.mark.parametrize("limit", [None, 2])
def test_compressed_json_lines_are_read_and_cut(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(sources, "SPLIT_ROWS", 2)
    lines = b'{"id": 1, "prompt": "a"}\n\n{broken\n{"id": 3, "prompt": "b"}\n'
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    source = open_source(str(path), id_column="id", limit=limit)
    found = rows_of(source, "id", "__input_error__")
    assert [row["id"] for row in found] == [1, None, 3][:limit]
    assert found[1]["__input_error__"].endswith(f"({path}, line 3)")


def test_rows_with_a_template_have_one_more_column(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "tags": ["x"], "prompt": "p"}\n{broken\n{"id": 2, "tags": []}\n')
    base = open_source(str(path), id_column="id")
    source = TemplatedSource.of(base, PromptTemplate(prompt="{{ tags[0] }} {{ prompt }}"))
    assert source.schema.names == ["id", "tags", "prompt", "rendered_prompt"]
    found = rows_of(source, "id", "rendered_prompt", "__input_error__")
    assert [row["rendered_prompt"] for row in found] == ["x p", None, None]
    assert "not JSON" in found[1]["__input_error__"]
    assert found[2]["__input_error__"] == "prompt_template: list object has no element 0"
    chats = TemplatedSource.of(base, PromptTemplate(system="s"))
    assert chats.json_columns == {"tags", "rendered_messages"}
    table = write(tmp_path / "a.parquet", id=[1], text=["x"])
    source = open_source(str(table), id_column="id")
    source = TemplatedSource.of(source, PromptTemplate(prompt="{{ text }}"))
    assert rows_of(source, "rendered_prompt") == [{"rendered_prompt": "x"}]


NAMES = ["a b", "100%", "50%25", "c#1", "d?e", "f[1]", "g*h", "i=1", "p..q", "ü"]


def test_parquet_files_of_any_name_are_read(tmp_path):
    for number, name in enumerate(NAMES):
        write(tmp_path / f"{name}.{('parquet', 'pq')[number % 2]}", id=[number], prompt=["x"])
    source = open_ids(tmp_path)
    assert sorted(row["id"] for row in rows_of(source, "id")) == [*range(len(NAMES))]
    for path in tmp_path.iterdir():
        assert len(rows_of(open_ids(path), "id")) == 1


@pytest.mark.parametrize("limit", [None, 1])
def test_directories_name_columns_of_parquet(tmp_path, limit):
    write(tmp_path / "lang=d%2Fe" / "year=2024" / "a.parquet", id=[1], prompt=["x"])
    write(
        tmp_path / "lang=__HIVE_DEFAULT_PARTITION__" / "b.parquet", id=[2], prompt=["y"], year=[7]
    )
    with pytest.raises(ConfigError, match=r"'year' is string in .*a\.parquet and int64 in"):
        open_ids(tmp_path)
    write(tmp_path / "lang=__HIVE_DEFAULT_PARTITION__" / "b.parquet", id=[2], prompt=["y"])
    source = open_source(str(tmp_path), id_column="id", limit=limit)
    assert source.schema.names == ["id", "prompt", "lang", "year"]
    made = TemplatedSource.of(source, PromptTemplate(prompt="{{ lang }} {{ year }} {{ prompt }}"))
    rows = [{"id": 2, "lang": None, "year": None}, {"id": 1, "lang": "d/e", "year": "2024"}]
    assert rows_of(source, "id", "lang", "year") == rows[:limit]
    rendered = [row["rendered_prompt"] for row in rows_of(made, "rendered_prompt")]
    assert rendered == [None, "d/e 2024 x"][:limit]


@pytest.mark.parametrize("limit", [None, 1])
def test_all_files_of_a_table_have_the_columns_of_each(tmp_path, limit):
    """The first file decides nothing: later ones have more columns and wider types."""
    first = {"id": pa.array([1], pa.int32()), "prompt": ["a"], "more": pa.nulls(1)}
    write(tmp_path / "a.parquet", **first, extra=[{"x": 1}])
    write(tmp_path / "b.parquet", **(first | {"id": pa.array([2], pa.int64())}), extra=[{"y": "z"}])
    last = {"id": [3], "prompt": pa.array(["c"], pa.string_view()), "more": ["text"]}
    write(tmp_path / "c.parquet", **last, sampling_params=['{"max_tokens": 3}'])
    source = open_source(str(tmp_path), id_column="id", limit=limit)
    types = dict(zip(source.schema.names, source.schema.types, strict=True))
    assert (types["id"], types["prompt"], types["more"]) == (pa.int64(), pa.string(), pa.string())
    tables = [table for split in source.splits for table in source.read(split)]
    assert {table.schema for table in tables} == {source.schema}
    rows = [row for table in tables for row in table.to_pylist()]
    assert [row["sampling_params"] for row in rows] == [None, None, '{"max_tokens": 3}'][:limit]
    assert [row["extra"] for row in rows] == [{"x": 1, "y": None}, {"x": None, "y": "z"}, None][
        :limit
    ]


def test_types_without_a_common_one_are_named_before_anything_runs(tmp_path):
    write(tmp_path / "a.parquet", id=[1], prompt=["a"])
    write(tmp_path / "b.parquet", id=["x"], prompt=["a"])
    with pytest.raises(ConfigError, match=r"'id' is string in .*b\.parquet and int64 in .*a\.parq"):
        open_ids(tmp_path)
    write(tmp_path / "b.parquet", id=pa.array([2**63], pa.uint64()), prompt=["a"])
    with pytest.raises(ConfigError, match="'id' is uint64 in"):
        open_ids(tmp_path)


UUIDS = pa.array([uuid.UUID(int=number).bytes for number in range(2)], pa.binary(16))


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.array([7, 8]).dictionary_encode(), [7, 8]),
        (pa.array(["a", "b"], pa.string_view()), ["a", "b"]),
        (pa.array([b"a", b"b"], pa.binary_view()), [b"a", b"b"]),
        (pa.ExtensionArray.from_storage(pa.uuid(), UUIDS), [str(uuid.UUID(int=i)) for i in (0, 1)]),
    ],
)
def test_ids_have_plain_types(tmp_path, ids, values):
    source = open_ids(write(tmp_path / "a.parquet", id=ids))
    assert source.ids.to_pylist() == values
    assert pc.is_in(source.ids, value_set=source.ids.slice(1)).to_pylist() == [False, True]
    assert {table.schema for split in source.splits for table in source.read(split)} == {
        source.schema
    }


def test_run_lengths_and_views_of_arrow_are_plain(tmp_path):
    path = tmp_path / "a.arrow"
    columns = {
        "id": pc.run_end_encode(pa.array([5])),
        "prompt": pa.array(["x"], pa.string_view()).dictionary_encode(),
        "tags": pa.array([["t"]], pa.list_view(pa.string_view())),
    }
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert rows_of(open_ids(path), "id", "prompt", "tags") == [
        {"id": 5, "prompt": "x", "tags": ["t"]}
    ]


def test_ids_that_no_output_keeps_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", id=[{"a": 1}], prompt=["x"])
    with pytest.raises(
        ConfigError, match=r"'id' of .*a\.parquet is struct<a: int64>, which cannot"
    ):
        open_ids(path)


LINES = b'{"id": 1, "prompt": "a"}\n{"id": 2, "prompt": "b"}\n'
HALVES = LINES.splitlines(keepends=True)


def zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


FILES = {
    "a.json": LINES,
    "a.json.gz": gzip.compress(LINES),
    "a.JSONL.GZ": gzip.compress(LINES),
    "a.jsonl.bz2": bz2.compress(LINES),
    "members.jsonl.bz2": b"".join(map(bz2.compress, HALVES)),
    "a.jsonl.zst": zstd(LINES),
    "frames.ndjson.zst": b"".join(map(zstd, HALVES)),
    "a.csv.zst": zstd(b"id,prompt\n1,a\n2,b\n"),
}


@pytest.mark.parametrize(("name", "content"), FILES.items(), ids=FILES)
def test_text_is_decompressed_by_its_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for place in (tmp_path, tmp_path / name):
        source = open_ids(place)
        assert (source.num_rows, len(source.ids)) == (2, 2)
        assert [row["prompt"] for row in rows_of(source, "prompt")] == ["a", "b"]
    if name.endswith((".gz", ".bz2", ".zst")):
        (tmp_path / name).write_bytes(content[:-4])
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            open_ids(tmp_path)


@pytest.mark.parametrize(
    "text", ['[{"id": 1}]', '[\n{"id": 1}\n]', '\n{\n "id": 1\n}\n', '[ {\n"id":']
)
def test_json_that_is_not_lines_is_refused_with_what_to_do(tmp_path, text):
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"{name} is JSON, but not JSON lines.* jq -c"):
            open_ids(tmp_path / name)


def test_facts_beside_the_files_of_a_directory_are_no_rows(tmp_path):
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    assert [file.name for file in find_files(str(tmp_path))] == ["a.jsonl"]
    assert len(find_files(f"{tmp_path}/*.json*")) == 2


def test_ids_that_json_lines_cannot_hold_are_refused_before_the_first_run():
    for kind in (pa.string(), pa.large_string(), pa.int32(), pa.uint64(), pa.float64()):
        check_id_of_lines(kind, "key")
    for kind in (
        pa.timestamp("us"),
        pa.date32(),
        pa.decimal128(5, 2),
        pa.binary(),
        pa.time64("us"),
    ):
        with pytest.raises(ConfigError, match=r"'key' .* JSON lines cannot hold; write parquet"):
            check_id_of_lines(kind, "key")
