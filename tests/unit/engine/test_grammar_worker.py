"""The kernel ends a process that computes for too long, and one that waits for ever."""

import signal
import subprocess
import sys

import pytest

from raymoe.engine.grammar_worker import Allowance

JOB = """
import threading
from raymoe.engine import grammar_worker
grammar_worker.PATIENCE = float({patience})
with grammar_worker.time_limit(0.1):
    {body}
"""
SPIN = "while True: pass"
WAIT = "lock = threading.Lock(); lock.acquire(); lock.acquire()"
REST = "pass"


@pytest.mark.parametrize(
    ("body", "patience", "status"),
    [(SPIN, 1e6, -signal.SIGPROF), (WAIT, 1.0, -signal.SIGALRM), (REST, 1.0, 0)],
    ids=["computes", "waits", "ends"],
)
def test_a_process_ends_when_its_time_is_over(body: str, patience: float, status: int) -> None:
    job = JOB.format(body=body, patience=patience)
    done = subprocess.run([sys.executable, "-c", job], check=False, timeout=300)
    assert done.returncode == status


def test_a_row_may_use_some_time_in_advance_and_saves_none_up() -> None:
    allowance = Allowance(row_limit_s=1.0, token_limit_s=0.25)
    assert allowance.left_s(0) == 1.25
    assert allowance.use(1.25, 0)  # the first mask
    assert allowance.left_s(1) == 0.25
    assert allowance.use(0.0, 100)  # one step over many tokens
    assert all(allowance.use(0.0, 1) for _ in range(100))
    assert allowance.left_s(1) == 1.25
    assert not allowance.use(1.26, 1)
