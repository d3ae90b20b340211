"""Cutting a pass: every token once, waves alike, shares as asked for, staged blocks in order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.runtime.micro_batches import CutPass, Division, cut_pass

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=30
)  # tokens in the pass, tokens before


def make_batch(sequences: list[tuple[int, int]]) -> AttentionBatch:
    takes = [tokens for tokens, _ in sequences]
    contexts = [tokens + past for tokens, past in sequences]
    width = max(-(-context // BLOCK_TOKENS) for context in contexts)
    table = torch.arange(len(sequences) * width, dtype=torch.int32).reshape(-1, width)
    return AttentionBatch(
        query_start=torch.tensor([0, *np.cumsum(takes)], dtype=torch.int32),
        context_tokens=torch.tensor(contexts, dtype=torch.int32),
        block_table=table,
    )


def cut(
    sequences: list[tuple[int, int]], num_waves: int, fraction: float = 1.0, blocks: int = 10**6
) -> CutPass:
    division = Division(cpu_attention_fraction=fraction, staged_blocks=blocks)
    return cut_pass(make_batch(sequences), num_waves, division)


@given(SEQUENCES, st.integers(1, 6), st.floats(0, 1))
def test_every_token_is_in_one_wave_and_comes_back(
    sequences: list[tuple[int, int]], num_waves: int, fraction: float
) -> None:
    done = cut(sequences, num_waves, fraction)
    total = sum(tokens for tokens, _ in sequences)
    assert sorted(done.order_T.tolist()) == list(range(total))
    assert torch.equal(done.order_T[done.place_T], torch.arange(total))
    assert len(done.waves) == num_waves
    begin = 0
    for wave in done.waves:
        assert wave.begin == begin
        begin = wave.end
        assert (wave.host.begin, wave.device.end) == (0, wave.num_tokens)
        assert wave.host.end == wave.device.begin
    assert begin == total


@given(SEQUENCES, st.integers(1, 6))
def test_no_wave_exceeds_the_mean_by_more_than_one_chunk(
    sequences: list[tuple[int, int]], num_waves: int
) -> None:
    takes = [tokens for tokens, _ in sequences]
    assert cut(sequences, num_waves).most_tokens <= -(-sum(takes) // num_waves) + max(takes)


def test_decoding_sequences_are_shared_and_prompts_go_to_the_device() -> None:
    sequences = [(1, 50)] * 10 + [(40, 0), (33, 31)]
    (wave,) = cut(sequences, 1, fraction=0.7).waves
    assert len(wave.host.batch.context_tokens) == 7
    assert wave.host.end == 7
    assert sorted(np.diff(wave.device.batch.query_start.numpy()).tolist()) == [1, 1, 1, 33, 40]


def test_what_the_device_has_no_room_for_attends_on_the_host() -> None:
    (wave,) = cut([(1, 63)] * 6, 1, fraction=0.0, blocks=7).waves
    assert len(wave.device.batch.context_tokens) == 3  # two blocks each
    assert wave.staging.num_blocks == 6


def test_only_blocks_with_earlier_tokens_are_staged() -> None:
    (wave,) = cut([(1, 64), (40, 10), (50, 0)], 1, fraction=0.0).waves
    contexts = wave.staging.batch.context_tokens.tolist()
    table = wave.staging.batch.block_table
    staged = {
        device + index: host + index
        for host, device, count in wave.staging.runs
        for index in range(count)
    }
    for sequence, context in enumerate(contexts):
        takes = int(
            wave.staging.batch.query_start[sequence + 1] - wave.staging.batch.query_start[sequence]
        )
        past_blocks = -(-(context - takes) // BLOCK_TOKENS)
        for block in range(-(-context // BLOCK_TOKENS)):
            ours, theirs = (
                int(table[sequence, block]),
                int(wave.device.batch.block_table[sequence, block]),
            )
            assert staged.get(ours) == (theirs if block < past_blocks else None)
    assert wave.staging.num_blocks == 3 + 2 + 2


@pytest.mark.parametrize("num_waves", [1, 4])
def test_contexts_are_spread(num_waves: int) -> None:
    done = cut([(1, 10 * i) for i in range(32)], num_waves)
    sums = [int(wave.host.batch.context_tokens.sum()) for wave in done.waves]
    assert max(sums) - min(sums) <= 310
