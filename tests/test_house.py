"""The package keeps its shape: few files, no circles, words of the field, short functions."""

import pytest

from tests import house

# Scripts of processes of their own, which start without the rest of their package.
SCRIPTS = {"raymoe.bench.gpu.part", "raymoe.engine.workers.framed_worker"}


@pytest.mark.parametrize(
    "check",
    [house.full_folders, house.long_files, house.long_functions, house.circles, house.banned_words],
    ids=lambda check: check.__name__,
)
def test_nothing_breaks_a_rule_of_the_house(check) -> None:
    assert check() == []


def test_short_files_that_one_neighbour_uses_are_in_it() -> None:
    assert [found for found in house.inner_files() if found.split()[0] not in SCRIPTS] == []


def test_the_package_does_not_grow() -> None:
    assert len(house.files()) <= house.MAX_FILES
    assert house.num_lines() <= house.MAX_LINES


def test_banned_words_are_found_where_they_are(tmp_path, monkeypatch) -> None:
    source = tmp_path / "waves.py"
    source.write_text('"""Each pass of the job."""\n\nmost_rows = 1  # a knob\n\npass\n')
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "files", lambda: [source])
    found = [line.split(": ")[1] for line in house.banned_words()]
    assert sorted(found) == ["Each pass", "knob", "most_rows"]
