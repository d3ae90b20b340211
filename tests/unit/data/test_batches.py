"""Batches of each format of Ray Data: read alike, and given back as they came."""

import datetime
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raymoe.data.batches import check_format, column_names, num_rows, with_columns
from raymoe.data.rows import BadCell, read_cells, row_key
from raymoe.errors import ConfigError

COLUMNS = {
    "text": pa.array(["a", None, "ü"]),
    "bytes": pa.array([b"a", None, b"\xff"]),
    "ids": pa.array([[1, 2], None, []], pa.list_(pa.int32())),
    "same_length": pa.array([[1, 2], [3, 4], [5, 6]]),
    "number": pa.array([1, None, 3]),
    "struct": pa.array([{"a": 1, "b": [{"c": "x"}]}, None, {"a": None, "b": []}]),
    "chat": pa.array([[{"role": "user", "content": "x"}], None, []]),
    "map": pa.array([[("n", 2)], None, [("n", 3)]], pa.map_(pa.string(), pa.int64())),
    "flag": pa.array([True, False, True]),
    "time": pa.array([datetime.datetime(2026, 1, 2), None, None], pa.timestamp("us")),
}
TABLE = pa.table(COLUMNS)


def as_numpy(table):
    """As Ray Data makes batches of NumPy."""
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


FORMATS = {
    "numpy": as_numpy,
    "pandas": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "pandas of NumPy": lambda table: table.to_pandas(),
    "pyarrow": lambda table: table,
}


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_cells_of_every_format_are_those_of_arrow(make):
    batch = make(TABLE)
    check_format(batch)
    assert (column_names(batch), num_rows(batch)) == (TABLE.column_names, 3)
    for name in TABLE.column_names:
        assert read_cells(batch, name) == read_cells(TABLE, name), name
    assert read_cells(batch, "absent") == [None] * 3


TIME = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
IDS = {
    "whole floats": pa.array([1.0, 2.0]),
    "floats": pa.array([1.5, 2.0]),
    "dates": pa.array([TIME.date()]),
    "dates in ms": pa.array([TIME.date()], pa.date64()),
    "seconds": pa.array([TIME.replace(microsecond=0)], pa.timestamp("s")),
    "microseconds": pa.array([TIME], pa.timestamp("us")),
    "nanoseconds": pa.array([1], pa.timestamp("ns")),
    "zones": pa.array([TIME], pa.timestamp("us", "Europe/Berlin")),
    "durations": pa.array([datetime.timedelta(days=1, microseconds=5)]),
    "times of a day": pa.array([TIME.time()]),
    "booleans": pa.array([True]),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_an_id_has_one_key_in_every_format(ids):
    table = pa.table({"id": ids})
    batches = [make(table) for make in FORMATS.values()]
    cells = np.empty(len(ids), object)
    cells[:] = ids.to_pylist()
    batches.append({"id": cells})  # as Ray Data makes columns of Python's own times
    if pa.types.is_date(ids.type):
        batches.append({"id": cells.astype("M8[D]")})
    keys = [[row_key(cell) for cell in read_cells(batch, "id")] for batch in batches]
    assert keys == [keys[0]] * len(keys)
    assert None not in keys[0]


class _Unreadable(Mapping):
    """A cell that fails when it is read."""

    def __getitem__(self, key):
        raise KeyError(key)

    def __iter__(self):
        return iter(["a"])

    def __len__(self):
        return 1


def test_a_cell_that_cannot_be_read_is_bad_and_the_others_are_read():
    cells = np.array(["a", None], object)
    cells[1] = _Unreadable()
    text, bad = read_cells({"prompt": cells}, "prompt")
    assert text == "a"
    assert bad == BadCell("KeyError", "cannot be read: \"'a'\"")


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_a_batch_without_rows_has_cells_of_no_row(make):
    batch = make(TABLE.slice(0, 0))
    assert num_rows(batch) == 0
    assert read_cells(batch, "text") == []


def test_a_cell_does_not_depend_on_its_neighbours():
    mixed = np.array(["a", 5, None, [1, 2], {"k": np.int32(3)}], object)
    assert read_cells({"x": mixed}, "x") == ["a", 5, None, [1, 2], {"k": 3}]
    assert read_cells({"x": np.ones((2, 3), np.int64)}, "x") == [[1, 1, 1]] * 2
    large = np.array([2.0**60, np.nan, 1.5, 4.0])  # whole numbers with a null among them
    assert read_cells({"x": large}, "x") == [2.0**60, None, 1.5, 4]
    assert [type(cell) for cell in read_cells({"x": large}, "x")][-1] is int


def test_a_cell_that_is_nested_too_deeply_is_bad_and_the_others_are_read():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    cells = np.empty(2, object)
    cells[:] = [deep, "a"]
    bad, good = read_cells({"x": cells}, "x")
    assert isinstance(bad, BadCell)
    assert good == "a"


ADDED = {
    "text": pa.array(["x", "", "y"]),
    "tokens": pa.array([[1], [], [2, 3]], pa.list_(pa.int32())),
    "count": pa.array([1, 0, 2], pa.int32()),
    "calls": pa.array([[{"name": "f"}], [], []], pa.list_(pa.struct([("name", pa.string())]))),
}


def test_columns_are_added_in_the_format_of_the_batch():
    table = pa.table({"prompt": ["a", "b", "c"]})
    arrow = with_columns(table, ADDED)
    assert arrow.schema == pa.schema([*table.schema, *((n, a.type) for n, a in ADDED.items())])

    given = {"prompt": np.array(["a", "b", "c"], object)}
    numpy = with_columns(given, ADDED)
    assert numpy["prompt"] is given["prompt"]
    assert given.keys() == {"prompt"}
    assert {type(values) for values in numpy.values()} == {np.ndarray}
    assert numpy["count"].dtype == np.int32
    assert {name: list(numpy[name]) for name in ADDED} == {
        n: a.to_pylist() for n, a in ADDED.items()
    }

    frame = pd.DataFrame({"prompt": ["a", "b", "c"]}, index=[7, 8, 9])
    pandas = with_columns(frame, ADDED)
    assert list(frame.columns) == ["prompt"]
    assert list(pandas.index) == [7, 8, 9]
    for name, array in ADDED.items():
        assert pandas[name].dtype == pd.ArrowDtype(array.type)
        assert pandas[name].tolist() == array.to_pylist()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (["a"], "the batch is a list; MoEGenerator takes a dict of arrays"),
        ({"prompt": "a"}, "column 'prompt' of the batch is a str; it takes an array"),
        ({"prompt": ["a"], "id": [1, 2]}, "different numbers of rows: 'prompt' 1, 'id' 2"),
    ],
)
def test_what_is_no_batch_is_refused(batch, message):
    with pytest.raises(ConfigError, match=message):
        check_format(batch)
