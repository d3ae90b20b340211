"""Answers as structs: the engine, the operator, files and what reads them, on the demo model."""

import asyncio
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raymoe
from raymoe.data.generator import output_columns
from raymoe.data.journal import journal_files
from raymoe.data.sizing import _for_nodes
from raymoe.errors import ConfigError
from tests.invoices import ARROW, Invoice

MODEL = raymoe.demo_model_path()
ENDS = 400  # tokens, each a character: every invoice is shorter
PARAMS = {
    "max_tokens": ENDS, "temperature": 1.0, "structured_outputs": {"disable_any_whitespace": True},
}  # fmt: skip


def rows(count):
    """Rows of which each third is cut somewhere, and each tenth has no prompt."""
    return [
        {
            "id": i,
            "prompt": None if i % 10 == 9 else f"invoice {i}",
            "sampling_params": json.dumps({"max_tokens": 20 + i % 80 if i % 3 == 2 else ENDS}),
        }
        for i in range(count)
    ]


def check(row):
    """Return whether a row has a value, which is that of its text, or else says why."""
    if row["parsed"] is None:
        is_bad = row["prompt"] is None
        assert row["parsed_error"].startswith(
            "ValueError: column 'prompt'" if is_bad else "cut by max_tokens at $"
        )
        assert is_bad or row["finish_reason"] == "length"
        return False
    assert row["parsed_error"] is None
    value = json.loads(row["generated_text"])
    assert Invoice.model_validate(value)
    for item in row["parsed"]["items"]:
        item["tags"] = list(item["tags"])
        assert {name: one for name, one in item.items() if one is not None} in value["items"]
    assert {name: row["parsed"][name] for name in value} | {"items": value["items"]} == value
    return True


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    return tmp_path_factory.mktemp("journal")


def make_generator(journal):
    return raymoe.MoEGenerator(
        MODEL, sampling_params=PARAMS, output_schema=Invoice, id_column="id", has_choices=True,
        journal_dir=journal,
    )  # fmt: skip


@pytest.fixture(scope="module")
def generator(journal):
    generator = make_generator(journal)
    yield generator
    generator.close()


def test_the_engine_returns_instances_of_the_class_or_says_why_not(generator):
    engine = generator._engine
    params = [{**PARAMS, "max_tokens": max_tokens} for max_tokens in (ENDS, 30)]
    whole, cut = engine.generate(["a", "b"], params, output_schema=Invoice)
    (again,) = asyncio.run(engine.agenerate(["a"], params[0], output_schema=Invoice))
    (plain,) = engine.generate(["a"], PARAMS, output_schema=Invoice.model_json_schema())
    with pytest.raises(ConfigError, match="contradict each other"):
        engine.generate(["a"], {"structured_outputs": {"regex": "a"}}, output_schema=Invoice)
    (none,) = engine.generate(["a"], {"max_tokens": 2})
    assert whole.parsed == Invoice.model_validate_json(whole.text) == again.parsed
    assert isinstance(plain.parsed, dict)
    assert Invoice.model_validate(plain.parsed) == whole.parsed
    assert (cut.parsed, cut.finish_reason) == (None, "length")
    assert cut.parsed_error.startswith("cut by max_tokens at $")
    assert (none.parsed, none.parsed_error) == (None, "")


def test_blocks_have_one_schema_and_rows_their_values(generator, tmp_path):
    table = pa.Table.from_pylist(rows(30))
    out = generator(table)
    assert str(out.schema.field("parsed").type) == ARROW
    assert 15 < sum(map(check, out.to_pylist())) < 25
    bad = generator(table.slice(9, 1))
    assert bad.schema == out.schema
    assert bad.column("parsed").null_count == 1
    pq.write_table(pa.concat_tables([bad, out]), tmp_path / "a.parquet")
    read = pq.read_table(tmp_path / "a.parquet")
    assert read.schema.field("parsed").type == out.schema.field("parsed").type
    assert read.column("parsed").to_pylist()[1:] == out.column("parsed").to_pylist()


def test_batches_of_pandas_and_numpy_have_the_same_values(generator):
    table = pa.Table.from_pylist(rows(6))
    expected = generator(table).column("parsed").to_pylist()
    frame = generator(table.to_pandas())
    assert frame["parsed"].dtype == pd.ArrowDtype(generator(table).schema.field("parsed").type)
    assert pa.array(frame["parsed"]).to_pylist() == expected
    arrays = {name: table.column(name).to_numpy() for name in table.column_names}
    assert list(generator(arrays)["parsed"]) == expected


def test_a_job_that_goes_on_finds_the_values_of_its_journal(generator, journal):
    table = pa.Table.from_pylist(rows(12))
    first = generator(table)
    sizes = [file.stat().st_size for file in journal_files(journal)]
    again = make_generator(journal)
    try:
        assert again(table).column("parsed") == first.column("parsed")
        assert [file.stat().st_size for file in journal_files(journal)][: len(sizes)] == sizes
    finally:
        again.close()
    with pytest.raises(ConfigError, match="structured_outputs"):
        raymoe.MoEGenerator(MODEL, sampling_params={"max_tokens": ENDS}, journal_dir=journal)


def test_each_sample_has_a_value_of_its_own(generator):
    three = json.dumps({"n": 3})
    table = pa.table({"id": [1, 2], "prompt": ["x", None], "sampling_params": [three] * 2})
    samples = raymoe.explode_samples(generator(table)).to_pylist()
    assert [sample["sample_index"] for sample in samples] == [0, 1, 2, 0]
    assert len({str(sample["parsed"]) for sample in samples}) == 4
    assert [check(sample) for sample in samples] == [True, True, True, False]


def test_a_row_may_have_a_constraint_of_its_own_and_is_checked_all_the_same(generator):
    forms = [{"choice": ["no"]}, {"json": {"type": "object", "properties": {}}}]
    params = [json.dumps({"structured_outputs": form}) for form in forms]
    table = generator(pa.table({"id": [1, 2], "prompt": ["x"] * 2, "sampling_params": params}))
    text, other = table.column("parsed_error").to_pylist()
    assert text.startswith("$: no JSON: ")
    assert other.startswith(("$: ", "cut by max_tokens at $"))
    assert table.column("parsed").null_count == 2


def test_actors_get_a_schema_instead_of_the_class_of_the_user(generator):
    options = _for_nodes({"output_schema": Invoice})
    assert isinstance(options["output_schema"], dict)
    columns = output_columns(MODEL, {**options, "has_choices": True})
    assert columns == output_columns(MODEL, {"output_schema": Invoice, "has_choices": True})
    assert columns == generator._columns


def test_two_constraints_of_a_job_contradict_each_other():
    with pytest.raises(ConfigError, match="output_schema and structured_outputs contradict"):
        raymoe.generate(None, MODEL, output_schema=Invoice, json_schema={"type": "object"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_schema": {"type": "object"}}, "an object with properties of any name at $"),
        ({"task": "embed"}, "output_schema has no meaning for the task 'embed'"),
        ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, "contradict each other"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(options, message, tmp_path):
    options = {"output_schema": Invoice, **options}
    for refuse in (
        lambda: raymoe.MoEGenerator(tmp_path, **options),
        lambda: raymoe.map_batches_kwargs(tmp_path, **options),
    ):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert message in str(error.value)
