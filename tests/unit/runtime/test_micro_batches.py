"""Cutting a step: every token once, micro-batches equal, shares as asked, blocks in order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.runtime.micro_batches import CutStep, Division, cut_step

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=30
)  # tokens in the step, tokens before


def make_batch(sequences: list[tuple[int, int]]) -> AttentionBatch:
    num_scheduled_tokens = [tokens for tokens, _ in sequences]
    contexts = [tokens + past for tokens, past in sequences]
    width = max(-(-context // BLOCK_TOKENS) for context in contexts)
    table = torch.arange(len(sequences) * width, dtype=torch.int32).reshape(-1, width)
    return AttentionBatch(
        query_start=torch.tensor([0, *np.cumsum(num_scheduled_tokens)], dtype=torch.int32),
        context_tokens=torch.tensor(contexts, dtype=torch.int32),
        block_table=table,
    )


def cut(
    sequences: list[tuple[int, int]],
    num_micro_batches: int,
    fraction: float = 1.0,
    blocks: int = 10**6,
) -> CutStep:
    division = Division(cpu_attention_fraction=fraction, staged_blocks=blocks)
    return cut_step(make_batch(sequences), num_micro_batches, division)


@given(SEQUENCES, st.integers(1, 6), st.floats(0, 1))
def test_every_token_is_in_one_wave_and_comes_back(
    sequences: list[tuple[int, int]], num_micro_batches: int, fraction: float
) -> None:
    done = cut(sequences, num_micro_batches, fraction)
    total = sum(tokens for tokens, _ in sequences)
    assert sorted(done.order_T.tolist()) == list(range(total))
    assert torch.equal(done.order_T[done.place_T], torch.arange(total))
    assert len(done.micro_batches) == num_micro_batches
    begin = 0
    for micro_batch in done.micro_batches:
        assert micro_batch.begin == begin
        begin = micro_batch.end
        assert (micro_batch.host.begin, micro_batch.device.end) == (0, micro_batch.num_tokens)
        assert micro_batch.host.end == micro_batch.device.begin
    assert begin == total


@given(SEQUENCES, st.integers(1, 6))
def test_no_wave_exceeds_the_mean_by_more_than_one_chunk(
    sequences: list[tuple[int, int]], num_micro_batches: int
) -> None:
    num_scheduled_tokens = [tokens for tokens, _ in sequences]
    assert cut(sequences, num_micro_batches).max_tokens <= -(
        -sum(num_scheduled_tokens) // num_micro_batches
    ) + max(num_scheduled_tokens)


def test_decoding_sequences_are_shared_and_prompts_go_to_the_device() -> None:
    sequences = [(1, 50)] * 10 + [(40, 0), (33, 31)]
    (micro_batch,) = cut(sequences, 1, fraction=0.7).micro_batches
    assert len(micro_batch.host.batch.context_tokens) == 7
    assert micro_batch.host.end == 7
    assert sorted(np.diff(micro_batch.device.batch.query_start.numpy()).tolist()) == [
        1,
        1,
        1,
        33,
        40,
    ]


def test_what_the_device_has_no_room_for_attends_on_the_host() -> None:
    (micro_batch,) = cut([(1, 63)] * 6, 1, fraction=0.0, blocks=7).micro_batches
    assert len(micro_batch.device.batch.context_tokens) == 3  # two blocks each
    assert micro_batch.staging.num_blocks == 6


def test_only_blocks_with_earlier_tokens_are_staged() -> None:
    (micro_batch,) = cut([(1, 64), (40, 10), (50, 0)], 1, fraction=0.0).micro_batches
    contexts = micro_batch.staging.batch.context_tokens.tolist()
    table = micro_batch.staging.batch.block_table
    staged = {
        device + index: host + index
        for host, device, count in micro_batch.staging.runs_N3.tolist()
        for index in range(count)
    }
    for sequence, context in enumerate(contexts):
        num_scheduled_tokens = int(
            micro_batch.staging.batch.query_start[sequence + 1]
            - micro_batch.staging.batch.query_start[sequence]
        )
        past_blocks = -(-(context - num_scheduled_tokens) // BLOCK_TOKENS)
        for block in range(-(-context // BLOCK_TOKENS)):
            ours, theirs = (
                int(table[sequence, block]),
                int(micro_batch.device.batch.block_table[sequence, block]),
            )
            assert staged.get(ours) == (theirs if block < past_blocks else None)
    assert micro_batch.staging.num_blocks == 3 + 2 + 2


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_contexts_are_spread(num_micro_batches: int) -> None:
    done = cut([(1, 10 * i) for i in range(32)], num_micro_batches)
    sums = [int(micro_batch.host.batch.context_tokens.sum()) for micro_batch in done.micro_batches]
    assert max(sums) - min(sums) <= 310


def test_decoding_sequences_are_spread_whatever_the_prompts() -> None:
    """Three prompts for two micro-batches: the one with a prompt less does not decode for both."""
    done = cut([(70, 0)] * 3 + [(1, 199)] * 60, 2)
    assert [len(each.host.batch.context_tokens) for each in done.micro_batches] == [30, 30]
    assert done.max_tokens == 2 * 70 + 30


def test_few_long_contexts_do_not_overfill_the_other_micro_batches() -> None:
    done = cut([(1, 10_000)] + [(1, 10)] * 99, 2)
    assert sorted(each.num_tokens for each in done.micro_batches) == [49, 51]
