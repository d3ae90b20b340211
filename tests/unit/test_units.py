"""Sizes and times."""

import doctest

import pytest

from raymoe import units


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("text", "size"), [("192GiB", 192 << 30), ("16 GB", 16 * 10**9), ("7", 7), ("1.5k", 1536)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "3 parsec", "1e9"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_bytes(text)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.50 KiB"), (5 << 40, "5.00 TiB")])
def test_sizes_are_written(size: int, text: str) -> None:
    assert units.format_bytes(size) == text
