"""Sorting by prefix in a real Ray: the same rows whatever their blocks are."""

import itertools
import json
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray.data

import raymoe
from raymoe.data.sorting import KEYS, sort_and_deal

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,  # tests/unit/data/test_sorting.py sorts without Ray
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]

NUM_ROWS, NUM_DOCUMENTS, NUM_BLOCKS = 400, 40, 5
SHARED = 200


def make_rows():
    """Questions to documents, the questions of a document far apart; some rows are broken."""
    dice = np.random.default_rng(0)
    documents = ["".join(dice.choice(list("abc "), SHARED)) for _ in range(NUM_DOCUMENTS)]
    rows = []
    for index in range(NUM_ROWS):
        prompt = documents[index % NUM_DOCUMENTS] + f" question {dice.integers(10**6)}?"
        messages = None
        if index % 10 == 3:
            prompt, messages = None, [{"role": "user", "content": prompt}]
        if index % 100 == 7:
            prompt = messages = None
        numbers = list(range(index % 4))
        rows.append({"id": index, "prompt": prompt, "messages": messages, "numbers": numbers})
    return rows


def blocks(rows):
    return [rows[start::NUM_BLOCKS] for start in range(NUM_BLOCKS)]


def as_arrow(rows):
    return ray.data.from_arrow([pa.Table.from_pylist(block) for block in blocks(rows)])


def as_pandas(rows):
    return ray.data.from_pandas([pd.DataFrame(block) for block in blocks(rows)])


def as_items(rows):
    return ray.data.from_items(rows, override_num_blocks=NUM_BLOCKS)


def counted(rows):
    return Counter(json.dumps(row, sort_keys=True, default=list) for row in rows)


def sorted_rows(dataset, **options):
    tables = list(
        raymoe.sort_by_prefix(dataset, **options).iter_batches(
            batch_size=None, batch_format="pyarrow"
        )
    )
    assert not any(set(KEYS) & set(table.column_names) for table in tables)
    return [table.to_pylist() for table in tables]


@pytest.mark.parametrize(
    "make",
    [as_arrow, as_pandas, as_items],
)
def test_the_same_rows_come_out_and_those_that_share_are_neighbours(local_ray, make):
    rows = make_rows()
    tables = sorted_rows(make(rows), rows_per_block=16)
    found = [row for table in tables for row in table]
    assert counted(found) == counted(rows)
    assert sorted(map(len, tables)) == [16] * (NUM_ROWS // 16)
    heads = [row["prompt"][:SHARED] for row in found if row["prompt"]]
    num_changes = sum(one != other for one, other in itertools.pairwise(heads))
    assert num_changes < 2 * NUM_DOCUMENTS  # 360 of 363 before


def test_equal_prompts_do_not_end_up_in_one_part(local_ray):
    """A part is held by one task: many rows that only differ far behind must spread."""
    rows = [{"id": index, "prompt": "p" * 100} for index in range(2000)]
    parts = as_items(rows).map_batches(lambda table: table, batch_format="pyarrow")
    dealt = sort_and_deal(parts, (None, "messages", "prompt"), prefix_bytes=50, rows_per_block=16)
    tables = list(dealt.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert sorted(pa.concat_tables(tables).column("id").to_pylist()) == list(range(2000))
    assert max(table.num_rows for table in tables) <= 2000 / NUM_BLOCKS * 2


def test_no_rows_are_no_problem(local_ray):
    empty = ray.data.from_arrow(
        pa.table({"id": pa.array([], "int64"), "prompt": pa.array([], "str")})
    )
    assert [row for table in sorted_rows(empty) for row in table] == []


def test_rows_without_a_prompt_column_are_refused(local_ray):
    with pytest.raises(
        ray.exceptions.RayTaskError, match="neither column 'question' nor 'messages'"
    ):
        sorted_rows(ray.data.from_items([{"id": 1, "text": "a"}]), prompt_column="question")
