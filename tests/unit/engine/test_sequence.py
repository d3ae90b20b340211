"""The sequence table and the assembly of steps."""

import numba
import numpy as np
import pytest
from numba.core.caching import CacheImpl

from raymoe._native import compiled
from raymoe.engine.sequence import Admission, SequenceTable, assemble_step, choose_scheduled_tokens
from raymoe.runtime.batch import blocks_of_tokens


def make_table(sequences, *, computed=0, wants_prompt_logits=False) -> SequenceTable:
    """Slots for token lists, with two blocks each in reverse order of ids."""
    table = SequenceTable(len(sequences) + 1, 64, 2 * len(sequences))
    for index, tokens in enumerate(sequences):
        table.admit(
            Admission(
                tokens=np.array(tokens, np.int32),
                blocks=np.array([2 * index + 1, 2 * index], np.int32),
                prompt_tokens=len(tokens),
                rope_tokens=len(tokens),
                max_tokens_total=64,
                num_computed_tokens=computed,
                arrival=10 - index,
                logit_end=len(tokens) if wants_prompt_logits else 0,
            )
        )
    return table


def test_live_slots_are_ordered_by_arrival():
    table = make_table([[1], [2], [3]])
    assert table.arrival[table.live_slots()].tolist() == [8, 9, 10]


def test_tokens_come_back_also_across_blocks_and_with_a_last_token_without_a_block():
    tokens = list(range(100, 164))
    table = make_table([tokens])
    slot = int(table.live_slots()[0])
    assert table.tokens(slot).tolist() == tokens
    table.append(np.array([slot], np.int32), np.array([7], np.int32))
    assert table.tokens(slot, first=60).tolist() == [*tokens[60:], 7]


@pytest.mark.parametrize(
    ("rests", "budget", "chunk", "num_scheduled_tokens"),
    [
        ([1, 5, 1], 10, 10, [1, 5, 1]),
        ([5, 1, 1], 3, 10, [1, 1, 1]),
        ([5, 9, 1], 9, 4, [4, 4, 1]),
        ([1, 1, 1], 2, 4, [1, 1, 0]),
    ],
)
def test_decode_tokens_come_first_and_chunks_share_the_rest(
    rests, budget, chunk, num_scheduled_tokens
):
    table = make_table([[0] * rest for rest in rests])
    slots = table.live_slots()[::-1]
    assert choose_scheduled_tokens(table, slots, budget, chunk).tolist() == num_scheduled_tokens


def test_a_pass_holds_tokens_positions_and_the_rows_whose_logits_are_wanted():
    table = make_table([[5, 6, 7], [8]])
    slots = table.live_slots()[::-1]
    made = assemble_step(table, slots, np.array([2, 1], np.int32))
    batch = made.batch
    assert batch.token_ids.tolist() == [5, 6, 8]
    assert batch.positions.tolist() == [0, 1, 0]
    assert batch.prompt_tokens.tolist() == [3, 3, 1]
    assert batch.sequences.query_start.tolist() == [0, 2, 3]
    assert batch.sequences.context_tokens.tolist() == [2, 1]
    assert batch.sequences.block_table.tolist() == [[1], [3]]
    assert batch.logit_rows.tolist() == [2]
    assert made.row_positions.tolist() == [1]
    assert made.row_is_sample.tolist() == [True]


def test_prompt_logits_are_asked_for_all_but_the_last_prompt_token():
    table = make_table([[5, 6, 7]], wants_prompt_logits=True)
    made = assemble_step(table, table.live_slots(), np.array([3], np.int32))
    assert made.batch.logit_rows.tolist() == [0, 1, 2]
    assert made.row_positions.tolist() == [1, 2, 3]
    assert made.row_is_sample.tolist() == [False, False, True]


def test_slots_are_reused():
    table = make_table([[1], [2]])
    blocks = table.remove(int(table.live_slots()[0]))
    assert blocks.tolist() == [3, 2]
    assert table.num_live == 1
    assert table.num_free_slots == 2


def test_loops_are_compiled_where_no_directory_keeps_them(monkeypatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(blocks_of_tokens)
    assert compiled(lambda number: number + 1)(4) == 5
