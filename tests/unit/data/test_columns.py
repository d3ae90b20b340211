"""Samples as rows: each once, in order, with everything of its row and its own."""

import pyarrow as pa
import pytest

import raymoe
from raymoe.config import SamplingParams
from raymoe.data.columns import OutputColumns, explode_samples
from raymoe.engine.outputs import Generation, TokenLogprob
from raymoe.errors import ConfigError
from raymoe.output_schema import OutputSchema


def generation(text, *others, **fields):
    tokens = tuple(range(len(text)))
    more = tuple(generation(other) for other in others)
    fields = {"finish_reason": "length", **fields}
    return Generation(
        text=text, token_ids=tokens, num_generated_tokens=len(text), others=more, **fields
    )


def answered(params, *generations, **columns):
    """What the operator returns."""
    defaults = SamplingParams.from_dict(params)
    return OutputColumns.of(defaults, has_choices=True).append(pa.table(columns), generations)[0]


def test_each_sample_is_a_row_with_the_columns_of_its_row():
    table = answered(
        {"n": 2},
        generation("a", "bb", num_input_tokens=5),
        generation("", finish_reason="error", error="ValueError: no"),
        generation("c", "dd", "eee", num_input_tokens=7),
        id=["x", "y", "z"],
        messages=[[{"role": "user"}], None, []],
    )
    assert table.column("num_generated_tokens").to_pylist() == [3, 0, 6]  # of all samples
    exploded = raymoe.explode_samples(table)
    found = {name: exploded.column(name).to_pylist() for name in exploded.column_names}
    assert found["id"] == ["x", "x", "y", "z", "z", "z"]
    assert found["messages"] == [[{"role": "user"}]] * 2 + [None] + [[]] * 3
    assert found["generated_text"] == ["a", "bb", "", "c", "dd", "eee"]
    assert found["generated_tokens"] == [[0], [0, 1], [], [0], [0, 1], [0, 1, 2]]
    assert found["num_generated_tokens"] == [1, 2, 0, 1, 2, 3]
    assert found["num_input_tokens"] == [5, 5, 0, 7, 7, 7]
    assert found["finish_reason"] == ["length"] * 2 + ["error"] + ["length"] * 3
    assert found["__inference_error__"] == ["", "", "ValueError: no", "", "", ""]
    assert found["sample_index"] == [0, 1, 0, 0, 1, 2]
    assert found["num_samples"] == [2, 2, 1, 3, 3, 3]
    assert found["logprobs"] == [None] * 6
    assert not {"choices", "generated_texts"} & found.keys()


def test_log_probabilities_are_those_of_the_sample():
    first, second = (TokenLogprob(token_id=one, logprob=-one) for one in (1, 2))
    others = (Generation(text="b", logprobs=(second,)),)
    row = Generation(text="a", logprobs=(first,), others=others)
    exploded = explode_samples(answered({"logprobs": 0, "n": 2}, row, id=[1]))
    cells = exploded.column("logprobs").to_pylist()
    assert [[one["token_id"] for one in cell] for cell in cells] == [[1], [2]]


def test_the_schema_is_the_same_without_rows_and_over_chunks():
    table = answered({"n": 2}, generation("a", "b"), id=[1])
    schema = explode_samples(table).schema
    assert explode_samples(table.slice(0, 0)).schema == schema
    assert explode_samples(table.schema.empty_table()).schema == schema
    twice = explode_samples(pa.concat_tables([table, table]))
    assert twice.schema == schema
    assert twice.column("sample_index").to_pylist() == [0, 1, 0, 1]
    assert explode_samples(pa.concat_tables([table, table]).slice(1)).num_rows == 2


def test_what_has_no_samples_or_is_exploded_already_is_refused():
    table = answered({}, generation("a"), id=[1])
    with pytest.raises(ConfigError, match=r"no column 'choices'; set has_choices=True"):
        explode_samples(table.drop_columns("choices"))
    with pytest.raises(ConfigError, match="has a column 'sample_index'"):
        explode_samples(explode_samples(table))
    index = table.column_names.index("choices")
    empty = table.set_column(index, "choices", pa.array([[]], table.schema.field(index).type))
    with pytest.raises(ConfigError, match="a row without a sample"):
        explode_samples(empty)


def test_a_row_that_its_columns_cannot_hold_has_no_value_and_says_why():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    columns = OutputColumns.of(SamplingParams(), schema=OutputSchema.of(schema))
    generations = [Generation(text=text, parsed={"a": 1}) for text in ("\ud800", "{}")]
    table, _ = columns.append(pa.table({"x": [1, 2]}), generations)
    bad, good = table.to_pylist()
    assert bad["parsed"] is None
    assert bad["parsed_error"] == bad["__inference_error__"]
    assert "filling the column 'generated_text'" in bad["parsed_error"]
    assert (good["parsed"], good["parsed_error"]) == ({"a": 1}, None)
