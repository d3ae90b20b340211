"""Rates of a link by size, and what is said of a slow one."""

from pathlib import Path

import pytest

from raymoe.doctor import kernels, model, rates
from raymoe.doctor.examine import Status, Target
from raymoe.measure.gpu import LinkCopies
from raymoe.units import GB, MIB
from tests.unit.device.fake_cuda import FakeCuda

ROWS = [(MIB, (5 * GB, 4 * GB, 2 * GB, 1 * GB)), (64 * MIB, (12 * GB, 11 * GB, 6 * GB, 3 * GB))]


def test_each_direction_and_kind_of_memory_is_timed() -> None:
    api = FakeCuda()

    def copy(steps: int):
        return lambda: [api.launch(lambda: None) for _ in range(steps)]

    copies = LinkCopies(
        num_bytes=6000, htod=copy(1), dtoh=copy(2), pageable_htod=copy(3), pageable_dtoh=copy(5)
    )
    found = rates.link_rates(api, copies)
    # The fake device takes a second for a step, and another for the event after the only call.
    assert found == pytest.approx((6000 / 2, 6000 / 3, 6000 / 4, 6000 / 6))


@pytest.mark.parametrize(
    ("expected", "status"),
    [(None, Status.OK), (12.3 * GB, Status.OK), (24.3 * GB, Status.WARNING)],
)
def test_a_link_far_below_that_of_the_card_is_told(expected: float | None, status: Status) -> None:
    found = rates.link_outcome(ROWS, expected)
    assert found.status == status
    assert "64.00 MiB 12.0 / 11.0 (6.0 / 3.0)" in found.value
    assert ("24.3" in found.advice) == (status == Status.WARNING)


@pytest.mark.parametrize(
    ("width", "status"), [("16", Status.OK), ("8", Status.WARNING), (None, Status.SKIPPED)]
)
def test_lanes_of_the_bus(width: str | None, status: Status, tmp_path: Path) -> None:
    if width is not None:
        for name, text in (
            ("current_link_speed", "16.0 GT/s PCIe"), ("current_link_width", width),
            ("max_link_speed", "16.0 GT/s PCIe"), ("max_link_width", "16"),
        ):  # fmt: skip
            (tmp_path / name).write_text(f"{text}\n")
    assert rates.pci_outcome(tmp_path).status == status


def test_a_driver_without_a_gpu_that_torch_sees_is_a_failure(tmp_path: Path) -> None:
    assert rates.no_gpu(tmp_path).status == Status.SKIPPED
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    assert rates.no_gpu(tmp_path).status == Status.FAILED


class Registrar:
    """Pins memory, or refuses with a reason."""

    reason: str | None = None

    def register(self, _address: int, _num_bytes: int) -> str | None:
        return self.reason

    def unregister(self, _address: int) -> None:
        """Nothing is locked."""


@pytest.mark.parametrize("reason", [None, "out of memory"])
def test_refused_pinning_is_a_failure(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "PIN_BYTES", MIB)
    monkeypatch.setattr(rates, "TorchCuda", Registrar)
    monkeypatch.setattr(Registrar, "reason", reason)
    found = rates.pinning()
    assert found.status == (Status.OK if reason is None else Status.FAILED)
    assert (reason or "1.00 MiB at") in found.value


@pytest.mark.parametrize(
    ("capability", "taken", "statuses"),
    [
        ((8, 9), 0.01, (Status.OK, Status.OK)),
        ((7, 5), 0.01, (Status.WARNING, Status.OK)),
        ((9, 0), 0.3, (Status.OK, Status.WARNING)),
    ],
)
def test_an_old_card_and_memory_of_others_are_told(
    capability: tuple[int, int],
    taken: float,
    statuses: tuple[Status, Status],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, total = rates.torch.cuda, 24 * GB
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA Something")
    monkeypatch.setattr(cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (round((1 - taken) * total), total))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(rates.torch, "zeros", lambda *_, **__: None)
    assert (rates.gpu().status, rates.gpu_memory().status) == statuses


def test_with_a_gpu_more_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_compute", lambda *_: None)
    monkeypatch.setattr(rates.torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(rates.torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(kernels, "why_not_here", lambda *_: None)
    cpu, cuda = (
        [check.name for section in (kernels, model) for check in section.checks(Target(device=it))]
        for it in ("cpu", "cuda")
    )
    of_cpu = [name for name in cpu if name.startswith("CPU")]
    assert [name for name in cuda if name.startswith("CPU")] == of_cpu
    assert "GPU experts, mxfp4, float16" in cuda
    assert "GPU experts of humming-kernels, mxfp4, float16" in cuda
    assert "GPU latent attention, float32" in cuda
    assert "cgopipe on cuda, float32" in cuda
    assert "module_batching on cuda, float16" in cuda
    assert "module_batching on cuda, bfloat16" not in cuda
