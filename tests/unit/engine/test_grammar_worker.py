"""The kernel ends a process that computes for too long, and one that waits for ever."""

import signal
import subprocess
import sys

import pytest

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
