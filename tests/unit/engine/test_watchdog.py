"""The watchdog: late steps only, once."""

import threading

from raymoe.engine.watchdog import Watchdog


def test_a_step_that_takes_too_long_is_reported_once():
    reports, seen = [], threading.Event()

    def report(waited_s: float) -> None:
        reports.append(waited_s)
        seen.set()

    watchdog = Watchdog(0.05, report)
    watchdog.step_begins()
    assert seen.wait(30)
    watchdog.close()
    assert len(reports) == 1
    assert reports[0] >= 0.05


def test_many_short_steps_and_long_pauses_are_fine():
    reports = []
    watchdog = Watchdog(0.2, reports.append)
    for _ in range(6):
        watchdog.step_begins()
        threading.Event().wait(0.01)
        watchdog.step_ends()
        threading.Event().wait(0.05)
    threading.Event().wait(0.3)
    watchdog.close()
    assert reports == []
    assert not watchdog._thread.is_alive()
