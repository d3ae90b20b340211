"""A condition variable that an interrupt does not leave locked."""

import threading
from _thread import RLock
from collections.abc import Callable


class Condition(RLock):  # type: ignore[misc]  # final in typeshed, not in CPython
    """As `threading.Condition`, with a `with` statement that a KeyboardInterrupt cannot break.

    `threading.Condition.__enter__` is Python code: an interrupt between the acquisition in it and
    the body of the statement leaves the lock taken, and whoever wants it next waits forever.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._condition.wait(timeout_s)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        return self._condition.wait_for(predicate, timeout_s)

    def notify_all(self) -> None:
        self._condition.notify_all()
