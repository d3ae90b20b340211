"""The kernel ends a process that computes for too long, not one that waits."""

import signal
import subprocess
import sys

import pytest

from raymoe.engine.grammar_worker import Allowance

JOB = """
import time
from raymoe.engine import grammar_worker
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


def test_a_row_may_use_some_time_in_advance_and_saves_none_up() -> None:
    allowance = Allowance(row_limit_s=1.0, token_limit_s=0.25)
    assert allowance.left_s(0) == 1.25
    assert allowance.use(1.25, 0)  # the first mask
    assert allowance.left_s(1) == 0.25
    assert allowance.use(0.0, 100)  # one step over many tokens
    assert all(allowance.use(0.0, 1) for _ in range(100))
    assert allowance.left_s(1) == 1.25
    assert not allowance.use(1.26, 1)
