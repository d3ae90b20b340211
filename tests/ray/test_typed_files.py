"""Files of answers as structs: a thousand invoices through Ray, and what others read of them."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest
import ray.data

import raymoe
from tests.integration.test_cli_generate import generate, read_lines, write_lines
from tests.integration.test_typed_rows import MODEL, PARAMS, check, rows
from tests.invoices import Invoice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's and others' own code
]


@pytest.fixture(scope="module")
def written(local_ray, tmp_path_factory):
    """A directory of parquet files, and the rows in it in the order of their ids."""
    directory = tmp_path_factory.mktemp("invoices")
    ds = ray.data.from_items(rows(1000))
    ds = raymoe.generate(ds, MODEL, output_schema=Invoice, id_column="id", **PARAMS)
    ds.write_parquet(str(directory))
    return directory, pq.read_table(directory).sort_by("id")


def test_each_row_has_its_value_or_says_why_not(written):
    directory, table = written
    types = {pq.read_schema(path).field("parsed") for path in directory.glob("*.parquet")}
    assert len(types) == 1
    assert table.column("id").to_pylist() == list(range(1000))
    assert 500 < sum(map(check, table.to_pylist())) < 900


def prices(table):
    """The sum of all prices by currency."""
    sums = {}
    for invoice in filter(None, table.column("parsed").to_pylist()):
        sums.setdefault(invoice["currency"], []).extend(one["price"] for one in invoice["items"])
    return {currency: pytest.approx(sum(found)) for currency, found in sums.items()}


def test_pandas_reads_the_structs(written):
    directory, table = written
    frame = pd.read_parquet(directory)
    found = frame["parsed"].dropna()
    assert len(frame) - len(found) == table.column("parsed").null_count
    items = pd.json_normalize(
        [{**one, "items": list(one["items"])} for one in found], "items", "currency"
    )
    assert items.groupby("currency")["price"].sum().to_dict() == prices(table)


def test_duckdb_reads_the_structs(written):
    duckdb = pytest.importorskip("duckdb")
    directory, table = written
    found = duckdb.sql(
        "select invoice.currency, sum(item.price) from (select parsed invoice, "
        f"unnest(parsed['items']) item from '{directory}/*.parquet') group by all"
    ).fetchall()
    assert dict(found) == prices(table)


def test_daft_reads_the_structs(written):
    daft = pytest.importorskip("daft")
    directory, table = written
    frame = daft.read_parquet(f"{directory}/*.parquet").where(daft.col("parsed").not_null())
    assert frame.count_rows() == 1000 - table.column("parsed").null_count
    parsed = daft.col("parsed")
    items = frame.select(parsed["currency"].alias("currency"), parsed["items"].alias("item"))
    items = items.explode("item").with_column("price", daft.col("item")["price"])
    found = items.groupby("currency").agg(daft.col("price").sum()).to_pydict()
    assert dict(zip(found["currency"], found["price"], strict=True)) == prices(table)


CLASS = """
from typing import Literal
from pydantic import BaseModel

class Day(BaseModel):
    month: Literal["May", "June"]
    is_late: bool | None = None
"""


def test_the_command_writes_the_same_values_as_parquet_and_as_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "days.py").write_text(CLASS)
    lines = [json.dumps({"id": i, "prompt": f"day {i}" if i else None}) for i in range(6)]
    path = write_lines(tmp_path / "in.jsonl", *lines)
    compact = json.dumps({"structured_outputs": {"disable_any_whitespace": True}})
    same = ("--model", MODEL, "--input", path, "--id-column", "id", "--max-tokens", 60,
            "--temperature", 0, "--sampling-params", compact, "--output-schema")  # fmt: skip
    first = generate(*same, "days:Day", "--output", "out", "--limit", 4)
    assert first.returncode == 0, first.stderr
    assert generate(*same, "days:Day", "--output", "out", "--resume").returncode == 0
    assert generate(*same, "days:Day", "--output", "out.jsonl").returncode == 0
    names = ("id", "parsed", "parsed_error")
    found = pq.read_table(tmp_path / "out").select(names).sort_by("id").to_pylist()
    read = sorted(read_lines(tmp_path / "out.jsonl"), key=lambda row: row["id"])
    assert [{name: row[name] for name in names} for row in read] == found
    assert found[0]["parsed_error"].startswith("ValueError: column 'prompt'")
    assert {row["parsed"]["month"] for row in found[1:] if row["parsed"]} <= {"May", "June"}
    assert any(row["parsed"] for row in found)
    shown = generate(*same, "days:Day", "--output", "no", "--dry-run", "--max-tokens", 3).stdout
    assert "not parsed: cut by max_tokens at $" in shown
    for wrong, why in (("days:Night", "no attribute 'Night'"), ("none:Day", "No module named"),
                       ("days.json", "days.json")):  # fmt: skip
        refused = generate(*same, wrong, "--output", "none")
        assert refused.returncode == 2
        assert why in refused.stderr
