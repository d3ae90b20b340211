"""The journal: finished rows outlive their process; damage costs rows, never the job."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import tracemalloc

import pytest

from raymoe.data import journal as journals
from raymoe.data.journal import (
    HEADER_BYTES,
    MAGIC,
    RowJournal,
    encode_generation,
    forget_errors,
    journal_files,
)
from raymoe.engine.outputs import Generation
from raymoe.errors import ConfigError, ExecutionError
from tests.unit.data.journals import ENVIRONMENT, FULL, ROOT, key_of, row, turn_read_only

WRITER = """
import sys
sys.path.append(sys.argv[4])
from raymoe.data.journal import RowJournal
from tests.unit.data.journals import key_of, row
directory, begin, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
journal = RowJournal(directory)
sys.stdin.readline()
for number in range(begin, end):
    journal.append(key_of(number), row(number))
journal.flush()
print("written", flush=True)
sys.stdin.readline()
"""


def written(directory, *numbers):
    journal = RowJournal(directory)
    for number in numbers:
        journal.append(key_of(number), row(number))
    journal.close()
    return journal


def found(directory, *numbers):
    """The generations of some rows, as a process that starts now finds them."""
    journal = RowJournal(directory)
    try:
        return journal.find([key_of(number) for number in numbers])
    finally:
        journal.close()


def test_rows_are_found_by_the_process_that_wrote_them_and_by_later_ones(tmp_path):
    journal = RowJournal(tmp_path)
    journal.append(key_of(1), FULL)
    journal.append(key_of(2), row(2))
    journal.flush()
    keys = [key_of(number) for number in (2, 3, 1)]
    assert journal.find(keys) == [row(2), None, FULL]
    journal.close()
    assert found(tmp_path, 2, 3, 1) == [row(2), None, FULL]


def test_a_process_that_writes_nothing_leaves_no_file(tmp_path):
    written(tmp_path / "made" / "here")
    assert list((tmp_path / "made" / "here").iterdir()) == []


def record_ends(num_rows):
    ends = [len(MAGIC)]
    for number in range(num_rows):
        ends.append(ends[-1] + HEADER_BYTES + len(encode_generation(row(number))))
    return ends


def test_a_tail_that_is_torn_at_any_byte_costs_only_its_row(tmp_path):
    written(tmp_path, 0, 1, 2)
    (path,) = journal_files(tmp_path)
    content, ends = path.read_bytes(), record_ends(3)
    assert len(content) == ends[-1]
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        num_whole = sum(end <= cut for end in ends[1:])
        journal = RowJournal(tmp_path)
        journal.close()
        assert journal.contents.num_rows == num_whole
        assert journal.contents.num_damaged_files == 0
        last = ends[num_whole] if num_whole else 0
        assert journal.contents.num_ignored_bytes == (0 if cut in ends else cut - last)
        expected = [row(number) if number < num_whole else None for number in range(3)]
        assert journal.find([key_of(number) for number in range(3)]) == expected


def test_a_flipped_bit_anywhere_ends_the_file_there_and_nothing_wrong_is_found(tmp_path, caplog):
    written(tmp_path, 0, 1, 2)
    (path,) = journal_files(tmp_path)
    content, ends = path.read_bytes(), record_ends(3)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        num_whole = sum(end <= at for end in ends[1:])
        journal = RowJournal(tmp_path)
        journal.close()
        expected = [row(number) if number < num_whole else None for number in range(3)]
        assert journal.find([key_of(number) for number in range(3)]) == expected
        last = ends[num_whole] if num_whole else 0
        assert journal.contents.num_ignored_bytes == len(content) - last
    assert "ignored and their rows generated again" in caplog.text


def test_a_row_whose_key_agrees_in_half_with_another_is_not_taken_for_it(tmp_path):
    written(tmp_path, 0)
    journal = RowJournal(tmp_path)
    journal.close()
    half = key_of(0)[:8]
    assert journal.find([half + key_of(1)[8:], key_of(0)]) == [None, row(0)]


def test_a_row_that_is_too_long_for_a_record_is_counted_and_the_others_are_kept(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(journals, "MAX_PAYLOAD_BYTES", 1000)
    journal = RowJournal(tmp_path)
    journal.append(key_of(0), Generation(text="x" * 1000))
    journal.append(key_of(1), row(1))
    journal.close()
    assert journal.num_lost_rows == 1
    assert "larger than the 1000 B that the journal takes" in caplog.text
    assert found(tmp_path, 0, 1) == [None, row(1)]


def test_damage_that_comes_after_opening_is_no_row(tmp_path, caplog):
    written(tmp_path, 0, 1)
    journal = RowJournal(tmp_path)
    (path,) = journal_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert journal.find([key_of(0), key_of(1)]) == [row(0), None]
    path.unlink()
    assert journal.find([key_of(0), key_of(1)]) == [None, None]
    assert "has changed" in caplog.text
    journal.close()


def test_files_that_are_no_journal_are_passed_over(tmp_path, caplog):
    written(tmp_path, 0)
    os.mkfifo(tmp_path / "rows-fifo.journal")
    (tmp_path / "rows-link.journal").symlink_to("/dev/zero")
    (tmp_path / "rows-text.journal").write_text("something else")
    (tmp_path / "notes.txt").write_text("of a user")
    journal = RowJournal(tmp_path)
    journal.close()
    assert journal.find([key_of(0)]) == [row(0)]
    assert journal.contents.num_damaged_files == 3
    assert "rows-fifo.journal" in caplog.text


def start_writer(directory, begin, end):
    arguments = [str(directory), str(begin), str(end), ROOT]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_write_at_once_and_what_was_flushed_survives_their_kill(tmp_path):
    writers = [start_writer(tmp_path, begin, begin + 300) for begin in (0, 300)]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        assert writer.stdout.readline() == "written\n"
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert len(journal_files(tmp_path)) == 2
    assert found(tmp_path, *range(600)) == [row(number) for number in range(600)]


def test_many_threads_append_and_find_at_once(tmp_path):
    journal = RowJournal(tmp_path)

    def work(begin):
        for number in range(begin, begin + 200):
            journal.append(key_of(number), row(number))
            if number % 20 == 0:
                journal.flush()
                assert journal.find([key_of(number)]) == [row(number)]

    threads = [threading.Thread(target=work, args=(begin,)) for begin in range(0, 1600, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert found(tmp_path, *range(1600)) == [row(number) for number in range(1600)]


def test_memory_holds_places_and_not_rows(tmp_path):
    journal = RowJournal(tmp_path)
    for number in range(20_000):
        journal.append(key_of(number), Generation(text=f"{number} " + "x" * 1000))
    journal.close()
    file_bytes = sum(path.stat().st_size for path in journal_files(tmp_path))
    tracemalloc.start()
    try:
        journal = RowJournal(tmp_path)
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    journal.close()
    assert journal.contents.num_rows == 20_000
    assert held_bytes < file_bytes / 15
    assert peak_bytes < file_bytes / 5
    assert journal.find([key_of(19_999)])[0].text.startswith("19999 ")


@pytest.fixture
def full_disk(monkeypatch):
    """A disk on which each write gets half of its bytes down and then fails, while told so."""
    state = {"is_full": False}
    write = os.write

    def write_half(file, data):
        if state["is_full"]:
            write(file, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(journals.os, "write", write_half)
    return state


def test_a_full_disk_loses_the_rows_of_that_time_says_so_and_is_no_end(tmp_path, full_disk, caplog):
    caplog.set_level(logging.WARNING)
    journal = RowJournal(tmp_path)
    for number, is_full in enumerate([False, True, True, False]):
        full_disk["is_full"] = is_full
        journal.append(key_of(number), row(number))
        journal.flush()
    journal.close()
    assert journal.num_lost_rows == 2
    assert caplog.text.count("No space left on device") == 1
    assert "can be written again" in caplog.text
    assert found(tmp_path, 0, 1, 2, 3) == [row(0), None, None, row(3)]


def test_a_disk_that_is_full_from_the_start_leaves_no_files(tmp_path, full_disk):
    full_disk["is_full"] = True
    journal = written(tmp_path, 0, 1)
    assert journal.num_lost_rows == 2
    assert journal_files(tmp_path) == []


@pytest.mark.parametrize("has_rows", [False, True])
def test_a_file_system_that_turns_read_only_loses_rows_and_ends_no_job(
    tmp_path, monkeypatch, has_rows, caplog
):
    """Nothing can be made, written, removed or even closed there any more."""
    journal = RowJournal(tmp_path)
    if has_rows:
        journal.append(key_of(0), row(0))
        journal.flush()
    turn_read_only(monkeypatch)
    for number in (1, 2):
        journal.append(key_of(number), row(number))
        journal.flush()
    journal.close()
    assert journal.num_lost_rows == 2
    assert caplog.text.count("cannot be written ([Errno 30]") == 1


def test_a_row_that_cannot_be_encoded_costs_no_other_row_its_record(tmp_path, caplog):
    journal = RowJournal(tmp_path)
    journal.append(key_of(0), Generation(text=object()))
    journal.append(key_of(1), row(1))
    journal.flush()
    journal.close()
    assert journal.num_lost_rows == 1
    assert "cannot be written to the journal" in caplog.text
    assert RowJournal(tmp_path).find([key_of(0), key_of(1)]) == [None, row(1)]


def test_a_record_that_cannot_be_decoded_is_generated_again(tmp_path, monkeypatch, caplog):
    journal = RowJournal(tmp_path)
    for number in range(2):
        journal.append(key_of(number), row(number))
    journal.close()
    decode = journals.decode_generation
    monkeypatch.setattr(
        journals,
        "decode_generation",
        lambda data: {}["new field"] if b"0" in data else decode(data),
    )
    opened = RowJournal(tmp_path)
    found = opened.find([key_of(number) for number in range(2)])
    opened.close()
    assert "cannot be read" in caplog.text
    assert found == [None, row(1)]


def test_a_thread_that_fails_ends_the_flush_instead_of_hanging(tmp_path, monkeypatch, caplog):
    journal = RowJournal(tmp_path)
    monkeypatch.setattr(journal._writer, "_append_bytes", lambda data: data.no_such_thing)
    journal.append(key_of(0), row(0))
    with pytest.raises(ExecutionError, match="no_such_thing"):
        journal.flush()
    journal.close()


def test_written_rows_are_synced_once_in_a_while_and_at_the_end(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(journals.os, "fsync", lambda file: (synced.append(1), fsync(file)))
    often = RowJournal(tmp_path / "often", sync_every_s=0)
    seldom = RowJournal(tmp_path / "seldom", sync_every_s=3600)
    counts = []
    for journal in (often, seldom):
        for number in range(5):
            journal.append(key_of(number), row(number))
            journal.flush()
        before = len(synced)
        journal.close()
        counts.append((before, len(synced)))
    assert counts[0][1] >= 1 + 5  # the directory, and each write
    assert counts[1][0] - counts[0][1] == 1  # the directory
    assert counts[1][1] - counts[1][0] == 1  # the end


def test_rows_are_synced_without_another_row_that_asks_for_it(tmp_path, monkeypatch):
    is_synced = threading.Event()
    monkeypatch.setattr(journals, "sync_directory", lambda _directory: None)
    monkeypatch.setattr(journals.os, "fsync", lambda _file: is_synced.set())
    journal = RowJournal(tmp_path, sync_every_s=0.01)
    journal.append(key_of(0), row(0))
    assert is_synced.wait(60)
    journal.close()


@pytest.mark.parametrize(
    ("directory", "reason"),
    [("s3://bucket/journal", "object stores cannot"), ("/proc/self/nothing", "cannot be made")],
)
def test_places_that_cannot_be_appended_to_are_refused(directory, reason):
    with pytest.raises(ConfigError, match=reason):
        RowJournal(directory)


def test_a_time_that_makes_no_sense_is_refused(tmp_path):
    for value in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="journal_sync_s"):
            RowJournal(tmp_path, sync_every_s=value)


def test_a_closed_journal_takes_nothing_more_and_closes_again(tmp_path):
    journal = written(tmp_path, 0)
    journal.append(key_of(1), row(1))
    journal.flush()
    journal.close()
    assert found(tmp_path, 0, 1) == [row(0), None]


def test_rows_with_errors_are_forgotten_and_all_others_found(tmp_path):
    failed = Generation(finish_reason="error", error="ConfigError: too long")
    quoting = Generation(text='{"error":"in the text"}')
    for numbers in ((1, 2, 3), (4, 5)):
        journal = RowJournal(tmp_path)
        for number in numbers:
            journal.append(key_of(number), failed if number in {2, 5} else row(number))
        journal.append(key_of(6), quoting)
        journal.close()
    damaged = journal_files(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes()[:-3])  # as after a crash
    sizes = [path.stat().st_size for path in journal_files(tmp_path)]
    assert forget_errors(tmp_path) == 2
    assert found(tmp_path, 1, 2, 3, 4, 5, 6) == [row(1), None, row(3), row(4), None, quoting]
    assert sizes == [path.stat().st_size for path in journal_files(tmp_path)]
    assert forget_errors(tmp_path) == 0
    assert forget_errors(tmp_path / "absent") == 0
