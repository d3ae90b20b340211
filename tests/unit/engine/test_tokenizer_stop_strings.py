"""Stop strings, across tokens and characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.engine.tokenizer import StopStrings


def decode(tokens) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


# Bytes of "ä" and "€" alone, words, and pieces that begin or end within a stop string.
PIECES = [b"\xc3", b"\xa4", b"\xe2", b"\x82", b"\xac", b"S", b"ST", b"TOP", b"P", b"x", b" ", b"\n"]


def push_all(stop, tokens, min_tokens=0):
    """(number of tokens taken, text) at the stop, or None."""
    finder = StopStrings(stop, min_tokens)
    for index, token in enumerate(tokens):
        text = finder.find(*map(decode, finder.push(token)))
        if text is not None:
            return index + 1, text
    return None


def first_stop(stop, tokens, min_tokens=0):
    """The same by decoding everything each time."""
    first_end = len(decode(tokens[:min_tokens]).rstrip("�"))
    for count in range(min_tokens + 1, len(tokens) + 1):
        text = decode(tokens[:count]).rstrip("�")
        places = [
            place
            for string in stop
            for place in range(len(text))
            if text.startswith(string, place) and place + len(string) > first_end
        ]
        if places:
            return count, text[: min(places)]
    return None


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30), st.sampled_from([0, 0, 1, 4, 9]))
def test_the_first_stop_is_found_as_soon_as_it_is_in_the_text(tokens, min_tokens):
    stop = ("STOP", "€x", "ä")
    assert push_all(stop, tokens, min_tokens) == first_stop(stop, tokens, min_tokens)


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        (("STOP",), [9, 6, 10, 9, 5, 7], "xST x"),  # x ST space x S TOP
        (("ä",), [9, 0, 1], "x"),
        (("€x",), [2, 3, 4, 9], ""),
        (("P", "TOP"), [9, 7], "x"),
        (("\n",), [9, 11], "x"),
    ],
)
def test_text_is_cut_before_the_stop_string(stop, tokens, text):
    assert push_all(stop, tokens) == (len(tokens), text)


def test_a_stop_string_counts_that_ends_after_min_tokens():
    tokens = [9, 5, 9, 5, 7]  # x S x S TOP
    assert push_all(("x",), tokens, 2) == (3, "xS")
    assert push_all(("STOP", "Sx"), tokens, 2) == (3, "x")
    assert push_all(("STOP",), tokens, 4) == (5, "xSx")
    assert push_all(("x",), tokens, 3) is None


def test_text_without_a_stop_string_goes_on():
    assert push_all(("STOP",), [5, 6, 8, 9]) is None


def test_decoding_does_not_grow_with_the_text():
    longest = 0
    finder = StopStrings(("never",))
    for _ in range(500):
        windows = finder.push(9)
        longest = max(longest, *map(len, windows))
        finder.find(*map(decode, windows))
    assert longest <= 3
