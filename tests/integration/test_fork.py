"""A process forked from one that generates: it ends like any other, and its parent goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

from raymoe.data.status import read_status, status_beside
from tests.tiny import make_checkpoint

ROOT = Path(__file__).parents[2]
LIMIT_S = 300  # against waiting for ever

SCRIPT = """
import os, signal, sys, threading, time
import pyarrow as pa
from raymoe.data.generator import MoEGenerator
from raymoe.data.quarantine import in_flight_files
from raymoe.errors import ExecutionError
from pathlib import Path

model, journal = map(Path, sys.argv[1:])

def ask(operator, text):
    table = pa.table({"messages": [[{"role": "user", "content": text}]]})
    (error,) = operator(table)["__inference_error__"].to_pylist()
    assert not error, error

operator = MoEGenerator(
    model,
    journal_dir=journal,
    engine_config={"host_memory_bytes": 2 << 30, "linger_s": 0.0},
    sampling_params={"max_tokens": 4},
)
ask(operator, "before")
before = in_flight_files(journal)
child = os.fork()
if child == 0:
    signal.alarm(120)  # against waiting for ever
    for use in (lambda: ask(operator, "child"), lambda: operator._engine.generate([[3]])):
        try:
            use()
        except ExecutionError as error:
            assert f"of process {os.getppid()}" in str(error), error
        else:
            sys.exit("a fork has used what belongs to its parent")
    operator.close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, f"the fork ended with status {status}"
assert in_flight_files(journal) == before
ask(operator, "after")
threading.Thread(target=lambda _: time.sleep(3600), args=[operator], daemon=True).start()
print("done")
"""


@pytest.mark.slow
def test_a_fork_ends_and_leaves_alone_what_belongs_to_its_parent(tmp_path):
    model = make_checkpoint(tmp_path / "model")
    command = [sys.executable, "-c", SCRIPT, str(model), str(tmp_path / "journal")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    (actor,) = read_status(status_beside(tmp_path / "journal")).actors
    assert (actor.state, actor.rows.num_rows) == ("ended", 2)  # though a thread still had it
