"""One filled, many read, the last removes; whatever dies in between."""

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import raymoe
from raymoe.errors import CapacityError, ExecutionError
from raymoe.memory import shared_file
from raymoe.memory.arena import SharedArena
from raymoe.memory.shared_file import SharedFile

NUM_BYTES = 3 * mmap.PAGESIZE + 100


def fill(directory, key="a", note=b"sizes"):
    file = SharedFile.open(key, directory)
    assert not file.is_whole
    file.create(NUM_BYTES).copy_(torch.arange(NUM_BYTES) % 251)
    file.publish(note)
    return file


def paths(directory):
    return sorted(directory.glob("raymoe-*"))


def run_and_kill(directory, code):
    """Run code in a process until it prints, and kill it."""
    script = "import sys, time, torch\nfrom pathlib import Path\n" + textwrap.dedent(code)
    process = subprocess.Popen(
        [sys.executable, "-c", script + "\nprint('ready', flush=True)\ntime.sleep(60)", directory],
        env={**os.environ, "PYTHONPATH": str(Path(raymoe.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


OPEN = """
from raymoe.memory.shared_file import SharedFile
file = SharedFile.open("a", Path(sys.argv[1]))
memory = file.create(100000)
memory[:50000] = 7
"""


def test_others_find_what_the_first_has_filled_and_its_note(tmp_path):
    first = fill(tmp_path)
    second = SharedFile.open("a", tmp_path)
    assert second.is_whole
    assert (second.num_bytes, second.note) == (NUM_BYTES, b"sizes")
    assert torch.equal(second.memory(), (torch.arange(NUM_BYTES) % 251).to(torch.uint8))
    assert second.memory().data_ptr() % mmap.PAGESIZE == 0
    first.close()
    assert len(paths(tmp_path)) == 1
    second.close()
    assert paths(tmp_path) == []
    second.close()


def test_memory_that_outlives_its_user_keeps_no_lock(tmp_path):
    file = fill(tmp_path)
    memory = file.memory()
    (path,) = paths(tmp_path)
    newcomer = os.open(path, os.O_RDWR)  # it opens the file in the moment in which it is removed
    file.close()
    assert paths(tmp_path) == []
    fcntl.flock(newcomer, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(newcomer)
    assert memory[:3].tolist() == [0, 1, 2]


def test_one_fills_while_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_file, "POLL_S", 0.01)
    first, others = SharedFile.open("a", tmp_path), []
    threads = [
        threading.Thread(target=lambda: others.append(SharedFile.open("a", tmp_path)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert not others
    first.create(NUM_BYTES).fill_(5)
    first.publish(b"")
    for thread in threads:
        thread.join(30)
    assert [bool((other.memory() == 5).all()) for other in others] == [True] * 3
    for file in (first, *others):
        file.close()
    assert paths(tmp_path) == []


def test_a_file_whose_filler_was_killed_is_filled_again(tmp_path):
    run_and_kill(tmp_path, OPEN)
    assert len(paths(tmp_path)) == 1
    file = fill(tmp_path)
    assert torch.equal(file.memory(), (torch.arange(NUM_BYTES) % 251).to(torch.uint8))
    file.close()
    assert paths(tmp_path) == []


def test_a_whole_file_whose_users_were_killed_is_used_again_or_removed(tmp_path):
    run_and_kill(tmp_path, OPEN + "file.publish(b'x')")
    again = SharedFile.open("a", tmp_path)
    assert again.is_whole
    assert again.memory()[49999:50001].tolist() == [7, 0]
    SharedFile.open("b", tmp_path).close()
    assert len(paths(tmp_path)) == 1  # in use
    fcntl.flock(again._file, fcntl.LOCK_UN)  # as a killed process leaves it
    SharedFile.open("b", tmp_path).close()
    assert paths(tmp_path) == []


@pytest.mark.parametrize("publishes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_write_to_what_others_use_ends_the_writer_and_changes_nothing(tmp_path, publishes):
    file = fill(tmp_path)
    code = """
        from raymoe.memory.shared_file import SharedFile
        key = sys.argv[2]
        file = SharedFile.open(key, Path(sys.argv[1]))
        memory = file.memory() if file.is_whole else file.create(100)
        if not file.is_whole:
            file.publish(b"")
        memory[0] = 9
    """
    script = "import sys\nfrom pathlib import Path\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path, "b" if publishes else "a"],
        env={**os.environ, "PYTHONPATH": str(Path(raymoe.__file__).parents[1])},
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGSEGV
    assert file.memory()[0] == 0
    file.close()


def test_a_file_system_that_is_too_small_is_refused_with_sizes(tmp_path):
    file = SharedFile.open("a", tmp_path)
    with pytest.raises(CapacityError, match=r"free, and .* are needed .*--shm-size"):
        file.create(2**60)
    file.close()
    assert paths(tmp_path) == []


def test_what_others_could_write_is_not_used(tmp_path):
    fill(tmp_path)
    (path,) = paths(tmp_path)
    path.chmod(0o666)
    with pytest.raises(ExecutionError, match="shared with strangers"):
        SharedFile.open("a", tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExecutionError, match="cannot be opened"):
        SharedFile.open("a", tmp_path)


def test_an_arena_hands_out_the_same_places_in_every_process(tmp_path):
    first = SharedArena(1000, SharedFile.open("a", tmp_path), b"n")
    assert not first.is_filled
    first.allocate(100)
    first.allocate(64).fill_(3)
    first.seal()
    second = SharedArena(1000, SharedFile.open("a", tmp_path), b"n")
    assert second.is_filled
    second.allocate(100)
    assert second.allocate(64).tolist() == [3] * 64
    with pytest.raises(ExecutionError, match="are expected; set shared_weights=False"):
        SharedArena(2000, SharedFile.open("a", tmp_path), b"n")
    first.close()
    second.close()
