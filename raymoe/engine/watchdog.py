"""Notices that the engine thread is stuck: a native kernel that never returns raises nothing."""

import threading
import time
from collections.abc import Callable


class Watchdog:
    """A thread that calls `on_stuck` once when a step takes longer than `limit_s`.

    Args:
        limit_s: Longest step.
        on_stuck: Called from the watchdog's thread with the seconds waited.
    """

    def __init__(self, limit_s: float, on_stuck: Callable[[float], None]) -> None:
        self._limit_s, self._on_stuck = limit_s, on_stuck
        self._changed = threading.Condition()
        self._begin_s: float | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="raymoe-watchdog", daemon=True)
        self._thread.start()

    def step_begins(self) -> None:
        """Start the clock."""
        with self._changed:
            is_asleep = self._begin_s is None
            self._begin_s = time.monotonic()
            if is_asleep:
                self._changed.notify()

    def step_ends(self) -> None:
        """Stop the clock."""
        with self._changed:
            self._begin_s = None

    def close(self) -> None:
        """End and join the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closing:
                if self._begin_s is None:
                    self._changed.wait()
                    continue
                late_s = time.monotonic() - self._begin_s - self._limit_s
                if late_s >= 0:
                    break
                self._changed.wait(-late_s)
            else:
                return
        self._on_stuck(self._limit_s + late_s)
