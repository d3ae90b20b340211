"""Signals from outside to the processes for grammars."""

import os
import signal
from collections.abc import Container

from raymoe.engine.grammar_server import GrammarServer

ALL = range(10**9)


def signal_forked(
    monkeypatch, role: bytes, which: Container[int] = ALL, number: int = signal.SIGKILL
) -> list[int]:
    """Send a signal to processes of a role as soon as each has begun.

    Args:
        which: The first one that begins is 0.
        number: Of the signal.

    Returns:
        Ids of all processes of that role, as they begin.
    """
    fork, pids = GrammarServer.fork, []

    def fork_and_signal(server, its_role, *descriptors):
        process = fork(server, its_role, *descriptors)
        if its_role == role:
            while not process.pid:
                process.has_answer(0.01)
            pids.append(process.pid)
            if len(pids) - 1 in which:
                os.kill(process.pid, number)
        return process

    monkeypatch.setattr(GrammarServer, "fork", fork_and_signal)
    return pids
