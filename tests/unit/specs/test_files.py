"""Files that others may have put there: pipes, sockets, directories, devices, and their ends."""

import contextlib
import os
import socket
import threading

import pytest

from raymoe.bench.gpu.settings import read_results
from raymoe.cli.plan import read_lengths
from raymoe.cli.resume import Lease, ResumeState
from raymoe.cli.serve import _read_token
from raymoe.cli.sources import open_source
from raymoe.cli.storage import Location
from raymoe.data import manifest as manifests
from raymoe.data.journal import RowJournal
from raymoe.data.quarantine import DEATH, IN_FLIGHT, SUFFIX, keep_deaths
from raymoe.data.status import read_status, write_record
from raymoe.engine.identity import _read_cache
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from raymoe.memory.shared_file import SharedFile
from raymoe.openai.jobs import Process, Responses, check_input
from raymoe.openai.store import BatchRecord, Store
from raymoe.plan.rank import read_prices
from raymoe.report import is_report, write_report
from raymoe.specs.files import (
    new_file,
    open_regular,
    read_chat_template,
    read_file,
    read_own_json,
    read_text,
    write_file,
)
from raymoe.specs.hardware import HardwareSpec
from tests.unit.data.jobs import made
from tests.unit.data.statuses import job, write

NO_FILE = (ConfigError, CheckpointError, ExecutionError, IsADirectoryError)


def pipe(path):
    os.mkfifo(path)


def listening_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as one:  # names are short
        one.bind(path.name)


def directory(path):
    path.mkdir()


def link_to_a_device(path):
    path.symlink_to("/dev/zero")


KINDS = {
    "a pipe": pipe, "a socket": listening_socket, "a directory": directory,
    "a device": link_to_a_device,
}  # fmt: skip


@pytest.fixture
def hurried(tmp_path):
    """Open the other end of pipes that something waits for, so that a test fails, not hangs."""
    late = threading.Event()

    def open_ends():
        if not late.wait(5.0):
            late.set()
            for path in filter(lambda one: one.is_fifo(), tmp_path.rglob("*")):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))

    thread = threading.Thread(target=open_ends)
    thread.start()
    yield
    assert not late.is_set(), "something waited for the other end of a pipe"
    late.set()
    thread.join()


def responses(path):
    batch = BatchRecord(
        id="b", created_at=0, endpoint="e", input_file_id="f", completion_window="1h"
    )
    Responses(None, batch, path.with_name("responses.jsonl")).split()


def take_lease(path):
    with Lease(Location.local(path.with_suffix(""))):
        pass


def make_report(path):
    write_report(write(path.parent / "answers.status", job=job()), path)


def input_of(path):
    return open_source(str(path), id_column=None)


# Name of a file, and what opens it.
OPENERS = {
    "prices.json": read_prices,
    "node.json": HardwareSpec.from_file,
    "lengths.jsonl": lambda path: read_lengths(path, None),
    "lengths.parquet": lambda path: read_lengths(path, None),
    "manifest.json": manifests.read,
    "answers.lease": take_lease,
    "answers.report.html": make_report,
    "prompts.jsonl": input_of,
    "prompts.parquet": input_of,
    "token": _read_token,
    "results.jsonl": read_results,
    "requests.jsonl": lambda path: check_input(path, "/v1/chat/completions", ["m"], 9),
    "responses.log": lambda path: Process.start(["true"], path),
    "output.jsonl": responses,
    "picture.svg": lambda path: write_file(path, "<svg/>"),
    "own.json": read_own_json,
    "written.log": lambda path: os.close(new_file(path)),
}


def cases():
    for kind in KINDS:
        for name in OPENERS:
            is_slow = kind != "a pipe" and name != "manifest.json"
            yield pytest.param(kind, name, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("kind", "name"), [*cases()])
def test_what_is_no_file_is_named_and_hangs_nothing(tmp_path, hurried, name, kind):
    KINDS[kind](tmp_path / name)
    with pytest.raises(NO_FILE) as caught:
        OPENERS[name](tmp_path / name)
    if not name.startswith("prompts"):  # a search for files finds none
        assert "not a file" in str(caught.value)
    assert name.split(".")[0] in str(caught.value)


