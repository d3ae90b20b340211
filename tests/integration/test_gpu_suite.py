"""`raymoe bench --suite gpu` from the command line to its report, on a device of host memory."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from raymoe.bench.gpu import engines, part
from raymoe.bench.gpu.node import HostMemory
from raymoe.bench.gpu.settings import (
    ACCELERATE,
    GPU_CONTENDERS,
    SCHEDULES,
    NodeSettings,
    PartSettings,
    Status,
    read_results,
)
from raymoe.cli import run
from raymoe.device.cuda import CudaDevice
from raymoe.specs.hardware import hardware_preset
from raymoe.units import GIB
from tests.unit.device.deferred_cuda import DeferredCuda, use_device, without_native_kernels

__all__ = ["without_native_kernels"]

SMALL = ["--shape", "tiny", "--workload", "smoke", "--max-rows", "12", "--part-limit", "120"]


def bench(out: Path, *arguments: str) -> int:
    return run(
        ["bench", "--suite", "gpu", "--device", "emulated", "--device-memory", "1GiB", *SMALL,
         "--host-memory", "4GiB", "--num-threads", "2", "--out", str(out), *arguments]
    )  # fmt: skip


def contenders(*names: str) -> list[str]:
    return [word for name in names for word in ("--contender", name)]


@pytest.mark.slow
def test_a_part_is_measured_once_and_shown_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, *contenders("vslpipe")) == 0
    first = capsys.readouterr()
    lines = (tmp_path / "gpu.jsonl").read_text()
    (result,) = read_results(tmp_path / "gpu.jsonl")
    figures = result.figures
    assert figures is not None
    assert (figures.schedule, figures.policy) == ("vslpipe", "MoE-Lens")
    assert (figures.num_rows, figures.generated_tokens) == (12, 72)
    assert figures.prefill_s > 0
    assert figures.model is not None
    assert figures.pinned_bytes_per_s == hardware_preset("l4").htod_bytes_per_s
    assert 0 < figures.model.link_bytes_per_s <= 1.01 * figures.pinned_bytes_per_s
    assert 0 < figures.model.busy.htod < 1
    assert 0 < figures.share_of_bound < 1
    assert json.loads(lines)["derived"]["tokens_per_s"] == figures.tokens_per_s
    trace = json.loads((tmp_path / f"{result.settings.file_name}.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"predicted", "measured"}
    assert "12 rows" in (tmp_path / f"{result.settings.file_name}.svg").read_text()
    assert "| vslpipe | 12 |" in (tmp_path / "report.md").read_text()

    assert bench(tmp_path, *contenders("vslpipe")) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert "was measured" in second.err
    assert (tmp_path / "gpu.jsonl").read_text() == lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contender", "cgopip"], "unknown --contender of the suite gpu 'cgopip'"),
        (["--shape", "mixtral"], "unknown --shape of the suite gpu 'mixtral'"),
        (["--workload", "W1"], "unknown --workload of the suite gpu 'W1'"),
        (["--device", "cpu"], "unknown --device 'cpu'"),
        (["--device", "cuda", "--hardware", "l4"], "is for --device emulated"),
        (["--hardware", "l5"], "unknown hardware preset 'l5'"),
        (["--suite", "tpu"], "unknown suite 'tpu'"),
    ],
)
def test_options_that_do_not_exist_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "gpu.jsonl").exists()


@pytest.mark.slow
def test_every_contender_runs_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path) == 0
    results = read_results(tmp_path / "gpu.jsonl")
    assert [result.settings.contender for result in results] == list(GPU_CONTENDERS)
    for result in results[:-1]:
        assert result.figures is not None, result.reason
        assert result.figures.generated_tokens == 72
        assert result.figures.policy == SCHEDULES[result.settings.contender].paper
        assert 0 < result.figures.share_of_bound < 1
    assert (results[-1].status, results[-1].settings.contender) == (Status.SKIPPED, ACCELERATE)
    table = capsys.readouterr().out
    assert all(name in table for name in GPU_CONTENDERS)
    (bars,) = tmp_path.glob("tiny-smoke-????????.svg")
    assert all(name in bars.read_text() for name in SCHEDULES)
    for picture in tmp_path.glob("*.svg"):
        ET.parse(picture)


@pytest.mark.slow
def test_a_part_that_fails_does_not_end_the_suite_and_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_small = ("--device-memory", "100MiB", *contenders("raymoe", ACCELERATE))
    assert bench(tmp_path, *too_small) == 1
    shown = capsys.readouterr()
    assert "1 of 2 measurements failed (tiny smoke raymoe)" in " ".join(shown.err.split())
    assert "raymoe failed: InfeasiblePlanError: " in " ".join(shown.out.split())
    failed, skipped = read_results(tmp_path / "gpu.jsonl")
    assert (failed.status, skipped.status) == (Status.FAILED, Status.SKIPPED)
    assert "of device memory" in failed.reason
    log = (tmp_path / "logs" / f"{failed.settings.file_name}.log").read_text()
    assert "Traceback" in log
    assert bench(tmp_path, *too_small) == 1
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 4
    assert bench(tmp_path, *contenders("cgopipe")) == 0
    assert bench(tmp_path, *contenders("cgopipe"), "--again") == 0
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 6
    assert len(read_results(tmp_path / "gpu.jsonl")) == 3
    assert "- raymoe failed: " in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_a_suite_that_is_terminated_ends_its_part(tmp_path: Path) -> None:
    """The part sleeps for a minute at its start and notes its process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, sys, time\n"
        "if 'raymoe.bench.gpu.part' in sys.orig_argv:\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    paths = [str(tmp_path), *sys.path]
    suite = subprocess.Popen(
        [sys.executable, "-c", "from raymoe.cli import main; main()", "bench", "--suite", "gpu",
         "--device", "emulated", *SMALL, *contenders("vslpipe"), "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    part_id = int((tmp_path / "pid").read_text())
    suite.terminate()
    assert suite.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(part_id, 0)
    assert not (tmp_path / "out" / "gpu.jsonl").exists()


class FakeProfile:
    """Notes that a step ran inside it."""

    share = 0.0

    def __enter__(self) -> None:
        assert self.share == 0.0

    def __exit__(self, *_: object) -> None:
        self.share = 0.25


def cuda_part(contender: str) -> PartSettings:
    return PartSettings(
        node=NodeSettings(device="cuda"),
        shape="tiny",
        num_layers=4,
        workload="smoke",
        contender=contender,
        limit_s=120.0,
        max_rows=12,
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("contender", ["raymoe", "cgopipe", "module_batching", "flexgen_s4"])
def test_the_engine_of_a_part_runs_on_a_gpu_that_works_later_than_asked(
    contender: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_native_kernels: list[DeferredCuda],
) -> None:
    cuda = DeferredCuda(delay=0.4)
    without_native_kernels.append(cuda)
    use_device(monkeypatch, lambda *_, **__: CudaDevice(cuda, GIB))
    monkeypatch.setattr(engines, "pinned_bytes_per_s", lambda *_: 10e9)
    node = hardware_preset("l4")
    memory = HostMemory(2 * GIB)
    monkeypatch.setattr(engines, "KernelProfile", FakeProfile)
    figures = engines.measure_engine(cuda_part(contender), node, tmp_path, memory)
    assert figures.model.kernel_share == 0.25
    schedule = "resident" if contender == "raymoe" else contender
    assert (figures.schedule, figures.num_rows) == (schedule, 12)
    assert figures.pinned_bytes_per_s == 10e9
    assert figures.model is not None
    assert figures.model.busy.gpu > 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("max_rows", [4, 10_000])
def test_accelerate_runs_a_batch_wherever_torch_does(max_rows: int) -> None:
    settings = PartSettings(
        node=NodeSettings(device="cpu"),
        shape="tiny",
        num_layers=4,
        workload="smoke",
        contender=ACCELERATE,
        limit_s=40.0,
        max_rows=max_rows,
    )
    node = hardware_preset("l4")
    small = replace(node, gpu_memory_bytes=1_080_000_000)
    figures = engines.measure_accelerate(settings, small, "cpu")
    assert 0 < figures.prefill_s < figures.total_s
    assert figures.generated_tokens == 6 * figures.num_rows
    assert (figures.num_rows == 4) == (max_rows == 4)


def test_without_accelerate_its_part_is_left_out_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _name: None)
    monkeypatch.setattr(part, "cap_device", lambda *_: None)
    monkeypatch.setattr(part, "device_name", lambda *_: "a GPU")
    memory = HostMemory(GIB)
    result = part.run_part(cuda_part(ACCELERATE), hardware_preset("l4"), tmp_path, memory)
    assert (result.status, result.figures) == (Status.SKIPPED, None)
    assert result.reason == "accelerate is not installed; pip install accelerate"
