"""Cutting a step: every token once, micro-batches equal, shares as asked, blocks in order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.runtime.batch import InputBatch, Sequences
from raymoe.runtime.micro_batches import CutBatch, Division, cut_batch

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=30
)  # tokens in the step, tokens before


def make_batch(sequences: list[tuple[int, int]]) -> InputBatch:
    """The tokens are numbered, and all their logits are wanted."""
    num_scheduled_tokens = [tokens for tokens, _ in sequences]
    contexts = np.array([tokens + past for tokens, past in sequences], np.int32)
    width = -(-int(contexts.max()) // BLOCK_TOKENS)
    total = sum(num_scheduled_tokens)
    return InputBatch(
        token_ids=np.arange(total),
        positions=np.zeros(total, np.int32),
        sequences=Sequences(
            query_start=np.cumsum([0, *num_scheduled_tokens], dtype=np.int32),
            context_tokens=contexts,
            block_table=np.arange(len(sequences) * width, dtype=np.int32).reshape(-1, width),
            prompt_tokens=contexts,
        ),
        logit_rows=np.arange(total),
    )


def cut(
    sequences: list[tuple[int, int]],
    num_micro_batches: int,
    fraction: float = 1.0,
    blocks: int = 10**6,
) -> CutBatch:
    division = Division(cpu_attention_fraction=fraction, staged_blocks=blocks)
    return cut_batch(make_batch(sequences), num_micro_batches, division)


@given(SEQUENCES, st.integers(1, 6), st.floats(0, 1))
def test_every_token_is_in_one_wave_and_comes_back(
    sequences: list[tuple[int, int]], num_micro_batches: int, fraction: float
) -> None:
    done = cut(sequences, num_micro_batches, fraction)
    total = sum(tokens for tokens, _ in sequences)
    order_T, place_T = done.batch.token_ids, done.batch.logit_rows
    assert sorted(order_T.tolist()) == list(range(total))
    assert order_T[place_T].tolist() == list(range(total))
    assert len(done.micro_batches) == num_micro_batches
    begin = 0
    for micro_batch in done.micro_batches:
        assert micro_batch.begin == begin
        begin = micro_batch.end
        shares = (micro_batch.host, micro_batch.device)
        counts = [int(share.num_scheduled_tokens.sum()) for share in shares]
        assert counts == [micro_batch.num_host_tokens, micro_batch.end - micro_batch.middle]
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
    assert len(micro_batch.host) == 7
    assert micro_batch.num_host_tokens == 7
    assert sorted(micro_batch.device.num_scheduled_tokens) == [1, 1, 1, 33, 40]


def test_what_the_device_has_no_room_for_attends_on_the_host() -> None:
    (micro_batch,) = cut([(1, 63)] * 6, 1, fraction=0.0, blocks=7).micro_batches
    assert len(micro_batch.device) == 3  # two blocks each
    assert micro_batch.staging.num_blocks == 6


def test_only_blocks_with_earlier_tokens_are_staged() -> None:
    (micro_batch,) = cut([(1, 64), (40, 10), (50, 0)], 1, fraction=0.0).micro_batches
    contexts = micro_batch.staged.context_tokens.tolist()
    table = micro_batch.staged.block_table
    staged = {
        device + index: host + index
        for host, device, count in micro_batch.staging.runs_N3.tolist()
        for index in range(count)
    }
    for sequence, context in enumerate(contexts):
        num_scheduled_tokens = int(
            micro_batch.staged.query_start[sequence + 1] - micro_batch.staged.query_start[sequence]
        )
        past_blocks = -(-(context - num_scheduled_tokens) // BLOCK_TOKENS)
        for block in range(-(-context // BLOCK_TOKENS)):
            ours, theirs = (
                int(table[sequence, block]),
                int(micro_batch.device.block_table[sequence, block]),
            )
            assert staged.get(ours) == (theirs if block < past_blocks else None)
    assert micro_batch.staging.num_blocks == 3 + 2 + 2


def test_states_of_sequences_with_earlier_tokens_are_staged() -> None:
    batch = make_batch([(1, 64), (40, 10), (50, 0)])
    slots = np.array([7, 3, 5], np.int32)
    batch = replace(batch, sequences=replace(batch.sequences, slots=slots))
    division = Division(cpu_attention_fraction=0.0, staged_blocks=100)
    (micro_batch,) = cut_batch(batch, 1, division).micro_batches
    hosts, staged = micro_batch.device.slots, micro_batch.staged.slots
    assert hosts is not None
    assert staged is not None
    assert sorted(hosts.tolist()) == [3, 5, 7]
    assert staged.tolist() == [0, 1, 2]
    past = micro_batch.device.context_tokens - micro_batch.device.num_scheduled_tokens
    expected = [[hosts[i], i, 1] for i in range(3) if past[i]]
    assert micro_batch.staging.states_N3.tolist() == expected
    (without,) = cut([(1, 64)], 1, fraction=0.0).micro_batches
    assert not len(without.staging.states_N3)


@given(SEQUENCES, st.integers(1, 200), st.booleans())
def test_blocks_behind_a_window_are_not_staged(
    sequences: list[tuple[int, int]], window: int, has_own_blocks: bool
) -> None:
    batch = make_batch(sequences)
    table = batch.sequences.block_table
    if has_own_blocks:
        table = table[::-1] + 7
        batch = replace(batch, sequences=replace(batch.sequences, window_table=table.copy()))
    division = Division(cpu_attention_fraction=0.0, staged_blocks=10**6, window=window)
    (micro_batch,) = cut_batch(batch, 1, division).micro_batches
    share, columns = micro_batch.device, micro_batch.staged.window_table
    assert columns is not None
    source = share.window_table if has_own_blocks else share.block_table
    assert source is not None
    staged = {
        device + index: host + index
        for host, device, count in micro_batch.window_staging.runs_N3.tolist()
        for index in range(count)
    }
    used: list[int] = []
    for row, context in enumerate(share.context_tokens.tolist()):
        past = context - int(share.num_scheduled_tokens[row])
        behind = max(0, past - window + 1) // BLOCK_TOKENS
        places = columns[row, : -(-context // BLOCK_TOKENS)].tolist()
        assert set(places[:behind]) <= set(places[behind : behind + 1])
        for block in range(behind, -(-past // BLOCK_TOKENS)):
            assert staged.pop(places[block]) == source[row, block]
        used += places[behind:]
    assert not staged, "staged, and not in a window"
    assert used == list(range(micro_batch.window_staging.num_blocks))


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_contexts_are_spread(num_micro_batches: int) -> None:
    done = cut([(1, 10 * i) for i in range(32)], num_micro_batches)
    sums = [int(micro_batch.host.context_tokens.sum()) for micro_batch in done.micro_batches]
    assert max(sums) - min(sums) <= 310


def test_decoding_sequences_are_spread_whatever_the_prompts() -> None:
    """Three prompts for two micro-batches: the one with a prompt less does not decode for both."""
    done = cut([(70, 0)] * 3 + [(1, 199)] * 60, 2)
    assert [len(each.host) for each in done.micro_batches] == [30, 30]
    assert done.max_tokens == 2 * 70 + 30


def test_few_long_contexts_do_not_overfill_the_other_micro_batches() -> None:
    done = cut([(1, 10_000)] + [(1, 10)] * 99, 2)
    assert sorted(each.num_tokens for each in done.micro_batches) == [49, 51]
