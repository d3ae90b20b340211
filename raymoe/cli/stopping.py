"""The first Ctrl-C or SIGTERM stops a command in order, the next one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """This process was told to stop.

    Attributes:
        name: Of the signal.
        exit_code: As of a process that the signal ends.
    """

    def __init__(self, number: int) -> None:
        self.name, self.exit_code = signal.Signals(number).name, 128 + number
        super().__init__(f"stopped by {self.name}")


@contextmanager
def stops_in_order() -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first signal; the next one has its usual effect."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen() -> None:
    """Listen again: `ray.init` sets a handler of its own."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _stop)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise Stopped(number)
