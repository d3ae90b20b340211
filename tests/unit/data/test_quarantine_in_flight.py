"""The file of a process tells who was inside, once the process is gone, whatever happened to it."""

import errno
import os

from raymoe.data import quarantine
from raymoe.data.quarantine import InFlightFile, in_flight_files, keep_deaths, read_death
from tests.unit.data.journals import turn_read_only

KEYS = [bytes([number]) * 16 for number in range(1, 6)]


def deaths(directory):
    keep_deaths(directory, "")
    return [read_death(path) for path in directory.glob("death-*")]


def test_a_living_process_is_no_death_and_a_killed_one_tells_who_was_inside(tmp_path):
    file = InFlightFile(tmp_path)
    file.record(entered=KEYS[:3])
    file.record(left=KEYS[:1])
    assert deaths(tmp_path) == []
    os.close(file._file)
    (death,) = deaths(tmp_path)
    assert death.inside == set(KEYS[1:3])
    assert death.has_finished
    assert not death.was_alone
    assert deaths(tmp_path) == [death]


def test_equal_rows_are_inside_until_the_last_has_left(tmp_path):
    file = InFlightFile(tmp_path)
    file.record(entered=[KEYS[0], KEYS[0], KEYS[1]])
    file.record(left=KEYS[:2])
    os.close(file._file)
    (death,) = deaths(tmp_path)
    assert death.inside == {KEYS[0]}


def test_only_the_row_that_was_let_in_alone_and_is_still_there_was_alone(tmp_path):
    file = InFlightFile(tmp_path)
    file.record(entered=KEYS[:1])
    file.record(entered=KEYS[1:2], left=KEYS[:1], alone=True)
    os.close(file._file)
    (death,) = deaths(tmp_path)
    assert death.was_alone
    assert death.inside == {KEYS[1]}


def test_a_file_that_is_closed_with_nobody_inside_is_gone(tmp_path):
    file = InFlightFile(tmp_path)
    file.record(entered=KEYS)
    file.record(left=KEYS)
    file.close()
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_that_rows_were_finished_is_kept_where_there_were_deaths(tmp_path):
    died, ended = InFlightFile(tmp_path), InFlightFile(tmp_path)
    died.record(entered=KEYS[:1])
    os.close(died._file)
    assert len(deaths(tmp_path)) == 1
    ended.record(entered=KEYS[:1])
    ended.record(left=KEYS[:1])
    ended.close()
    assert sorted(death.has_finished for death in deaths(tmp_path)) == [False, True]


def test_a_torn_end_and_strange_bytes_are_ignored(tmp_path):
    file = InFlightFile(tmp_path)
    file.record(entered=KEYS[:2])
    os.write(file._file, b"E" + KEYS[2][:7])
    os.close(file._file)
    (death,) = deaths(tmp_path)
    assert death.inside == set(KEYS[:2])
    (tmp_path / "death-strange.rows").write_bytes(b"something else")
    assert read_death(tmp_path / "death-strange.rows").inside == frozenset()


def test_a_long_file_begins_anew_and_tells_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "REWRITE_BYTES", 200)
    file = InFlightFile(tmp_path)
    file.record(entered=KEYS[:1])
    for _ in range(100):
        file.record(entered=KEYS[1:3])
        file.record(left=KEYS[1:3])
    assert deaths(tmp_path) == []
    (path,) = in_flight_files(tmp_path)
    assert path.stat().st_size < 400
    os.close(file._file)
    (death,) = deaths(tmp_path)
    assert death.inside == {KEYS[0]}
    assert death.has_finished


def test_a_file_that_begins_anew_while_it_is_looked_at_is_no_death(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "REWRITE_BYTES", 0)
    file, opened = InFlightFile(tmp_path), quarantine.open_regular
    file.record(entered=KEYS[:1])

    def open_old(path, *flags):
        found = opened(path, *flags)
        file.record(entered=KEYS[1:2])  # renames a new file over the one just opened
        return found

    monkeypatch.setattr(quarantine, "open_regular", open_old)
    keep_deaths(tmp_path, "")
    (path,) = in_flight_files(tmp_path)
    assert path.name == file.name
    file.close()


def test_a_full_disk_is_said_once_and_the_next_file_tells_all(tmp_path, monkeypatch, caplog):
    file = InFlightFile(tmp_path)
    file.record(entered=KEYS[:1])
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "write", full)
        file.record(entered=KEYS[1:2])
        file.record(entered=KEYS[2:3])
    assert caplog.text.count("No space left on device") == 1
    assert list(tmp_path.iterdir()) == []
    file.record(entered=KEYS[3:4])
    assert "again" in caplog.text
    os.close(file._file)
    (death,) = deaths(tmp_path)
    assert death.inside == set(KEYS[:4])


def test_a_file_system_that_turns_read_only_ends_no_job(tmp_path, monkeypatch, caplog):
    file, other = InFlightFile(tmp_path), InFlightFile(tmp_path)
    for one in (file, other):
        one.record(entered=KEYS[:1])
    other.record(left=KEYS[:1])
    turn_read_only(monkeypatch)
    file.record(entered=KEYS[1:2])
    file.record(entered=KEYS[2:3])
    file.close()
    other.close()
    assert caplog.text.count("cannot be written to") == 1


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("of another program")
    (tmp_path / "inside-link.rows").symlink_to(tmp_path / "other")
    keep_deaths(tmp_path, "")
    assert (tmp_path / "other").read_text() == "of another program"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside-link.rows", "other"]
