"""The order of rows: families together, blocks of equal cost, the cheap ones last."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.data.sorting import deal_rows, prompt_bytes, shared_bytes, sort_by_prefix
from raymoe.errors import ConfigError

ROWS_PER_BLOCK = 8


def dealt(texts: list[bytes], rows_per_block: int = ROWS_PER_BLOCK) -> list[bytes]:
    texts = sorted(texts)
    order = deal_rows(texts, [len(text) for text in texts], rows_per_block)
    assert sorted(order) == list(range(len(texts)))
    return [texts[index] for index in order]


def blocks_of(texts: list[bytes]) -> list[list[bytes]]:
    return [texts[i : i + ROWS_PER_BLOCK] for i in range(0, len(texts), ROWS_PER_BLOCK)]


def a_text(dice: random.Random, length: int) -> bytes:
    return bytes(dice.randrange(97, 123) for _ in range(length))


@given(st.lists(st.binary(max_size=300), max_size=60), st.integers(1, 20))
def test_every_row_is_dealt_once(texts: list[bytes], rows_per_block: int) -> None:
    assert sorted(dealt(texts, rows_per_block)) == sorted(texts)


@given(st.binary(max_size=9), st.binary(max_size=9), st.binary(max_size=9))
def test_shared_bytes_are_the_common_prefix(head: bytes, one: bytes, other: bytes) -> None:
    one, other = head + one, head + other
    length = shared_bytes(one, other)
    assert one[:length] == other[:length]
    assert length >= len(head)
    assert length in {len(one), len(other)} or one[length] != other[length]


def test_rows_that_share_a_prefix_stay_together() -> None:
    dice = random.Random(0)
    heads = [a_text(dice, 200) for _ in range(9)]
    texts = [head + a_text(dice, 20) for head in heads for _ in range(dice.randrange(2, 12))]
    found = [text[:200] for text in dealt(texts)]
    num_changes = sum(one != other for one, other in itertools.pairwise(found))
    assert num_changes == len(heads) - 1


def test_what_all_rows_share_makes_no_family() -> None:
    """Their lengths are still dealt out, as if the common part were not there."""
    dice = random.Random(1)
    head = a_text(dice, 500)
    texts = [head + a_text(dice, length) for length in range(0, 640, 10)]
    costs = [sum(len(text) - 500 for text in block) for block in blocks_of(dealt(texts))]
    assert len(costs) == 8
    assert max(costs) - min(costs) <= 80


def test_blocks_cost_the_same_and_begin_with_their_longest_rows() -> None:
    dice = random.Random(2)
    texts = [a_text(dice, int(dice.paretovariate(1.5) * 20)) for _ in range(ROWS_PER_BLOCK * 20)]
    blocks = blocks_of(dealt(texts))
    costs = [sum(map(len, block)) for block in blocks]
    mean = sum(costs) / len(costs)
    longest = max(map(len, texts))
    assert max(costs) - min(costs) <= max(longest, mean * 0.1)
    letters_in_common = 2 * ROWS_PER_BLOCK
    assert all(a >= b - letters_in_common for a, b in itertools.pairwise(costs))
    assert all(max(block, key=len) == block[0] for block in blocks)


def test_families_of_long_prompts_come_first() -> None:
    dice = random.Random(3)
    texts = []
    for length in (100, 1000, 300):
        head = a_text(dice, 100)
        texts += [head + a_text(dice, length) for _ in range(ROWS_PER_BLOCK)]
    lengths = [len(text) - 100 for text in dealt(texts)]
    assert lengths == sorted(lengths, reverse=True)


def test_prompts_of_all_forms_begin_with_what_they_share() -> None:
    system = {"role": "system", "content": "s" * 300}
    chats = [[system, {"role": "user", "content": text, "name": None}] for text in "ab"]
    assert shared_bytes(*(prompt_bytes(None, chat, None) for chat in chats)) > 300
    assert shared_bytes(*(prompt_bytes(None, None, [7] * 50 + [end]) for end in (1, 2))) > 200
    tools = [{"type": "function", "function": {"name": "f" * 100}}]
    assert shared_bytes(*(prompt_bytes(tools, chat, None) for chat in (chats[0], "other"))) > 100
    assert prompt_bytes(None, None, "caf\xe9") == "caf\xe9".encode()


@pytest.mark.parametrize("cell", [None, "", b"\xff", "\ud800", 3.5, [], [-1], [{"a": 1}], [None]])
def test_rows_that_nobody_can_generate_have_a_place_too(cell: object) -> None:
    assert isinstance(prompt_bytes(None, cell, cell), bytes)


@pytest.mark.parametrize("name", ["prefix_bytes", "rows_per_block"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_numbers_that_make_no_sense_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        sort_by_prefix(None, **{name: value})
