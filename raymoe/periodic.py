"""A function that a thread calls again and again."""

import threading
from collections.abc import Callable


class Periodic:
    """A thread that calls a function at once, then periodically, and a last time in `close`."""

    def __init__(self, call: Callable[[], None], every_s: float, *, name: str) -> None:
        """Start; `every_s` is the time between the end of a call and the start of the next."""
        self._call, self._every_s = call, every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Call the function a last time and wait for the end of the thread; idempotent."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._call()
        while not self._is_over.wait(self._every_s):
            self._call()
        self._call()
