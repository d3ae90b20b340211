"""What an engine takes from the GPU that it finds: free memory, cores beside its lanes, a type."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raymoe.config import EngineConfig, SamplingParams, Settings
from raymoe.engine import load
from raymoe.engine import node as engine_node
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError, PerformanceWarning
from raymoe.plan.plan import Plan
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec
from raymoe.specs.presets_models import model_preset
from raymoe.units import GIB
from tests.tiny import make_checkpoint

PROFILE = replace(HARDWARE_PRESETS["l4"], name="kept", num_cores=16)
FREE = 19 * GIB


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_node, "free_gpu_bytes", lambda: FREE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A10G")


def node(
    measured: HardwareSpec, monkeypatch: pytest.MonkeyPatch, **options: object
) -> HardwareSpec:
    monkeypatch.setattr(engine_node, "measured_host", lambda *_: measured)
    return engine_node.find_node(EngineConfig(device="cuda", **options), Settings(), "cuda")  # type: ignore[arg-type]


def test_memory_is_what_is_free_now_not_what_the_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node(PROFILE, monkeypatch).gpu_memory_bytes == FREE
    assert node(PROFILE, monkeypatch, device_memory_bytes=GIB).gpu_memory_bytes == GIB


def test_a_card_without_a_profile_has_the_rates_of_its_preset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = node(PROFILE.without_gpu(), monkeypatch)
    assert found.gpu_bytes_per_s == HARDWARE_PRESETS["a10"].gpu_bytes_per_s
    assert found.gpu_memory_bytes == FREE


def test_a_card_without_a_profile_or_a_preset_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(host: HardwareSpec, free_bytes: int) -> HardwareSpec:
        assert not host.has_gpu
        return replace(host.with_gpu_of(PROFILE, free_bytes), gpu_flop_per_s=71e12)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(engine_node, "measure_gpu_quickly", measure)
    with caplog.at_level("INFO", logger=engine_node.__name__):
        found = node(PROFILE.without_gpu(), monkeypatch)
    assert (found.gpu_flop_per_s, found.gpu_memory_bytes) == (71e12, FREE)
    assert "no preset has the rates of the GPU 'NVIDIA GeForce RTX 3090'; measured: 71 TFLOP/s" in (
        caplog.text
    )


@pytest.mark.parametrize(("cores", "left"), [(16, 14), (4, 2), (3, 2), (2, 1), (1, 1)])
def test_kernels_leave_cores_to_the_threads_that_feed_a_gpu(
    cores: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(PROFILE, num_cores=cores)
    assert node(machine, monkeypatch).num_cores == left
    assert node(machine, monkeypatch, num_threads=cores).num_cores == cores


class Stored:
    dtype = torch.bfloat16


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_the_usual_type_is_one_that_the_gpu_multiplies(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bfloat16)

    def dtype_of(model: str, device: str = "cuda", dtype: str = "auto") -> str:
        config, spec = EngineConfig(dtype=dtype), model_preset(model)
        return load._with_dtype(config, spec, Stored(), device).dtype

    assert dtype_of("mixtral-8x7b", "cpu") == "auto"
    assert dtype_of("gpt-oss-20b", dtype="bfloat16") == "bfloat16"
    if has_bfloat16:
        assert dtype_of("mixtral-8x7b") == dtype_of("gpt-oss-20b") == "auto"
        return
    with pytest.warns(PerformanceWarning, match="computing in float16"):
        assert dtype_of("mixtral-8x7b") == "float16"
    with pytest.raises(ConfigError, match="gpt_oss overflow in float16"):
        dtype_of("gpt-oss-20b")


SLOW_GPU = replace(PROFILE, num_cores=1, gpu_flop_per_s=1e6, host_memory_bytes=8 * GIB)
FAST_GPU = replace(PROFILE, num_cores=1, host_flop_per_s=1e6)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)


class ChosenError(Exception):
    """Raised instead of loading, with the configuration and the plan."""


def chosen(
    model: Path, node: HardwareSpec, monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[EngineConfig, Plan]:
    def stop(*arguments: object, **named: object) -> None:
        raise ChosenError(arguments[3], named["plan"])

    monkeypatch.setattr(load, "_load_plan", stop)
    config = EngineConfig(hardware=node, load_format="dummy", max_model_len=128, **options)  # type: ignore[arg-type]
    with pytest.raises(ChosenError) as caught:
        load.load_parts(model, config)
    config, plan = caught.value.args
    return config, plan


@pytest.mark.slow
@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore:.*computing in float16")
def test_the_cores_alone_run_a_job_that_a_gpu_would_slow_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the type of the checkpoint, not the float16 that the GPU would need."""
    model = make_checkpoint(tmp_path / "model")
    config_file = model / "config.json"
    config_file.write_text(config_file.read_text().replace('"float32"', '"bfloat16"'))
    config, plan = chosen(model, SLOW_GPU, monkeypatch)
    assert (config.device, config.dtype, plan.schedule) == ("cpu", "auto", "in_place")
    assert "the GPU stays idle" in plan.note
    config, plan = chosen(model, FAST_GPU, monkeypatch)
    assert (config.device, config.dtype, plan.schedule) == ("auto", "float16", "resident")
    for options in ({"device": "cuda"}, {"schedule": "resident"}):
        config, plan = chosen(model, SLOW_GPU, monkeypatch, **options)
        assert (config.dtype, plan.note) == ("float16", "")
        assert plan.schedule != "in_place"
    config, plan = chosen(model, FAST_GPU, monkeypatch, schedule="in_place")
    assert (config.dtype, plan.schedule, plan.note) == ("auto", "in_place", "")


@pytest.mark.usefixtures("cuda")
def test_tokens_of_an_idle_gpu_are_those_of_the_cores(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    rows = {}
    for device in ("auto", "cpu"):
        config = EngineConfig(device=device, hardware=SLOW_GPU, max_model_len=128)
        with Engine.from_pretrained(model, config) as engine:
            assert engine.plan is not None
            assert engine.plan.schedule == "in_place"
            rows[device] = engine.generate(["one", "two"], SamplingParams(max_tokens=8))
    assert [row.token_ids for row in rows["auto"]] == [row.token_ids for row in rows["cpu"]]


@pytest.mark.parametrize(
    ("options", "has_gpu", "is_told"),
    [({}, True, True), ({}, False, False), ({"device": "cpu"}, True, False),
     ({"schedule": "in_place"}, True, False)],
)  # fmt: skip
def test_a_gpu_that_torch_does_not_see_is_told_where_the_device_is_auto(
    options: dict[str, str],
    has_gpu: bool,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr(load, "has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(load, "why_no_gpu", lambda: "the driver is too old")
    load._check_gpu(EngineConfig(**options), "cpu")  # type: ignore[arg-type]
    told = [str(each.message) for each in recwarn]
    said = "there is an NVIDIA GPU or its driver, but the engine runs on the CPU: "
    said += "the driver is too old. "
    assert told == [f"{said}device='cpu' says that this is meant"] * is_told
