"""Errors that say the same are one group, which keeps numbers, texts and advice."""

import pytest

from raymoe.data.error_groups import MAX_CHARACTERS, MAX_GROUPS, OTHER, ErrorGroup, ErrorGroups
from raymoe.data.status import RowCounts
from raymoe.specs.files import from_plain, parse_json_object, to_json


def groups(*errors):
    found = ErrorGroups()
    found.add(errors)
    return [(one.num_rows, one.text()) for one in found.groups()]


def test_numbers_become_ranges_and_advice_stays():
    said = "ConfigError: the prompt has {} tokens; at most 2,047 fit: shorten it or set on_too_long"
    errors = [said.format(number) for number in ("9,000", "10,500", "5000")]
    assert groups(*errors, "ConfigError: the prompt is empty") == [
        (3, said.format("5000 to 10,500")),
        (1, "ConfigError: the prompt is empty"),
    ]


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        (["top_p is -1.5; it takes 0 to 1", "top_p is 3; it takes 0 to 1"],
         "top_p is -1.5 to 3; it takes 0 to 1"),
        (["messages[2] has role 'bot'", "messages[0] has role 'me'"],
         "messages[0 to 2] has role 'bot' and others"),
        (["column 'a' is empty"] * 2, "column 'a' is empty"),
        (["a grammar of utf8 in layer_3"], "a grammar of utf8 in layer_3"),
        (["the model's 3 rows aren't here", "the model's 4 rows aren't here"],
         "the model's 3 to 4 rows aren't here"),
        (["\x01 and \x02 are 'x'"], "? and ? are 'x'"),
    ],
)  # fmt: skip
def test_what_differs_is_a_range_or_an_example(errors, text):
    assert groups(*errors) == [(len(errors), text)]


def test_columns_that_differ_are_not_one_group():
    assert len(groups("column 'a' is empty", "column 'b' is empty")) == 2


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("column 'prompt' is 'my secret', no number", "column 'prompt' is '...', no number"),
        ("role \"it's my secret\"; a name such as 'user'", "role '...'; a name such as 'user'"),
        (r"stop has 'my \'secret\''; give it alone", "stop has '...'; give it alone"),
        ("messages is {'a': 'my secret; it takes a list", "messages is {'...': '...'"),
        ("role \"it's my secr; it takes a name such as 'user'", "role '...'"),
        ("row 12 has 3,000 tokens", "row 12 has 3,000 tokens"),
    ],
)
def test_without_quotes_no_part_of_a_cell_is_left(error, text):
    assert ErrorGroup.of(error).text(has_quotes=False) == text


def test_errors_with_any_text_take_a_fixed_amount_of_memory():
    found = ErrorGroups()
    found.add(f"Kind{chr(97 + i // 26)}{chr(97 + i % 26)}: {'long ' * 1000}" for i in range(300))
    assert len(found.groups()) == MAX_GROUPS + 1
    assert sum(one.num_rows for one in found.groups()) == 300
    assert found.groups()[0].text() == OTHER
    assert max(len(one.template) for one in found.groups()) <= MAX_CHARACTERS


def test_groups_of_parts_are_counted_together():
    one, other = ErrorGroups(), ErrorGroups()
    one.add(["3 is odd", "5 is odd"])
    other.add(["1 is odd", "it's 'x'"])
    one.update(other.groups())
    assert [(group.num_rows, group.text()) for group in one.groups()] == [
        (3, "1 to 5 is odd"),
        (1, "it's 'x'"),
    ]


def test_a_status_file_keeps_groups():
    found = ErrorGroups()
    found.add(["3 is 'odd'", "5 is 'odd'"])
    counts = RowCounts(error_groups=found.groups())
    plain = parse_json_object(to_json(counts).encode(), where="it")
    assert from_plain(RowCounts, plain, where="it") == counts


def test_a_damaged_group_has_a_text():
    assert ErrorGroup(num_rows=1, template="a \x01 and \x02").text() == "a ? and '...'"
