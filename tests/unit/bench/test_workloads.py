"""Workloads of the benchmark: the job that is planned for is the one that runs."""

import pytest

from raymoe.bench.workloads import WORKLOADS, make_prompts


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_planned_rows_are_the_prompts(name: str) -> None:
    rows = WORKLOADS[name]
    prompts = make_prompts(rows, vocab_size=1000)
    assert rows.job.row_lengths == tuple((len(prompt), rows.generated_tokens) for prompt in prompts)
    assert rows.job.num_rows == rows.num_rows
