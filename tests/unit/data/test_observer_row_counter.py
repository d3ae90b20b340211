"""Rows are counted by what was wrong with them, in a fixed amount of memory."""

from raymoe.data.error_groups import MAX_GROUPS
from raymoe.data.observer import MAX_KINDS, RowCounter
from raymoe.engine.outputs import Generation


def good(tokens=4, **changes):
    return Generation(
        text="x",
        finish_reason="stop",
        num_input_tokens=3,
        num_generated_tokens=tokens,
        **changes,
    )


def bad(error):
    return Generation(finish_reason="error", error=error)


def test_rows_tokens_and_kinds_of_errors_are_summed_up():
    counter = RowCounter()
    counter.add([good(), good(others=(good(6),)), bad("ConfigError: a"), bad("ConfigError: b")])
    counter.add([good(), bad("DecodeError: c"), bad("ConfigError: a")], num_found=2, num_refused=1)
    counts = counter.counts()
    assert (counts.num_rows, counts.num_error_rows, counts.num_found_rows) == (7, 4, 2)
    assert counts.num_refused_rows == 1
    assert (counts.num_input_tokens, counts.num_generated_tokens) == (9, 18)
    assert counts.errors == (("ConfigError", 3), ("DecodeError", 1))
    assert [(one.num_rows, one.text()) for one in counts.error_groups] == [
        (2, "ConfigError: a"),
        (1, "ConfigError: b"),
        (1, "DecodeError: c"),
    ]


def test_errors_with_any_text_take_a_fixed_amount_of_memory():
    counter = RowCounter()
    for number in range(1000):
        counter.add([bad(f"Kind{number}: {'long ' * 1000}"), bad(f"\x1b[31m {number}: text")])
    counts = counter.counts()
    assert sum(count for _, count in counts.errors) == counts.num_error_rows == 2000
    assert len(counts.errors) <= MAX_KINDS + 1
    assert all(kind.isidentifier() for kind, _ in counts.errors)
    assert len(counts.error_groups) <= MAX_GROUPS + 1
