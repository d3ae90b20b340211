"""Batches as Ray Data gives them: arrays by name, pandas frames or Arrow tables.

Each cell is read by itself, so that the format does not change what a row is, nor do the other rows
of its batch.
"""

import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raymoe.errors import ConfigError
from raymoe.units import MAX_EXACT_FLOAT


def check_format(batch: object) -> None:
    """Refuse what is no batch of rows.

    Raises:
        ConfigError: It is neither a table, a frame nor a mapping of arrays of equal length.
    """
    if isinstance(batch, pa.Table) or _is_frame(batch):
        return
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"the batch is a {type(batch).__name__}; MoEGenerator takes a dict of arrays, a pandas "
            "DataFrame or an Arrow table: batch_format 'numpy', 'pandas' or 'pyarrow'"
        )
    lengths = {name: _length(name, values) for name, values in batch.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise ConfigError(f"the columns of the batch have different numbers of rows: {shown}")


def column_names(batch: Any) -> list[str]:
    return list(batch.column_names) if isinstance(batch, pa.Table) else [str(one) for one in batch]


def num_rows(batch: Any) -> int:
    if isinstance(batch, pa.Table):
        return int(batch.num_rows)
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values()), ()))
    return len(batch)


def plain_cells(values: Any) -> list[Any]:
    """Return the cells of a column of NumPy or pandas as Arrow has them in Python.

    Missing values are None. Whole numbers with missing values come as floats, so whole floats are
    integers again; the exception is one that is too large to be exact, which stays a float.
    """
    cells = [plain_cell(value) for value in values]
    dtype = getattr(values, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind != "f":
        return cells
    return [_as_integer(cell) if isinstance(cell, float) else cell for cell in cells]


def plain_cell(value: Any) -> Any:
    """Return a cell as Python has it: lists, dicts, text, numbers; None for a missing value."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        value = _time(value) if value.dtype.kind in "mM" else value.item()
    if _is_missing(value):
        return None
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OmM":
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain_cell(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        cells = [plain_cell(item) for item in value]
        return dict(cells) if cells and all(_is_entry(item) for item in value) else cells
    return value


def _time(value: Any) -> Any:
    """Return a time of NumPy as Arrow has it: a date, a time in microseconds, or pandas' own."""
    kind = value.dtype.kind
    if np.isnat(value) or np.datetime_data(value.dtype)[0] in "YMWD":
        return value.item()
    coarse = value.astype(f"{kind}8[us]")
    return coarse.item() if coarse == value else pa.scalar(value.astype(f"{kind}8[ns]")).as_py()


def as_identity(value: Any) -> Any:
    """Return the same value for an id, whichever format of batches has it.

    NumPy makes whole numbers with missing values floats, dates times, and times those of UTC;
    pandas has types of its own for times.
    """
    if isinstance(value, float):
        return _as_integer(value)
    if isinstance(value, datetime.timedelta):
        nanoseconds = getattr(value, "nanoseconds", 0)  # of pandas
        plain = datetime.timedelta(value.days, value.seconds, value.microseconds)
        return value if nanoseconds else plain
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        return value if getattr(value, "nanosecond", 0) else _plain_datetime(value)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day)
    return value


def _plain_datetime(value: datetime.datetime) -> datetime.datetime:
    return datetime.datetime.combine(value.date(), value.time())


def with_columns(batch: Any, columns: Mapping[str, pa.Array]) -> Any:
    """Return the batch with more columns, in its own format.

    In NumPy's, lists and structs are Python objects. In that of pandas, the types are Arrow's, as
    in what Ray Data converts itself.
    """
    if isinstance(batch, pa.Table):
        for name, array in columns.items():
            batch = batch.append_column(name, array)
        return batch
    if isinstance(batch, Mapping):
        return {**batch, **{name: _as_numpy(array) for name, array in columns.items()}}
    pd = sys.modules["pandas"]  # which made the batch
    return batch.assign(
        **{
            name: pd.Series(pd.array(array, dtype=pd.ArrowDtype(array.type)), index=batch.index)
            for name, array in columns.items()
        }
    )


def _as_numpy(array: pa.Array) -> np.ndarray[Any, Any]:
    if not pa.types.is_nested(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    cells = np.empty(len(array), object)
    cells[:] = array.to_pylist()
    return cells


def _length(name: object, values: object) -> int:
    if isinstance(values, np.ndarray | Sequence) and not isinstance(values, str | bytes):
        return len(values)
    raise ConfigError(
        f"column {name!r} of the batch is a {type(values).__name__}; it takes an array"
    )


def _is_missing(value: object) -> bool:
    if value is None or value is _pandas("NA") or value is _pandas("NaT"):
        return True
    return isinstance(value, float) and bool(np.isnan(value))


def _as_integer(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < MAX_EXACT_FLOAT else value


def _is_entry(item: object) -> bool:
    """Whether this is an entry of a map column, which NumPy and pandas have as pairs."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _is_frame(batch: object) -> bool:
    frame = _pandas("DataFrame")
    return frame is not None and isinstance(batch, frame)


def _pandas(name: str) -> Any:
    """Return something of pandas; None where nobody has imported it."""
    return getattr(sys.modules.get("pandas"), name, None)
