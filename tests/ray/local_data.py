"""As much of `ray.data` as the ported scripts call, in this process: rows pass Arrow in between."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from raymoe import Engine, EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.specs.files import read_chat_template

Row = dict[str, Any]


def through_arrow(rows: list[Row]) -> list[Row]:
    """Return rows as Ray's tasks get them: with the keys of all, as far as Arrow can hold them."""
    try:
        return pa.Table.from_pylist(rows).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return rows  # Ray pickles them


@functools.cache
def open_engine(model: str, head: str, max_model_len: int | None) -> Engine:
    """Return an engine that all scripts share."""
    return Engine.from_pretrained(
        model, {"linger_s": 0.0, "device": "cpu", "head": head, "max_model_len": max_model_len}
    )


class Generator(MoEGenerator):
    """Our operator, with such an engine."""

    def _open_engine(self, model_source: str | Path, config: EngineConfig) -> Engine:
        engine = open_engine(str(model_source), config.head, config.max_model_len)
        self._template = read_chat_template(engine.directory)
        return engine

    def close(self) -> None:
        self._engine = None
        super().close()


class Dataset:
    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def map(self, function: Callable[..., Row], **_: Any) -> "Dataset":
        return Dataset(through_arrow([function(row) for row in self.rows]))

    def flat_map(self, function: Callable[..., list[Row]]) -> "Dataset":
        return Dataset(through_arrow([one for row in self.rows for one in function(row)]))

    def generate(self, model: str, options: Row) -> "Dataset":
        """Do what `raymoe.data.processor._generated` has Ray's actors do."""
        pool = ("batch_size", "accelerator_type", "runtime_env", "num_actors", "min_actors",
                "rows_in_flight", "num_cpus", "num_gpus", "resources")  # fmt: skip
        of_rows = {name: value for name, value in options.items() if name not in pool}
        generator = Generator(model, **of_rows)
        return Dataset(generator(pa.Table.from_pylist(self.rows)).to_pylist())

    def take_all(self) -> list[Row]:
        return [dict(row) for row in self.rows]

    def take(self, limit: int) -> list[Row]:
        return self.take_all()[:limit]

    def limit(self, limit: int) -> "Dataset":
        return Dataset(self.rows[:limit])

    def materialize(self) -> "Dataset":
        return self

    def repartition(self, **_: Any) -> "Dataset":
        return self

    def select_columns(self, names: list[str]) -> "Dataset":
        return Dataset([{name: row[name] for name in names} for row in self.rows])

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def write_parquet(self, path: str) -> None:
        pq.write_table(pa.Table.from_pylist(self.rows), Path(path) / "rows.parquet")

    def write_json(self, path: str) -> None:
        lines = [json.dumps(row) + "\n" for row in self.rows]
        (Path(path) / "rows.jsonl").write_text("".join(lines))


def from_items(items: list[Any]) -> Dataset:
    return Dataset(
        through_arrow([one if isinstance(one, dict) else {"item": one} for one in items])
    )


def range(count: int) -> Dataset:  # noqa: A001 - Ray's name
    return Dataset([{"id": i} for i in [*pd.RangeIndex(count)]])


def from_pandas(frame: pd.DataFrame) -> Dataset:
    return Dataset(pa.Table.from_pandas(frame, preserve_index=False).to_pylist())


def read_text(path: str) -> Dataset:
    return Dataset([{"text": line} for line in Path(path).read_text().splitlines()])


def read_csv(path: str) -> Dataset:
    return from_pandas(pd.read_csv(path))


def read_parquet(path: str) -> Dataset:
    return Dataset(pq.read_table(path).to_pylist())


def read_json(path: str) -> Dataset:
    lines = (Path(path) / "rows.jsonl").read_text().splitlines()
    return Dataset([json.loads(line) for line in lines])
