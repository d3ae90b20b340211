"""What a step that ran out of device memory teaches the next engine, also that of a new process."""

from pathlib import Path

import pytest
import torch

from raymoe.config import NO_DIRECTORY
from raymoe.engine.device_memory import (
    DeviceMemory,
    log_free_memory,
    missing_bytes,
)
from raymoe.errors import CapacityError, ConfigError, ExecutionError
from raymoe.units import GIB, MIB

# As torch words it, in the error of a lane.
FULL = ExecutionError(
    "task post 3 on lane gpu of schedule 'cgopipe' failed: OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 22.03 GiB of which 310.06 MiB is "
    "free. Including non-PyTorch memory, this process has 21.73 GiB memory in use."
)


@pytest.fixture
def kept(tmp_path: Path) -> DeviceMemory:
    return DeviceMemory.of(tmp_path, "NVIDIA L4", "mixtral")


@pytest.mark.parametrize(
    ("error", "num_bytes"),
    [
        (FULL, 3 * GIB // 2),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), 512 * MIB),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes."), 512 * MIB),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), 512 * MIB),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 512 * MIB),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), 512 * MIB),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (CapacityError("the GPU has no 2.00 GiB left for weights"), None),
        (MemoryError("Unable to allocate 1.00 GiB"), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_was_missing_is_read_from_the_error(error: Exception, num_bytes: int | None) -> None:
    assert missing_bytes(error) == num_bytes


def test_the_reserve_grows_with_each_failure_and_belongs_to_a_model_and_a_gpu(
    kept: DeviceMemory, tmp_path: Path
) -> None:
    assert kept.reserve_bytes() == 0
    kept.learn(FULL)
    again = DeviceMemory.of(tmp_path, "NVIDIA L4", "mixtral")  # of another process
    assert again.reserve_bytes() == 3 * GIB // 2
    again.learn(FULL)
    again.learn(ValueError("no token"))
    assert kept.reserve_bytes() == 3 * GIB
    assert DeviceMemory.of(tmp_path, "NVIDIA L4", "qwen3").reserve_bytes() == 0
    assert DeviceMemory.of(tmp_path, "NVIDIA A10G", "mixtral").reserve_bytes() == 0


def test_who_plans_is_told_how_to_undo_it(
    kept: DeviceMemory, caplog: pytest.LogCaptureFixture
) -> None:
    kept.learn(torch.OutOfMemoryError("CUDA out of memory."))
    assert "the next engine leaves 512.00 MiB of it free" in caplog.text
    kept.reserve_bytes()
    assert f"remove {kept.path} to plan with all" in caplog.text


def test_where_nothing_can_be_kept_advice_is_given(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = DeviceMemory.of(NO_DIRECTORY, "NVIDIA L4", "mixtral")
    nowhere.learn(FULL)
    assert "give it a smaller device_memory_bytes" in caplog.text
    assert nowhere.reserve_bytes() == 0


@pytest.mark.parametrize("content", ["{", "{}", "[3]", '{"reserve_bytes": -1}'])
def test_a_damaged_file_is_refused(kept: DeviceMemory, content: str) -> None:
    kept.path.write_text(content)
    with pytest.raises(ConfigError, match="reserve"):
        kept.reserve_bytes()


def test_free_memory_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * GIB, 22 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: GIB)
    with caplog.at_level("INFO"):
        log_free_memory("after a first token")
    assert (
        "after a first token: 3.00 GiB of 22.00 GiB are free, and torch has 1.00 GiB at hand"
        in caplog.text
    )
