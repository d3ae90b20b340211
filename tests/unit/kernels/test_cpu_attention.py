"""Which tokens of a step are whose, and what of them is of a prompt."""

import torch

from raymoe.kernels.cpu_attention import AttentionBatch

PROMPTS = torch.tensor([5, 40, 9, 30], dtype=torch.int32)


def batch(prompt_tokens: torch.Tensor | None = PROMPTS) -> AttentionBatch:
    """A generated token; the rest of a prompt; one and its continuation again; a first chunk."""
    return AttentionBatch(
        query_start=torch.tensor([0, 1, 4, 16, 26], dtype=torch.int32),
        context_tokens=torch.tensor([8, 40, 12, 10], dtype=torch.int32),
        block_table=torch.arange(8, dtype=torch.int32).view(4, 2),
        prompt_tokens=prompt_tokens,
    )


def test_new_tokens_of_a_prompt_come_before_those_that_were_generated() -> None:
    assert batch().num_new.tolist() == [1, 3, 12, 10]
    assert batch().num_new_of_prompts.tolist() == [0, 3, 9, 10]
    assert batch(None).num_new_of_prompts.tolist() == [0, 3, 12, 10]


def test_a_cut_has_some_tokens_of_each_sequence_and_their_contexts() -> None:
    whole = batch()
    split = torch.tensor([0, 3, 9, 4])
    rows, first = whole.cut(torch.zeros_like(split), split)
    assert rows.tolist() == [1, 2, 3, *range(4, 13), *range(16, 20)]
    assert first.query_start.tolist() == [0, 3, 12, 16]
    assert first.context_tokens.tolist() == [40, 9, 4]
    assert first.block_table.tolist() == [[2, 3], [4, 5], [6, 7]]
    rows, rest = whole.cut(split, whole.num_new)
    assert rows.tolist() == [0, 13, 14, 15, *range(20, 26)]
    assert rest.query_start.tolist() == [0, 1, 4, 10]
    assert rest.context_tokens.tolist() == [8, 12, 10]
    assert rest.query_start.dtype == rest.context_tokens.dtype == torch.int32
    rows, none = whole.cut(split, split)
    assert len(rows) == len(none.context_tokens) == 0


def test_tokens_of_later_chunks_are_sequences_that_begin_with_their_chunk() -> None:
    table = torch.arange(20, dtype=torch.int32).view(4, 5)
    step = AttentionBatch(
        query_start=torch.tensor([0, 1, 71, 71, 73], dtype=torch.int32),
        context_tokens=torch.tensor([129, 100, 70, 65], dtype=torch.int32),
        block_table=table,
    )
    chunked = step.in_chunks(64)
    # Positions 128; 30 to 63 and 64 to 99; none; 63 and 64.
    assert chunked.query_start.tolist() == [0, 1, 35, 71, 71, 72, 73]
    assert chunked.context_tokens.tolist() == [1, 64, 36, 6, 64, 1]
    assert chunked.block_table.tolist() == [
        *([4, 4], [5, 6], [7, 8]),
        *([12, 13], [15, 16], [17, 18]),
    ]
    assert step.in_chunks(192).context_tokens.tolist() == step.context_tokens.tolist()
