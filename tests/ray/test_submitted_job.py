"""The job of docs/clusters.md, submitted as users do it: every id once, and the job's exit code.

The head is a process of this test with ports, home and temporary directory of its own, and with the
token that any start of Ray leaves in a home. Nothing tells Ray to use it. The head needs
``ray[default]``, which has the server that jobs are submitted to.
"""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raymoe
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
NUM_ROWS = 300
START_S, END_S = 120, 10
PORTS = (
    "port",
    "ray-client-server-port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)


def free_ports(count):
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(home, token):
    """That of a machine with Ray's defaults: of the head and its jobs, and of who submits them."""
    scripts = sysconfig.get_path("scripts")
    variables = {**os.environ, "PATH": os.pathsep.join((scripts, os.environ["PATH"]))}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        variables.pop(name, None)
    home.mkdir()
    if token:
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text(token)
    places = [str(Path(raymoe.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(":")]
    return variables | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, places))),
        "HOME": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


BY_HAND = {"RAY_AUTH_MODE": "token"}  # what Ray's own client needs besides


@pytest.fixture
def head(tmp_path):
    """The address of the dashboard, and the environment of its machine."""
    pytest.importorskip("aiohttp_cors", reason="jobs need a head with ray[default]")
    variables = environment(tmp_path / "home", secrets.token_hex(32))
    directory = tempfile.mkdtemp(prefix="raymoe-", dir="/tmp")  # Ray's sockets need a short path
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = [
        *("ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"),
        *("--num-gpus=0", "--object-store-memory=150000000", "--dashboard-host=127.0.0.1"),
        *("--node-ip-address=127.0.0.1", f"--temp-dir={directory}"),
        *(f"--{name}={port}" for name, port in ports.items()),
    ]
    log = Path(directory) / "start.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=output, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{ports['dashboard-port']}"
        wait_until_ready(address, process, variables, log)
        yield address, variables
    finally:
        end(process)
        shutil.rmtree(directory, ignore_errors=True)


def wait_until_ready(address, process, variables, log):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        listed = subprocess.run(
            ["ray", "job", "list", "--address", address],
            env=variables | BY_HAND,
            capture_output=True,
            check=False,
        )
        if listed.returncode == 0:
            return
        time.sleep(1)
    pytest.fail(f"the head did not start in {START_S} s:\n{log.read_text()}")


def end(process):
    """End the head and what it started, by their ids."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=END_S)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    process.kill()
    process.wait()


def documented_job(values):
    """The command that the page on clusters prints, with other values for its options."""
    text = PAGE.read_text().replace("\\\n", " ")
    _, line = re.findall(r"^python (examples/submit_job\.py .*)$", text, re.MULTILINE)
    words = shlex.split(line)
    for option, value in values.items():
        words[words.index(option) + 1] = str(value)
    return words


def submit(words, address, variables):
    command = [sys.executable, ROOT / words[0], "--address", address, *words[1:]]
    return subprocess.run(
        list(map(str, command)), env=variables, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip


def test_the_documented_job_runs_on_a_head(head, tmp_path):
    address, variables = head
    model = make_checkpoint(tmp_path / "model")
    table = pa.table({"id": range(NUM_ROWS), "prompt": [f"row {i}" for i in range(NUM_ROWS)]})
    (tmp_path / "prompts").mkdir()
    pq.write_table(table, tmp_path / "prompts" / "part.parquet")
    output = tmp_path / "answers"
    values = {"--model": model, "--input": tmp_path / "prompts", "--output": output}
    values["--device"] = "cpu"
    words = documented_job(values | {"--num-actors": 1})

    done = submit([*words, "--max-tokens", "4"], address, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_ROWS} rows in" in done.stdout
    answers = pq.read_table(output)
    assert sorted(answers.column("id").to_pylist()) == list(range(NUM_ROWS))
    assert set(answers.column("__inference_error__").to_pylist()) == {""}

    (job,) = re.findall(r"^job (\S+);", done.stderr, re.MULTILINE)
    status = subprocess.run(
        ["ray", "job", "status", job, "--address", address],
        env=variables | BY_HAND, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "succeeded" in status.stdout + status.stderr

    # By hand, as the script says; nothing is left to do.
    by_hand = subprocess.run(
        ["ray", "job", "submit", "--address", address, "--", "raymoe", "generate",
         *words[words.index("--") + 1 :], "--max-tokens", "4"],
        env=variables | BY_HAND, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert by_hand.returncode == 0, by_hand.stdout + by_hand.stderr
    assert f"{NUM_ROWS} of {NUM_ROWS} rows are already written" in by_hand.stdout + by_hand.stderr

    failed = submit(documented_job(values | {"--input": tmp_path / "none"}), address, variables)
    assert failed.returncode == 1
    assert f"--input {tmp_path}/none: nothing is there" in failed.stdout
    assert failed.stderr.splitlines()[-1].endswith("command failed with exit code 2")

    again = submit(["examples/submit_job.py", "--job-id", job, *words[1:]], address, variables)
    assert again.returncode == 1
    assert again.stderr.startswith(f"job {job} was submitted before: ")
    assert again.stderr.count("\n") == 1
    _check_strangers(words, address, tmp_path)


def test_the_page_begins_with_lines_that_run(head, tmp_path):
    address, variables = head
    code = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert code.count("ray start --head\n") == code.count("ray stop\n") == 1
    code = code.replace("ray start --head\n", "").replace("ray stop\n", "")  # `head` does these
    code = code.replace("examples/submit_job.py", f"examples/submit_job.py --address {address}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        ["bash", "-ec", code], cwd=tmp_path, env=variables | {"RAY_ADDRESS": "local"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert pq.read_table(tmp_path / "raymoe-demo" / "by-job").num_rows == 64


def _check_strangers(words, address, directory):
    """Machines with another token or none are told so, in one line."""
    for name, token, told in (
        ("without", None, "asks for a token and this machine has none"),
        ("other", secrets.token_hex(32), f"refuses the token in {directory}/other/.ray/auth_token"),
    ):
        done = submit(words, address, environment(directory / name, token))
        assert done.returncode == 1
        assert told in done.stderr
        assert done.stderr.count("\n") == 1
