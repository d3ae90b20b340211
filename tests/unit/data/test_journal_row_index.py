"""The index of a journal: what was added is found, in 16 bytes for each row."""

import pytest

from raymoe.data import journal
from raymoe.data.journal import RowIndex
from tests.unit.data.journals import key_of


def test_the_latest_place_of_each_key_is_found_before_and_after_merges(monkeypatch):
    monkeypatch.setattr(journal, "MIN_RECENT", 50)
    index = RowIndex()
    expected = {}
    for number in range(1000):
        key = key_of(number % 700)
        expected[key] = (number % 3, number * 1_000_003)
        index.add(key, *expected[key])
        if number % 97 == 0:
            assert {one: index.find(one) for one in expected} == expected
    assert {one: index.find(one) for one in expected} == expected
    assert all(index.find(key_of(number)) is None for number in range(700, 1400))


def test_large_offsets_and_file_numbers_fit():
    index = RowIndex()
    index.add(b"\xff" * 16, 2**24 - 1, 2**40 - 1)
    index._merge()
    assert index.find(b"\xff" * 16) == (2**24 - 1, 2**40 - 1)


@pytest.mark.parametrize("num_rows", [20_000, 100_000])
def test_memory_of_a_row_does_not_grow_with_their_number(num_rows):
    index = RowIndex()
    for number in range(num_rows):
        index.add(key_of(number), 0, number)
    assert index.num_bytes + 16 * len(index._recent) == 16 * num_rows
    assert len(index._recent) < journal.MIN_RECENT
