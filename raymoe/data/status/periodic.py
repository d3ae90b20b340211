"""Something that is done now and then beside the work, and a last time at its end."""

import threading
from collections.abc import Callable


class Periodic:
    """A thread that calls a function at once, every few seconds, and when it is closed."""

    def __init__(self, call: Callable[[], None], every_s: float, *, name: str) -> None:
        """Start.

        Args:
            call: Must not raise.
            every_s: Between the end of a call and the start of the next.
            name: Of the thread.
        """
        self._call, self._every_s = call, every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Let the thread call once more and wait for its end; more than once is fine.

        Args:
            timeout_s: Wait no longer.
        """
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._call()
        while not self._is_over.wait(self._every_s):
            self._call()
        self._call()
