"""Signals from outside to the workers for grammars."""

import os
import signal
from collections.abc import Container

from raymoe.engine.grammars import GrammarServer

ALL = range(10**9)


def signal_forked(
    monkeypatch, which: Container[int] = ALL, number: int = signal.SIGKILL
) -> list[int]:
    """Send a signal to workers as soon as each has begun.

    Args:
        which: The first one that begins is 0.
        number: Of the signal.

    Returns:
        Ids of all workers, as they begin.
    """
    fork, pids = GrammarServer.fork, []

    def fork_and_signal(server, memory, timeout_s=None):
        worker = fork(server, memory, timeout_s)
        if worker is not None:
            while not worker.pid:
                worker.has_answer(0.01)
            pids.append(worker.pid)
            if len(pids) - 1 in which:
                os.kill(worker.pid, number)
        return worker

    monkeypatch.setattr(GrammarServer, "fork", fork_and_signal)
    return pids
