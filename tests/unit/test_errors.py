"""What error columns get: the type, the step, and a message that UTF-8 can hold."""

import pytest

from raymoe.errors import MAX_DESCRIPTION_CHARACTERS, describe, encodable, in_step


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raised(error, *steps):
    for step in steps:  # the innermost comes first
        with pytest.raises(type(error)), in_step(step):
            raise error
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a"), "ValueError: a"),
        (raised(ValueError("a"), "reading"), "ValueError: while reading: a"),
        (raised(ValueError("a"), "reading", "more"), "ValueError: while reading: a"),
        (ValueError("\ud800 é"), "ValueError: \\ud800 é"),
        (SilentError(), "SilentError: it has no message"),
    ],
)
def test_a_description_has_type_step_and_message(error, text):
    assert describe(error) == text
    assert describe(error).encode()


def test_a_long_message_is_cut():
    assert len(describe(ValueError("x" * 10**6))) == MAX_DESCRIPTION_CHARACTERS
    assert encodable("x" * 10) == "x" * 10
