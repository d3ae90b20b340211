"""What is kept of rows is for the user alone; directories of the user stay as they are."""

import os
import stat

import pyarrow as pa
import pytest

from raymoe.data import generator as generators
from raymoe.data.generator import MoEGenerator
from raymoe.engine.engine import Engine
from tests.unit.data.jobs import IDENTITY
from tests.unit.engine.fakes import FakeRunner, fake_parts, small_policy


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def run(tokenizer_directory, monkeypatch):
    monkeypatch.setattr(generators, "_identify", lambda _source, config: (IDENTITY, config))
    monkeypatch.setattr(
        generators,
        "_load_engine",
        lambda _source, config: Engine(
            fake_parts(FakeRunner(64), small_policy(), directory=tokenizer_directory), config
        ),
    )

    def run(journal_dir):
        table = pa.table({"prompt": ["one", "two"]})
        operator = MoEGenerator("model", journal_dir=journal_dir, sampling_params={"max_tokens": 3})
        operator(table)
        # A process that is killed leaves more than one that is closed.
        left = [path for path in journal_dir.parent.rglob("*") if path.is_file()]
        modes = {path.name: mode(path) for path in left}
        operator.close()
        return modes

    return run


def test_journals_and_what_stands_beside_them_are_for_their_user_alone(run, tmp_path):
    journal = tmp_path / "deeper" / "journal"
    modes = run(journal)
    assert {name.split("-")[0].split(".")[0] for name in modes} >= {"manifest", "inside", "rows"}
    assert set(modes.values()) == {0o600}, modes
    made = {path.name: mode(path) for path in journal.parent.iterdir()}
    assert made == {"journal": 0o700, "journal.status": 0o700}
    assert mode(journal.parent) == 0o755  # not ours: a place that outputs may be in


def test_a_directory_that_was_there_keeps_its_mode(run, tmp_path):
    journal = tmp_path / "journal"
    journal.mkdir(mode=0o750)
    modes = run(journal)
    assert mode(journal) == 0o750
    assert set(modes.values()) == {0o600}, modes
