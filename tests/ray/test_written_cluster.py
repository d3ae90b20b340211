"""Two nodes that the commands in a written file start run its job: processes on this machine.

What a cloud would add is put in: the addresses, the token, and less of everything than the nodes of
the file have. Ports are free ones, and the script in front of `ray` adds them.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

import raymoe
from raymoe.cli import run
from raymoe.cli.demo import _write_prompts, score
from tests.ray.test_submitted_job import END_S, environment, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_ROWS = 64
SMALL = {"CPU": 2, "memory": 2 * 10**9}
PORTS = (
    "object-manager-port",
    "node-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
JOB_S = 240


class Cloud:
    """Machines of a cloud that are processes here; all see `data`."""

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = tempfile.mkdtemp(prefix="raymoe-", dir="/tmp")  # sockets: a short path
        self.data = directory / "data"
        (self.data / "models").mkdir(parents=True)
        (self.data / "models" / "demo_model").symlink_to(raymoe.demo_model_path())
        (self.port,) = free_ports(1)
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.variables = environment(directory / "home", secrets.token_hex(32))
        self.variables["PATH"] = f"{self.bin}{os.pathsep}{self.variables['PATH']}"
        self.variables["MARK"] = self.mark
        ray = Path(sysconfig.get_path("scripts")) / "ray"
        self.script("ray", f'exec {ray} "$@" $MORE_OF_RAY')

    def script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def make_environment(self) -> None:
        """That of the files; here it is the one that runs the tests."""
        activate = Path(self.variables["HOME"]) / "raymoe-env" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.touch()

    def here(self, text: str) -> str:
        """A command of the file, with what is here."""
        found = text.replace("/data", str(self.data)).replace("6379", str(self.port))
        return found.replace("--device cuda", "--device cpu")

    def start(self, command: str, *, is_head: bool, **variables: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", self.here(command)],
            env=self.variables | variables | {"MORE_OF_RAY": self.more_of_ray(is_head=is_head)},
            start_new_session=True,
        )

    def more_of_ray(self, *, is_head: bool) -> str:
        """Options of `ray start` for a node among others of this machine."""
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        more = [f"--{name}={port}" for name, port in ports.items()]
        more += ["--object-store-memory=150000000", "--node-ip-address=127.0.0.1"]
        more += ["--disable-usage-stats"]
        if is_head:
            more += [f"--temp-dir={self.temporary}", "--include-dashboard=false"]
            if importlib.util.find_spec("grpc"):  # else Ray has no such server
                more += [f"--ray-client-server-port={free_ports(1)[0]}"]
        return shlex.join(more)

    def num_nodes(self) -> int:
        code = "import ray; ray.init(log_to_driver=False); print(len(ray.nodes()))"
        variables = self.variables | {"RAY_ADDRESS": f"127.0.0.1:{self.port}"}
        told = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, check=True
        )
        return int(told.stdout)

    def end(self) -> None:
        """End what was started, by the mark in its environment."""
        ours = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MARK") == self.mark:
                    ours.append(process)
        for step in (psutil.Process.terminate, psutil.Process.kill):
            for process in ours:
                with contextlib.suppress(psutil.NoSuchProcess):
                    step(process)
            _, ours = psutil.wait_procs(ours, timeout=END_S)
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def cloud(tmp_path):
    found = Cloud(tmp_path)
    try:
        yield found
    finally:
        found.end()


def written(cloud, path, *arguments):
    """The file for a job of the demo."""
    model = cloud.data / "models" / "demo_model"
    job = ("--prompt-len", "30", "--gen-len", "24", "--num-rows", str(NUM_ROWS))
    node = (
        "--hardware",
        "g6e.8xlarge",
        "--schedule",
        "resident",
        "--input",
        "/data/prompts.parquet",
    )
    assert run(["plan", "--model", str(model), *job, *node, *arguments, "--write", str(path)]) == 0
    _write_prompts(cloud.data / "demo", NUM_ROWS, 0)
    shutil.move(cloud.data / "demo" / "prompts.parquet", cloud.data / "prompts.parquet")
    return path.read_text().replace("--engine-config schedule=resident", "--temperature 0")


def check(cloud):
    answers = pq.read_table(cloud.data / "answers")
    assert answers.num_rows == len(set(answers["id"].to_pylist())) == NUM_ROWS
    assert set(answers["__inference_error__"].to_pylist()) == {""}
    assert score(answers)[-1].accuracy > 0.9


def test_the_commands_of_a_cluster_start_a_head_and_a_worker(cloud, tmp_path):
    text = written(cloud, tmp_path / "cluster.yaml", "--nodes", "1", "--spot")
    content = yaml.safe_load(text)
    options = content["docker"]["run_options"]
    given = dict(one.removeprefix("--env=").split("=") for one in options if "--env=" in one)
    assert given == {"RAY_AUTH_MODE": "token"}
    cloud.variables |= given
    assert content["head_start_ray_commands"][0] == "ray stop"  # of a machine's own: not here
    _, head = content["head_start_ray_commands"]
    _, worker = content["worker_start_ray_commands"]
    # It would ask the cloud for workers.
    head = head.replace(" --autoscaling-config=~/ray_bootstrap_config.yaml", "")
    types = content["available_node_types"]
    resources = types["worker"]["resources"] | SMALL | {"GPU": 0}
    for command, of_node, is_head in ((head, types["head"]["resources"], True),
                                      (worker, resources, False)):  # fmt: skip
        started = cloud.start(
            command, is_head=is_head, RAY_OVERRIDE_RESOURCES=json.dumps(of_node),
            RAY_HEAD_IP="127.0.0.1",
        )  # fmt: skip
        assert started.wait(120) == 0

    assert cloud.num_nodes() == 2  # of which one has CPUs
    lines = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#"))
    (told,) = (line for line in lines.replace("\\\n", " ").splitlines() if "submit_job" in line)
    words = cloud.here(told.partition(" -- ")[2])
    done = subprocess.run(
        ["bash", "-c", f"raymoe generate {words}"], timeout=JOB_S, check=False,
        env=cloud.variables | {"RAY_ADDRESS": f"127.0.0.1:{cloud.port}"},
    )  # fmt: skip
    assert done.returncode == 0
    check(cloud)


def test_the_script_of_a_task_joins_two_nodes_and_runs_the_job(cloud, tmp_path):
    kind = ("--write-as", "skypilot", "--nodes", "2")
    content = yaml.safe_load(written(cloud, tmp_path / "task.yaml", *kind))
    assert content["num_nodes"] == 2
    cloud.make_environment()
    cloud.script("sudo", "true")
    cloud.script("pgrep", "exit 1")  # both nodes are this machine
    memory = f"--memory={content['run'].partition('--memory=')[2].split()[0]}"
    script = content["run"].replace(memory, f"--memory={SMALL['memory']} --num-cpus=2")
    # SMALL's store comes later on the command line, so it counts.
    common = content["envs"] | {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
                                "SKYPILOT_NUM_NODES": "2"}  # fmt: skip
    ranks = [
        cloud.start(script, is_head=rank == 0, **common, SKYPILOT_NODE_RANK=str(rank))
        for rank in (1, 0)
    ]
    deadline_s = time.monotonic() + JOB_S
    assert [each.wait(max(1, deadline_s - time.monotonic())) for each in ranks] == [0, 0]
    check(cloud)


def test_the_script_of_slurm_starts_two_nodes_and_runs_the_job(cloud, tmp_path):
    script = written(cloud, tmp_path / "job.sh", "--write-as", "slurm", "--nodes", "2")
    cloud.make_environment()
    # Runs what follows its options, as a node of its own.
    cloud.script(
        "srun",
        'export MORE_OF_RAY="$MORE_OF_OTHERS"\n'
        'while [ "${1#--}" != "$1" ]; do shift; done\n'
        'exec "$@"',
    )
    address = "$(python -c 'import ray; print(ray.util.get_node_ip_address())')"
    assert address in script
    script = script.replace(address, "127.0.0.1")
    memory = f"--memory={script.partition('--memory=')[2].split()[0]}"
    script = script.replace(memory, f"--memory={SMALL['memory']} --num-cpus=2")
    script = script.replace("--num-gpus=1", "--num-gpus=0")
    started = cloud.start(
        script, is_head=True, SLURM_JOB_NUM_NODES="2", SLURMD_NODENAME="here",
        MORE_OF_OTHERS=cloud.more_of_ray(is_head=False),
    )  # fmt: skip
    assert started.wait(JOB_S) == 0
    check(cloud)
