"""`raymoe doctor` and the suite gpu where packages, caches and the network are missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raymoe.cli import run
from raymoe.doctor import examine, model
from raymoe.doctor.examine import Finding, Status, Target

# A process begins with this: packages that are not there, and a network that refuses.
WITHOUT = """
import socket, sys
for name in {packages}:
    sys.modules[name] = None
def refuse(*_, **__):
    raise OSError("there is no network")
for name in ("connect", "connect_ex", "sendto", "bind"):
    setattr(socket.socket, name, refuse)
socket.getaddrinfo = socket.create_connection = refuse
"""


def raymoe(
    tmp_path: Path, *arguments: str, packages: tuple[str, ...] = (), **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command line without some packages and without a network, in all its processes."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(packages=packages))
    return subprocess.run(
        [sys.executable, "-m", "raymoe", *arguments],
        env={
            **os.environ,
            **variables,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "RAYMOE_CACHE": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def examined(tmp_path: Path, *arguments: str) -> dict[str, dict[str, str]]:
    """What the doctor finds where nothing failed, by the name of the check."""
    done = raymoe(
        tmp_path,
        *("doctor", "--json", "--device=cpu", *arguments),
        packages=("ray", "llguidance", "accelerate"),
        # No function finds a directory for what numba compiles.
        NUMBA_CACHE_LOCATOR_CLASSES="ZipCacheLocator",
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    failed = [finding for finding in report["findings"] if finding["status"] == "failed"]
    assert (done.returncode, failed, report["is_healthy"]) == (0, [], True)
    assert report["seconds"] < 300
    return {finding["name"]: finding for finding in report["findings"]}


def test_the_doctor_begins_without_ray_and_a_network(tmp_path: Path) -> None:
    found = examined(tmp_path, "--section=machine", "--section=bound")
    assert (found["ray"]["status"], found["ray"]["value"]) == ("warning", "missing")
    assert {finding["section"] for finding in found.values()} == {"machine", "bound"}


@pytest.mark.slow
def test_the_doctor_needs_neither_ray_nor_a_network_nor_caches(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert found["profile"]["status"] == "warning"
    schedules = [name for name in found if " on emulated, float32" in name]
    assert len(schedules) >= 4
    assert all("8 of 8 rows" in found[name]["value"] for name in schedules)
    assert {finding["section"] for finding in found.values()} == {*examine.SECTIONS}


@pytest.mark.slow
def test_the_suite_needs_neither_ray_nor_grammars(tmp_path: Path) -> None:
    done = raymoe(
        tmp_path,
        *("bench", "--suite", "gpu", "--device", "emulated", "--shape", "tiny"),
        *("--workload", "smoke", "--max-rows", "12", "--host-memory", "4GiB"),
        *("--part-limit", "120", "--num-threads", "2", "--out", str(tmp_path / "out")),
        packages=("ray", "llguidance"),
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "out/gpu.jsonl").read_text().splitlines()]
    assert [result["status"] for result in results] == ["done"] * 7 + ["skipped"]


def test_tokens_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = model.reference()
    wrong = [*right.tokens[:-1], [*right.tokens[-1][:-1], 0]]
    monkeypatch.setattr(model, "reference", lambda: right._replace(tokens=wrong))
    found = model.same_tokens(Target(device="cpu", num_threads=2), "cpu", "in_place")
    assert found.status == Status.FAILED
    assert found.value.startswith("7 of 8 rows")


def test_log_probabilities_far_from_the_reference_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = model.reference()
    far = [[logprob - 0.5 for logprob in row] for row in right.logprobs]
    monkeypatch.setattr(model, "reference", lambda: right._replace(logprobs=far))
    target = Target(device="cpu", num_threads=2)
    assert model.near(target, "cpu", "in_place", "bfloat16").status == Status.FAILED


@pytest.mark.parametrize(("status", "code"), [(Status.WARNING, 0), (Status.FAILED, 1)])
def test_the_exit_code_is_that_of_failures(
    status: Status, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding(section="rates", name="link", status=status, value="7\x1b[2J", advice="pull")
    monkeypatch.setattr("raymoe.cli.doctor.examine", lambda *_: [finding])
    assert run(["doctor", "--device", "cpu"]) == code
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert "rates, link: pull" in shown


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--device", "tpu"]) == 2
    assert "unknown --device 'tpu'" in capsys.readouterr().err
