"""Rows enter together, suspects in small company, and the worst when nobody else is inside."""

import threading

import pytest

from raymoe.data.quarantine import Admission
from raymoe.errors import ExecutionError
from tests.unit.data.deaths import die
from tests.unit.data.dying import key_of

KEYS = [key_of(row) for row in range(1, 9)]


class Caller(threading.Thread):
    """A thread that brings rows; says which are inside."""

    def __init__(self, admission, keys):
        super().__init__(daemon=True)
        self.admission, self.keys, self.entered = admission, keys, []
        self.start()

    def run(self):
        for group in self.admission.admit(self.keys):
            self.entered += [(self.keys[i], group.num_deaths) for i in group.positions]

    def is_in_flight(self, *keys):
        """Whether exactly these have entered, after a moment for the thread."""
        self.join(0.2)
        return [key for key, _ in self.entered] == list(keys)

    def leave(self):
        for key, num_deaths in self.entered:
            self.admission.leave(key, num_deaths, is_finished=True)
        self.entered = []


def test_rows_without_suspicion_enter_together(tmp_path):
    admission = Admission(tmp_path)
    (group,) = admission.admit(KEYS)
    assert group == (list(range(8)), 0)
    for key in KEYS:
        admission.leave(key, 0, is_finished=True)
    admission.close()
    assert list(tmp_path.iterdir()) == []


def test_suspects_enter_as_far_as_their_company_is_small_enough(tmp_path):
    rows = [key_of(row) for row in range(16)]
    die(tmp_path, rows)
    die(tmp_path, rows)  # of 16 suspects, two run at once
    admission = Admission(tmp_path)
    quarantined = Caller(admission, rows[:3])
    assert quarantined.is_in_flight(*rows[:2])
    free = Caller(admission, [key_of(100)])
    assert free.is_in_flight(key_of(100))
    quarantined.leave()
    assert quarantined.is_in_flight(rows[2])
    quarantined.leave()
    free.leave()
    admission.close()


def test_a_row_that_must_be_alone_waits_for_all_others_and_they_for_it(tmp_path):
    die(tmp_path, KEYS[:2])
    die(tmp_path, KEYS[:2])
    admission = Admission(tmp_path)
    before = Caller(admission, KEYS[2:4])
    assert before.is_in_flight(*KEYS[2:4])
    quarantined = Caller(admission, [KEYS[0], KEYS[4], KEYS[1]])
    assert quarantined.is_in_flight(KEYS[4])  # its call's row without suspicion is inside first
    after = Caller(admission, [KEYS[5]])
    assert after.is_in_flight()
    before.leave()
    assert quarantined.is_in_flight(KEYS[4])
    quarantined.leave()
    assert quarantined.is_in_flight(KEYS[0])
    assert after.is_in_flight()
    quarantined.leave()
    assert quarantined.is_in_flight(KEYS[1]) or after.is_in_flight(KEYS[5])
    quarantined.leave()
    assert after.is_in_flight(KEYS[5]) or quarantined.is_in_flight(KEYS[1])
    quarantined.leave()
    after.leave()
    admission.close()


def test_a_row_whose_engine_broke_is_still_inside_for_the_next_process(tmp_path):
    admission = Admission(tmp_path)
    (_,) = admission.admit(KEYS[:2])
    admission.leave(KEYS[0], 0, is_finished=True)
    admission.leave(KEYS[1], 0, is_finished=False)
    admission.close()
    crash_counts = Admission(tmp_path)._crash_counts
    assert [crash_counts.num_deaths(key) for key in KEYS[:2]] == [0, 1]


def test_nobody_enters_an_engine_that_is_broken(tmp_path):
    die(tmp_path, KEYS[:1])
    die(tmp_path, KEYS[:1])
    admission = Admission(tmp_path)
    quarantined = admission.admit(KEYS[:1])
    next(quarantined)
    errors = []

    def wait(key):
        with pytest.raises(ExecutionError, match="the engine is broken") as caught:
            list(admission.admit([key]))
        errors.append(caught.value)

    waiting = [threading.Thread(target=wait, args=(key,)) for key in (KEYS[0], KEYS[1])]
    for thread in waiting:
        thread.start()
        thread.join(0.2)
    assert not errors
    admission.leave(KEYS[0], 2, is_finished=False)
    for thread in waiting:
        thread.join(30)
    assert len(errors) == 2
    admission.close()
    again = Admission(tmp_path)
    assert again._crash_counts.num_deaths(KEYS[0]) == 3
    assert again._crash_counts._num_crashes[KEYS[0]] == 1
    assert again._crash_counts.num_deaths(KEYS[1]) == 0


def test_a_guilty_row_is_an_error_row_unless_the_engine_ends_whatever_it_is_given(tmp_path):
    for key in KEYS[:3]:
        admission = Admission(tmp_path)
        answer = admission.verdict(KEYS[0])
        if key != KEYS[0]:
            assert answer.finish_reason == "error"
            assert "crashed the process 2 times while it ran alone" in answer.error
        assert admission.verdict(KEYS[7]) is None
        die(tmp_path, [key], alone=True)
        die(tmp_path, [key], alone=True)
    with pytest.raises(ExecutionError, match="3 rows in turn"):
        Admission(tmp_path).verdict(KEYS[0])
