"""What a terminal shows while a model loads and while rows are generated."""

import io
import logging
import re
import sys
import time

import pytest

from raymoe.engine import progress
from raymoe.engine.engine import Engine
from raymoe.engine.progress import shown_load, shown_rows
from tests.unit.engine.fakes import QUICK, FakeRunner, fake_parts, small_policy

LINE = re.compile(r" *\d+%\|.*\| \d+/\d+ rows \[[\d:]+<[\d:?]+(, [\d,]+ tokens/s)?\]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def be_terminal(monkeypatch):
    """Make standard error a terminal of 80 columns, on which everything is shown at once."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.005)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    return shown


def lines(shown):
    return [line for line in re.split(r"[\r\n]", shown.getvalue()) if line.strip()]


def test_rows_are_counted_with_their_rate_and_what_is_left(monkeypatch):
    terminal = be_terminal(monkeypatch)
    counts = iter([0, 3, 12, 12, 12])
    done = 0

    def num_done():
        nonlocal done
        done = next(counts, done)
        return done

    with shown_rows(12, num_done=num_done, num_tokens=time.monotonic_ns, unit="tokens/s",
                    use_tqdm=None):  # fmt: skip
        time.sleep(0.05)
    found = lines(terminal)
    assert all(LINE.fullmatch(line) for line in found), found
    assert max(map(len, found)) <= 80
    assert "25%" in terminal.getvalue()
    assert "12/12 rows" in found[-1]


def test_a_load_names_its_stages_and_leaves_nothing(monkeypatch, caplog):
    terminal = be_terminal(monkeypatch)
    with caplog.at_level(logging.INFO), shown_load("mixtral", None) as tell:
        tell("planning")
        time.sleep(0.05)
        tell("loading weights, layer", 3, 48)
        time.sleep(0.05)
    shown = terminal.getvalue()
    assert re.search(r"mixtral: planning \[00:00\]", shown)
    assert re.search(r"mixtral: loading weights, layer 3/48 \[00:00\]", shown)
    assert not re.split(r"\r", shown)[-1].strip()
    assert caplog.messages == ["planning"]


@pytest.mark.parametrize("use_tqdm", [None, True, False])
def test_only_a_terminal_shows_progress_unless_it_is_asked_for(
    tokenizer_directory, monkeypatch, use_tqdm
):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    policy = small_policy()
    parts = fake_parts(FakeRunner(policy.num_kv_blocks), policy, directory=tokenizer_directory)
    with Engine(parts, QUICK) as engine:
        engine.generate([[1], [2]], {"max_tokens": 4, "temperature": 0}, use_tqdm=use_tqdm)
        engine.score([None], [[1, 2]], use_tqdm=use_tqdm)
    assert ("2/2 rows" in shown.getvalue()) == (use_tqdm is True)
    assert ("tokens/s read" in shown.getvalue()) == (use_tqdm is True)


def test_what_is_over_within_a_second_shows_nothing(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with shown_load("mixtral", None) as tell:
        tell("planning")
    with shown_rows(1, num_done=lambda: 1, num_tokens=lambda: 1, unit="tokens/s", use_tqdm=None):
        pass
    assert shown.getvalue() == ""
