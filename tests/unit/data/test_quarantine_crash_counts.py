"""A row that ends processes is told from its neighbours, and nobody else is blamed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe
from raymoe.data.quarantine import CrashCounts, in_flight_files
from raymoe.errors import ExecutionError
from tests.unit.data.deaths import die
from tests.unit.data.dying import NUM_ROWS, key_of, read_log

COMMAND = [sys.executable, "-m", "tests.unit.data.dying"]
KEYS = [key_of(row) for row in range(1, 9)]


def crash_counts_of(directory):
    crash_counts = CrashCounts(directory)
    crash_counts.look("")
    return crash_counts


def run(tmp_path, seed, poison="-", steps=0):
    places = [Path(raymoe.__file__).parents[1], Path(__file__).parents[3]]
    process = subprocess.run(
        [*COMMAND, tmp_path / "job", tmp_path / "log", str(seed), str(poison), str(steps)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        timeout=60,
        check=False,
    )
    assert process.returncode in (0, -signal.SIGKILL)
    return process.returncode == 0


def test_one_guilty_row_among_512_is_found_in_six_deaths(tmp_path):
    (tmp_path / "job").mkdir()
    deaths = 0
    while not run(tmp_path, deaths, poison=300):
        deaths += 1
        assert deaths <= 6
    assert deaths >= 4
    assert sorted(read_log(tmp_path / "log")) == [-300, *sorted({*range(1, NUM_ROWS + 1)} - {300})]


def test_random_kills_blame_nobody(tmp_path):
    (tmp_path / "job").mkdir()
    for seed in range(8):
        assert not run(tmp_path, seed, steps=1 + seed % 3)
    assert run(tmp_path, 8)
    assert sorted(read_log(tmp_path / "log")) == list(range(1, NUM_ROWS + 1))


def test_deaths_in_company_make_a_row_suspect_but_never_guilty(tmp_path):
    for _ in range(20):
        die(tmp_path, KEYS[:2])
    crash_counts = crash_counts_of(tmp_path)
    assert [crash_counts.num_deaths(key) for key in KEYS[:3]] == [20, 20, 0]
    assert not any(map(crash_counts.is_poison, KEYS))


def test_a_row_that_happens_to_be_the_last_one_inside_is_not_alone(tmp_path):
    for _ in range(3):
        die(tmp_path, KEYS[:1])
    crash_counts = crash_counts_of(tmp_path)
    assert crash_counts.num_deaths(KEYS[0]) == 3
    assert not crash_counts.is_poison(KEYS[0])


def test_the_company_of_suspects_gets_smaller_with_each_death(tmp_path):
    rows = [key_of(row) for row in range(512)]
    limits = []
    for _ in range(5):
        die(tmp_path, rows)
        crash_counts = crash_counts_of(tmp_path)
        limits.append(crash_counts.max_at_once(crash_counts.num_deaths(rows[0])))
    assert limits == [None, 64, 8, 1, 1]
    assert crash_counts.max_at_once(0) is None


def test_two_deaths_alone_make_a_row_guilty_and_explain_those_of_its_neighbours(tmp_path):
    die(tmp_path, KEYS)
    die(tmp_path, KEYS)
    die(tmp_path, KEYS[1:3])
    die(tmp_path, KEYS[:1], alone=True)
    assert not crash_counts_of(tmp_path).is_poison(KEYS[0])
    die(tmp_path, KEYS[:1], alone=True, left=[KEYS[5]])
    crash_counts = crash_counts_of(tmp_path)
    assert [crash_counts.is_poison(key) for key in KEYS] == [True, *[False] * 7]
    assert [crash_counts.num_deaths(key) for key in KEYS] == [0, 1, 1, 0, 0, 0, 0, 0]


def test_an_engine_that_ends_whatever_it_is_given_fails_the_job(tmp_path):
    for key in KEYS[:2]:
        die(tmp_path, [key], alone=True)
        die(tmp_path, [key], alone=True)
    crash_counts_of(tmp_path).check_engine()
    for _ in range(2):
        die(tmp_path, [KEYS[2]], alone=True)
    with pytest.raises(
        ExecutionError, match=r"3 rows in turn, each alone, .* engine or its machine"
    ):
        crash_counts_of(tmp_path).check_engine()
    die(tmp_path, [KEYS[3]], left=[KEYS[4]])  # that one had finished a row
    crash_counts_of(tmp_path).check_engine()


def test_removing_the_files_of_deaths_acquits_all_rows(tmp_path):
    die(tmp_path, KEYS[:1], alone=True)
    die(tmp_path, KEYS[:1], alone=True)
    crash_counts = crash_counts_of(tmp_path)
    assert crash_counts.is_poison(KEYS[0])
    for path in in_flight_files(tmp_path):
        path.unlink()
    crash_counts._next_look_s = 0
    crash_counts.look("")
    assert not crash_counts.is_poison(KEYS[0])
