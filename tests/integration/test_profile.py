"""`raymoe profile` on sizes that take no time: every number is there, kept, and planned with."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from raymoe import _native, cli
from raymoe.device.threads import set_num_threads
from raymoe.measure import host, jobs, profile
from raymoe.measure.jobs import AttentionShape, ExpertsShape
from raymoe.specs.hardware import Curve, HardwareSpec
from raymoe.units import MIB
from tests.unit.specs.test_hardware import MEASURED


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of all kinds at the ends of their sizes."""
    sizes = {
        "HIDDEN_SIZE": 256,
        "PROJECTED_SIZE": 512,
        "EXPERTS": ExpertsShape(hidden_size=256, expert_size=128, num_experts=8, top_k=2),
        "HEADS": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64),
        "CROWDED_HEADS": AttentionShape(num_heads=32, num_kv_heads=2, head_dim=64),
        "ROWS": (1, 64),
        "EXPERT_TOKENS": (1, 256),
        "CACHED_TOKENS": 2048,
        "CONTEXTS": (32, 512),
        "PREFILL_TOKENS": 256,
        "PROMPTS": (32, 256),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(host, name, value)
    monkeypatch.setattr(jobs, "MIN_WEIGHT_BYTES", MIB)
    monkeypatch.setattr(jobs, "MIN_CACHE_BYTES", MIB)
    monkeypatch.setattr(profile, "PAGE_BYTES", MIB)


@pytest.mark.usefixtures("small")
def test_everything_is_measured_on_the_cores(tmp_path: Path) -> None:
    node = profile.measure_machine(2, seconds=1.0)
    curves = node.host_curves
    assert curves is not None
    assert node.num_cores == 2
    assert not node.has_gpu
    assert node.host_copy_bytes_per_s > 0
    found = {name: getattr(curves, name) for name in curves.__slots__}
    sizes = {
        name: [size for size, _ in curve.points]
        for name, curve in found.items()
        if isinstance(curve, Curve)
    }
    assert sizes == {
        "product_flop_per_s": [1, 64],
        "expert_flop_per_s": [1, 64],
        "attention_bytes_per_s": [32, 512],
        "attention_bytes_per_s_of_threads": [1, 2],
        "prefill_flop_per_s": [32, 256],
        "task_overhead_s": list(host.TOKENS),
    }
    node.to_file(tmp_path / "node.json")
    assert HardwareSpec.from_file(tmp_path / "node.json") == node


@pytest.mark.usefixtures("small")
def test_the_kernels_have_their_threads_back() -> None:
    set_num_threads(1)
    host.measure_host_curves(dataclasses.replace(MEASURED, num_cores=2), 0.1)
    assert _native.num_threads() == 2


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[float]]:
    """Let measuring give a node of the test; returns the seconds of every measurement."""
    asked: list[float] = []

    def stand_in(num_threads: int | None, seconds: float) -> HardwareSpec:
        asked.append(seconds)
        return dataclasses.replace(MEASURED, name=f"node {len(asked)}")

    monkeypatch.setattr(profile, "measure_machine", stand_in)
    return lambda: asked


def test_a_machine_is_measured_once(
    measure: Callable[[], list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, path = profile.obtain_profile(tmp_path, 2)
    assert profile.obtain_profile(tmp_path, 2) == (node, path)
    assert profile.load_profile(tmp_path, profile.identify_machine(2)) == node
    assert len(measure()) == 1
    again, _ = profile.obtain_profile(tmp_path, 2, is_fresh=True)
    assert again.name == "node 2"
    assert profile.obtain_profile(tmp_path, 2)[0] == again
    profile.obtain_profile(tmp_path, 1)
    assert len(measure()) == 3


def test_the_command_shows_keeps_and_writes_all_rates(
    measure: Callable[[], list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "node.json"
    assert cli.run(["profile", "--seconds", "7", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert measure() == [7.0]
    assert HardwareSpec.from_file(out).name == "node 1"
    for text in (
        "node 1: 2 threads", "projection", "16 rows", "82 GFLOP/s", "decode attention, many heads",
        "140 GFLOP/s", "both directions at once", "11.0 GB/s", "during attention on", "9.0 GB/s",
    ):  # fmt: skip
        assert text in shown.out
    assert cli.run(["profile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    assert cli.run(["profile", "--again"]) == 0
    assert measure() == [7.0, profile.USUAL_SECONDS]


@pytest.mark.parametrize(
    "arguments", [["--seconds", "61"], ["--num-threads", "0"], ["--out", "absent/node.json"]]
)
def test_bad_usage_is_refused_before_anything_is_measured(
    arguments: list[str], measure: Callable[[], list[float]]
) -> None:
    assert cli.run(["profile", *arguments]) == 2
    assert measure() == []
