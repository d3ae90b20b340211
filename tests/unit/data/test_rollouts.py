"""What a rollout may be, and what a plan makes of it."""

import functools
import re

import numpy as np
import pyarrow as pa
import pytest

import raymoe
from raymoe.assets import demo_model_path
from raymoe.config import SamplingParams
from raymoe.data.generator import check_options, output_columns
from raymoe.data.job_rows import content_key
from raymoe.data.rollouts import RolloutColumns, RolloutLimits, check_rollout
from raymoe.data.rows import RowReader
from raymoe.data.workload import workload_of
from raymoe.engine.outputs import Generation
from raymoe.errors import ConfigError


async def turns(row, generate):
    return {"text": (await generate(row["q"])).text}


class Agent:
    async def __call__(self, row, generate):
        return await turns(row, generate)


async def endless(row, generate):
    yield row


WRONG = [
    ({"rollout": dict}, "rollout is dict, which is no coroutine function; give `async def turns("),
    ({"rollout": Agent}, "rollout is Agent, which is no coroutine function"),
    ({"rollout": endless}, "rollout is endless, which is no coroutine function"),
    ({"rollout": turns, "prompt_column": "q"}, "prompt_column has no meaning with a rollout"),
    ({"rollout": turns, "task": "score"}, "task has no meaning with a rollout"),
    ({"rollout": turns, "output_schema": {}}, "output_schema has no meaning with a rollout"),
    ({"rollout_limits": {"calls": 3}}, "rollout_limits belongs to a rollout; give rollout too"),
    ({"calls_per_row": 3}, "calls_per_row belongs to a rollout"),
    ({"rollout": turns, "calls_per_row": 0}, "calls_per_row is 0; it must be a whole number"),
    ({"rollout": turns, "rollout_limits": 3}, "it takes a mapping, such as {'calls': 8,"),
    ({"rollout": turns, "rollout_limits": {"call": 3}}, "did you mean 'calls'?"),
    ({"rollout": turns, "rollout_limits": {"calls": 2.0}}, "calls 2.0; it takes a whole number"),
    ({"rollout": turns, "rollout_limits": {"seconds": 0}}, "seconds 0; it takes a number above 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_rollouts_are_refused_before_anything_loads(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_options(demo_model_path(), options, ["calls_per_row"])
    given = {name: value for name, value in options.items() if name != "calls_per_row"}
    if given == options:
        with pytest.raises(ConfigError, match=re.escape(message)):
            raymoe.MoEGenerator(demo_model_path(), **options)


@pytest.mark.parametrize("rollout", [turns, Agent(), functools.partial(turns)])
def test_coroutine_functions_of_every_kind_are_taken(rollout):
    check_rollout({"rollout": rollout, "rollout_limits": {"seconds": 2.5}})
    limits = RolloutLimits.of({"seconds": 2.5})
    assert (limits.calls, limits.tokens, limits.seconds) == (1000, None, 2.5)


def test_templates_and_processors_take_no_rollout():
    with pytest.raises(ConfigError, match="prompt_template has no meaning with a rollout"):
        raymoe.generate(None, "m", rollout=turns, prompt_template="{{ q }}")
    config = raymoe.MoEEngineProcessorConfig(model_source="m")
    with pytest.raises(ConfigError, match=r"give rollout to raymoe\.generate"):
        raymoe.build_processor(config, builder_kwargs={"rollout": turns})


def test_columns_of_raymoe_are_known_before_the_job():
    columns = output_columns(demo_model_path(), {"rollout": turns, "column_prefix": "a_"})
    assert columns.names >= {"a_num_calls", "a___inference_error__"}
    assert "a_generated_text" not in columns.names
    with pytest.raises(ConfigError, match="a_num_calls"):
        columns.check_names(["q", "a_num_calls"])


def test_a_row_is_all_of_its_columns_whatever_their_order_and_the_rows_beside_it():
    reader = RowReader(defaults=SamplingParams(), is_rollout=True)
    one = pa.table({"q": ["a"], "meta": [{"x": 1}]})
    other = pa.table({"meta": [{"x": 1, "y": None}, {"x": None, "y": 2}], "q": ["a", "a"]})
    (first,), (same, different) = reader.read(one), reader.read(other)
    assert first.cells == same.cells == {"q": "a", "meta": {"x": 1}}
    assert content_key(first) == content_key(same) != content_key(different)


def test_a_cell_that_cannot_be_read_makes_an_error_row():
    bad = pa.array([b"\xff", b"fine"]).cast(pa.binary()).view(pa.string())
    reader = RowReader(defaults=SamplingParams(), is_rollout=True)
    error, fine = reader.read(pa.table({"q": bad}))
    assert error.error.startswith("UnicodeDecodeError: column 'q' is not UTF-8")
    assert fine.cells == {"q": "fine"}


def test_a_plan_counts_each_call_with_the_prompt_that_the_calls_before_it_left():
    prompts = [list(range(40)), list(range(100, 170))]
    reader = RowReader(defaults=SamplingParams(max_tokens=10), is_rollout=True)
    table = pa.table({"prompt": prompts})
    found = workload_of(table, 1000, demo_model_path(), reader, 3)
    assert found.num_rows == 3000
    assert found.row_lengths == ((40, 10), (50, 10), (60, 10), (70, 10), (80, 10), (90, 10))
    assert found.shared_prompt_tokens == round((32 + 32 + 64 + 64) / 6)


def rows_of(*returned):
    return [Generation(values={"num_calls": 1, "columns": columns}) for columns in returned]


def test_columns_hold_all_rows_so_far_and_a_row_that_does_not_fit_costs_no_other():
    columns = RolloutColumns("")

    def append(*returned):
        batch = pa.table({"row": range(len(returned))})
        table, found = columns.append(batch, rows_of(*returned))
        errors = [one.error.removeprefix("TypeError: what the rollout returned ") for one in found]
        assert table["__inference_error__"].to_pylist() == [one.error for one in found]
        return table.drop_columns([*columns.names, "row"]), errors

    table, errors = append({"a": None, "b": []}, {})
    assert table.to_pylist() == [{"a": None, "b": []}, {"a": None, "b": None}]
    table, errors = append({"a": 1, "s": {"x": 1}}, {"a": 2.5, "b": ["t"], "s": {"y": [1]}})
    struct = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.int64()))])
    assert dict(zip(table.column_names, table.schema.types, strict=True)) == {
        "a": pa.float64(), "b": pa.list_(pa.string()), "s": struct,
    }  # fmt: skip
    assert errors == ["", ""]
    bad = [{"a": "text"}, {"a": 2**70}, {"a": 2**53 + 1}, {"c": "\ud800"}, {"d": [1, "x"]}]
    table, errors = append(*bad, {"a": 3, "c": True})
    assert all(one.startswith("does not fit columns that hold") for one in errors[:5])
    assert [row["a"] for row in table.to_pylist()] == [*[None] * 5, 3.0]
    assert (errors[5], table.column_names) == ("", ["a", "b", "s", "c"])


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_columns_come_in_the_format_of_the_batch(batch_format):
    table = pa.table({"row": [0]})
    batch = {"numpy": {"row": np.zeros(1)}, "pandas": table.to_pandas()}[batch_format]
    out, _ = RolloutColumns("").append(batch, rows_of({"a": None, "b": ["x"]}))
    assert list(out["b"][0]) == ["x"]
