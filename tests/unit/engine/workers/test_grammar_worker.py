"""The kernel ends a process that computes for too long, not one that waits."""

import signal
import subprocess
import sys

import pytest

JOB = """
import time
from raymoe.engine.workers import grammar_worker
with grammar_worker.time_limit(0.1):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "status"),
    [("while True: pass", -signal.SIGPROF), ("time.sleep(0.5)", 0)],
    ids=["computes", "waits"],
)
def test_a_process_ends_when_it_has_used_its_time(body: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", JOB.format(body=body)], check=False, timeout=300)
    assert done.returncode == status
