"""Checks of `raymoe doctor`, one by one within a time limit; one that fails ends no other."""

import importlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from raymoe.errors import RaymoeError

Clock = Callable[[], float]

# Each has a function `checks`. Ordered so that what takes longest and depends on most comes last.
SECTIONS = ("machine", "rates", "kernels", "model", "bound")
FILE_A_BUG = "if nothing in the rows above explains it, file a bug with this table"


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but slower or with less than this machine could
    FAILED = "failed"
    SKIPPED = "skipped"


class Outcome(NamedTuple):
    """What a check found.

    Attributes:
        value: In numbers, with units.
        advice: What to do; empty if nothing.
    """

    value: str
    status: Status = Status.OK
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    run: Callable[[], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    section: str
    name: str
    status: Status
    value: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is examined: the device "cuda" or "cpu", by so many threads (None for all cores)."""

    device: str
    num_threads: int | None = None


def examine(
    target: Target,
    limit_s: float,
    sections: Sequence[str] = SECTIONS,
    clock: Clock = time.monotonic,
) -> Iterator[Finding]:
    """Yield a finding for each check; what does not begin within `limit_s` is skipped."""
    examiner = Examiner(clock() + limit_s, clock, partial(_device_error, target))
    for section in sections:
        try:
            checks = importlib.import_module(f"raymoe.doctor.{section}").checks(target)
        except Exception as error:  # a package is missing, or the compiled kernels do not load
            checks = [Check("import", partial(_failed, error))]
        yield from examiner.run(section, checks)


class Examiner:
    """Runs checks until a time; once the device is lost, skips those that follow."""

    def __init__(
        self,
        end_s: float,
        clock: Clock = time.monotonic,
        device_error: Callable[[], str] = lambda: "",
    ) -> None:
        """`device_error` says whether the device has failed for good, which a new process mends."""
        self._end_s, self._clock, self._device_error = end_s, clock, device_error
        self._lost: Outcome | None = None

    def run(self, section: str, checks: Iterable[Check]) -> Iterator[Finding]:
        """Run the checks of a section; an exception in one is its finding."""
        for check in checks:
            outcome = self._skipped() or self._run(check)
            if outcome.status == Status.FAILED and self._lost is None:
                reason = self._device_error()
                if reason:
                    outcome = outcome._replace(value=f"{outcome.value}; the GPU is lost: {reason}")
                    advice = f"the GPU was lost at {check.name!r}: see that row, and dmesg for Xid"
                    self._lost = Outcome("not begun", Status.SKIPPED, advice)
            yield Finding(section=section, name=check.name, **outcome._asdict())

    def _skipped(self) -> Outcome | None:
        if self._clock() < self._end_s:
            return self._lost
        advice = "raymoe doctor --limit 600 gives it more"
        return Outcome("not begun: no time is left", Status.SKIPPED, advice)

    def _run(self, check: Check) -> Outcome:
        try:
            return check.run()
        except Exception as error:  # whatever is wrong with this machine is what we look for
            return _failed(error)


def _device_error(target: Target) -> str:
    """What the GPU answers after an error that ends all work of this process on it."""
    if target.device != "cuda":
        return ""
    import torch  # noqa: PLC0415 - whether it can be imported is part of the examination

    try:
        torch.zeros(1, device="cuda").item()
    except torch.OutOfMemoryError:
        return ""
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _failed(error: Exception) -> Outcome:
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    if isinstance(error, RaymoeError):
        return Outcome(text, Status.FAILED)
    *_, place = traceback.extract_tb(error.__traceback__)
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return Outcome(f"{text} ({where})", Status.FAILED, FILE_A_BUG)
