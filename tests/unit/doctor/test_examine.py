"""Checks end no other checks, keep to their time, and say what they found."""

import sys
import types

import pytest

from raymoe.doctor.examine import Check, Examiner, Outcome, Status, Target, examine
from raymoe.errors import ConfigError

TARGET = Target(device="cpu")


def fail() -> Outcome:
    raise RuntimeError("the cable is out\nat line 7")


def refuse() -> Outcome:
    raise ConfigError("there is no cable")


def test_a_check_that_raises_is_a_finding_and_the_next_one_runs() -> None:
    checks = [Check("bad", fail), Check("user", refuse), Check("good", lambda: Outcome("7 GB/s"))]
    bad, user, good = Examiner(float("inf")).run("link", checks)
    assert bad.status == Status.FAILED
    assert bad.value.startswith("RuntimeError: the cable is out (test_examine.py, line ")
    assert "file a bug" in bad.advice
    assert (user.status, user.advice) == (Status.FAILED, "")
    assert (good.section, good.status, good.value) == ("link", Status.OK, "7 GB/s")


def test_nothing_begins_once_no_time_is_left() -> None:
    now = iter(range(100))
    checks = [Check(f"{i}", lambda: Outcome("")) for i in range(5)]
    found = list(Examiner(2, lambda: next(now)).run("", checks))
    assert [each.status for each in found] == [Status.OK] * 2 + [Status.SKIPPED] * 3
    assert "--limit" in found[-1].advice


def test_a_section_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    there = types.ModuleType("raymoe.doctor.there")
    there.checks = lambda target: [Check(target.device, lambda: Outcome("fine"))]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "raymoe.doctor.there", there)
    missing, fine = examine(TARGET, 60, ("missing", "there"))
    assert (missing.section, missing.status) == ("missing", Status.FAILED)
    assert "ModuleNotFoundError" in missing.value
    assert (fine.name, fine.value) == ("cpu", "fine")


def test_after_the_device_is_lost_the_rest_is_skipped_and_says_where() -> None:
    answers = iter(["", "CUDA error: an illegal memory access was encountered"])
    examiner = Examiner(float("inf"), device_error=lambda: next(answers))
    checks = [Check("wrong", refuse), Check("fine", lambda: Outcome("")), Check("broken", fail)]
    wrong, fine, broken = examiner.run("kernels", checks)
    assert (wrong.status, fine.status) == (Status.FAILED, Status.OK)
    assert broken.status == Status.FAILED
    assert broken.value.endswith("; the GPU is lost: CUDA error: an illegal memory access was "
                                 "encountered")  # fmt: skip
    (after,) = examiner.run("model", [Check("tokens", fail)])
    assert (after.status, after.value) == (Status.SKIPPED, "not begun")
    assert after.advice.startswith("the GPU was lost at 'broken'")