def test_pipes_among_files_that_are_optional_are_passed_over(tmp_path, hurried):
    status = write(tmp_path / "answers.status", job=job())
    for name in ("actor-a-1-b.json", "step-a-1-b.json"):
        os.mkfifo(status / name)
    found = read_status(status)
    assert found.job == job()
    assert [one.partition(": ")[2] for one in found.unreadable] == [
        f"{status / name}: is a pipe, not a file" for name in ("actor-a-1-b.json",
        "step-a-1-b.json")
    ]  # fmt: skip
    os.mkfifo(status / ".job.json.tmp")
    write_record(status / "job.json", job(num_rows=7))
    assert read_status(status).job == job(num_rows=7)
    assert _read_cache(status / "actor-a-1-b.json") == {}
    os.mkfifo(tmp_path / "chat_template.jinja")
    assert not read_chat_template(tmp_path)
    os.mkfifo(tmp_path / "page.html")
    assert not is_report(tmp_path / "page.html")


def test_a_pipe_in_a_journal_is_no_row_and_hides_no_death(tmp_path, hurried):
    for name in ("rows-a.journal", f"{IN_FLIGHT}a{SUFFIX}", f"{DEATH}a{SUFFIX}"):
        os.mkfifo(tmp_path / name)
    journal = RowJournal(tmp_path)
    assert (journal.contents.num_rows, journal.contents.num_damaged_files) == (0, 1)
    journal.close()
    (tmp_path / f"{IN_FLIGHT}b{SUFFIX}").write_bytes(b"")
    keep_deaths(tmp_path, "own")
    assert not (tmp_path / f"{IN_FLIGHT}b{SUFFIX}").exists()


def test_pipes_in_the_place_of_shared_weights_and_records_of_a_server_are_named(tmp_path, hurried):
    os.mkfifo(tmp_path / f"raymoe-{os.geteuid()}-key", 0o600)
    with pytest.raises(ExecutionError, match="is a pipe, not a file"):
        SharedFile.open("key", tmp_path)
    (tmp_path / "server").mkdir()
    os.mkfifo(tmp_path / "server" / "server.lock")
    with pytest.raises(ConfigError, match=r"--directory .* is a pipe, not a file"):
        Store(tmp_path / "server")
    (tmp_path / "server" / "server.lock").unlink()
    (tmp_path / "server" / "files").mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "server" / "files" / f"file-{'0' * 32}.json")
    with pytest.raises(CheckpointError, match="is a pipe, not a file"):
        Store(tmp_path / "server")


@pytest.mark.parametrize("name", ["out.lease", "out.manifest.json", "out.report.html"])
@pytest.mark.parametrize("kind", ["a pipe", "a directory"])
def test_what_stands_in_the_place_of_a_jobs_files_is_refused(tmp_path, hurried, name, kind):
    KINDS[kind](tmp_path / name)
    state = ResumeState.of(Location.local(tmp_path / "out"))
    claim = state.check
    if name == "out.lease":
        claim = lambda *_, **__: take_lease(tmp_path / name)  # noqa: E731
    with pytest.raises(ConfigError, match=r"not a file|no manifest|no report"):
        claim(made(), resume=False, overwrite=True)


def test_a_file_is_read_whole_through_links_and_within_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to("a")
    assert read_file(tmp_path / "link", max_bytes=7) == b"content"
    with pytest.raises(ConfigError, match=r"link: larger than 6 B, refused"):
        read_file(tmp_path / "link", max_bytes=6)
    with pytest.raises(CheckpointError, match=r"link: is a link, not a file"):
        open_regular(tmp_path / "link")
    for name, reason in [("gone", "No such file"), ("a\udcff\ud800", "its name"),
                         ("n" * 300, "too long")]:  # fmt: skip
        with pytest.raises(ConfigError, match=rf"prices .*cannot be read \(.*{reason}"):
            read_file(tmp_path / name, what="prices")
    (tmp_path / "b").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"b: is not UTF-8 .* at byte 2"):
        read_text(tmp_path / "b")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "picture"
    before = os.umask(0o022)
    write_file(path, "one")
    write_file(path, b"two", mode=0o600)
    os.umask(before)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two", 0o600)
    with pytest.raises(OSError, match="No such file"):
        write_file(tmp_path / "gone" / "picture", "")
    assert [one.name for one in tmp_path.iterdir()] == ["picture"]
