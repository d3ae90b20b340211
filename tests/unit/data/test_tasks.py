"""Rows of tasks: prompts and continuations as Ray's tensors, and cells that nothing can read."""

import numpy as np
import pyarrow as pa
import pytest
from ray.data.extensions import ArrowTensorArray

from raymoe.config import SamplingParams
from raymoe.data.rows import RowReader
from raymoe.data.tasks import TaskReader
from raymoe.engine.tasks.rows import TaskOptions


def read(table: pa.Table, **options):
    rows = RowReader(defaults=SamplingParams(max_tokens=1))
    return TaskReader(rows=rows, options=TaskOptions(**options)).read(table)


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray itself


def tensors(*cells: object) -> pa.Array:
    return ArrowTensorArray.from_numpy([np.array(cell, np.int64) for cell in cells])


def test_scores_of_tensors_with_the_token_0_alone():
    table = pa.table({"prompt": tensors([0], [0]), "continuation": tensors([5, 6], [0, 7])})
    for request, scored in zip(read(table, task="score"), ([5, 6], [0, 7]), strict=True):
        assert (request.prompt, request.continuations) == ([0], (scored,))


def test_tensors_of_other_lengths_and_none():
    table = pa.table({"prompt": tensors([0], [], [1, 2]), "continuation": ["a", "b", "c"]})
    requests = read(table, task="score")
    assert [request.prompt for request in requests] == [[0], [], [1, 2]]
    assert [request.column for request in requests] == ["prompt", "continuation", "prompt"]


@pytest.mark.parametrize("cell", [0, 0.0, False])
def test_a_prompt_that_is_a_number_is_no_document(cell):
    (request,) = read(pa.table({"prompt": [cell], "continuation": ["a"]}), task="score")
    assert request.prompt is None
    assert "it takes text or a list of token ids" in request.error


def test_labels_that_are_tensors_or_have_surrogates_are_error_rows():
    labels = ['["a", "b"]', r'["\ud800", "b"]', "[" * 100_000, '["a", 1e999]']
    table = pa.table({"prompt": ["x"] * 4, "labels": labels})
    good, *bad = read(table, task="classify", labels=["yes", "no"])
    assert good.continuations == ("a", "b")
    assert [bool(request.error) for request in bad] == [True] * 3
    table = pa.table({"prompt": ["x"], "labels": tensors([1, 2])})
    (request,) = read(table, task="classify", labels=["yes", "no"])
    assert "labels" in request.error


def test_whatever_a_cell_does_is_the_error_of_its_row(monkeypatch):
    table = pa.table({"prompt": ["a", "bad", "c"], "continuation": ["x", "x", "x"]})
    original = RowReader._read_prompt

    def broken(self, row):
        if row.prompt == "bad":
            raise OverflowError("\ud800")
        return original(self, row)

    monkeypatch.setattr(RowReader, "_read_prompt", broken)
    first, bad, last = read(table, task="score")
    assert (first.prompt, last.prompt) == ("a", "c")
    assert bad.error == "OverflowError: \\ud800"
