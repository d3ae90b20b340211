"""What an engine takes from the GPU that it finds: free memory, cores beside its lanes, a type."""

from dataclasses import replace

import pytest
import torch

from raymoe.config import EngineConfig, Settings
from raymoe.engine import loading
from raymoe.errors import ConfigError, PerformanceWarning
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec
from raymoe.specs.presets_models import model_preset
from raymoe.units import GIB

PROFILE = replace(HARDWARE_PRESETS["l4"], name="kept", num_cores=16)
FREE = 19 * GIB


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_gpu_bytes", lambda: FREE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A10G")


def node(
    measured: HardwareSpec, monkeypatch: pytest.MonkeyPatch, **options: object
) -> HardwareSpec:
    monkeypatch.setattr(loading, "measured_host", lambda *_: measured)
    return loading.find_node(EngineConfig(device="cuda", **options), Settings(), "cuda")  # type: ignore[arg-type]


def test_memory_is_what_is_free_now_not_what_the_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node(PROFILE, monkeypatch).gpu_memory_bytes == FREE
    assert node(PROFILE, monkeypatch, device_memory_bytes=GIB).gpu_memory_bytes == GIB


def test_a_card_without_a_profile_has_the_rates_of_its_preset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = node(PROFILE.without_gpu(), monkeypatch)
    assert found.gpu_bytes_per_s == HARDWARE_PRESETS["a10"].gpu_bytes_per_s
    assert found.gpu_memory_bytes == FREE
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Tesla V100")
    with pytest.raises(ConfigError, match="'NVIDIA Tesla V100' is none of the presets"):
        node(PROFILE.without_gpu(), monkeypatch)


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
        return loading._with_dtype(config, spec, Stored(), device).dtype

    assert dtype_of("mixtral-8x7b", "cpu") == "auto"
    assert dtype_of("gpt-oss-20b", dtype="bfloat16") == "bfloat16"
    if has_bfloat16:
        assert dtype_of("mixtral-8x7b") == dtype_of("gpt-oss-20b") == "auto"
        return
    with pytest.warns(PerformanceWarning, match="computing in float16"):
        assert dtype_of("mixtral-8x7b") == "float16"
    with pytest.raises(ConfigError, match="gpt_oss overflow in float16"):
        dtype_of("gpt-oss-20b")
