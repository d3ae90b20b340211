"""The package keeps its shape: no circles, words of the field, short functions."""

import pytest

from tests import house


@pytest.mark.parametrize(
    "check",
    [house.long_functions, house.circles, house.banned_words],
    ids=lambda check: check.__name__,
)
def test_nothing_breaks_a_rule_of_the_house(check) -> None:
    assert check() == []


def test_banned_words_are_found_where_they_are(tmp_path, monkeypatch) -> None:
    source = tmp_path / "waves.py"
    source.write_text('"""Each pass of the job."""\n\nmost_rows = 1  # a knob\n\npass\n')
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "files", lambda: [source])
    found = [line.split(": ")[1] for line in house.banned_words()]
    assert sorted(found) == ["Each pass", "knob", "most_rows"]
