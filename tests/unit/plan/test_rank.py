"""One more step of a resource is more of it, as given or as measured, and of nothing else."""

from dataclasses import fields

import pytest

from raymoe.plan.rank import next_steps
from raymoe.specs.hardware import Curve, DeviceCurves, HardwareSpec, HostCurves, hardware_preset
from raymoe.units import GIB

L4 = hardware_preset("l4")
FIELDS = {
    "GPU memory": {"gpu_memory_bytes"},
    "host memory": {"host_memory_bytes"},
    "link": {"htod_bytes_per_s", "dtoh_bytes_per_s"},
    "cores": {"num_cores", "host_bytes_per_s", "host_flop_per_s", "host_copy_bytes_per_s"},
    "GPU rate": {"gpu_flop_per_s", "gpu_bytes_per_s"},
}


def curve(value: float) -> Curve:
    return Curve(((1.0, value), (64.0, 3 * value)))


def measured(*, has_gpu: bool = True) -> HardwareSpec:
    """A node with curves, all of whose rates differ."""
    host = HostCurves(
        **{
            field.name: 10.0 + i if field.type is float else curve(20.0 + i)
            for i, field in enumerate(fields(HostCurves))
        }
    )
    device = DeviceCurves(
        **{
            field.name: 30.0 + i if field.type in {float, float | None} else curve(40.0 + i)
            for i, field in enumerate(fields(DeviceCurves))
        }
    )
    node = {field.name: getattr(L4, field.name) for field in fields(L4)}
    spec = HardwareSpec(**{**node, "host_curves": host, "device_curves": device})
    return spec if has_gpu else spec.without_gpu()


def changed(before: object, after: object) -> set[str]:
    names = [field.name for field in fields(before)]  # type: ignore[arg-type]
    return {name for name in names if getattr(before, name) != getattr(after, name)}


def test_a_step_changes_one_resource() -> None:
    steps = {step.resource: step for step in next_steps(L4)}
    assert {name: changed(L4, step.hardware) for name, step in steps.items()} == FIELDS
    assert steps["GPU memory"].hardware.gpu_memory_bytes == L4.gpu_memory_bytes + 8 * GIB
    assert steps["host memory"].hardware.host_memory_bytes == int(1.5 * L4.host_memory_bytes)
    for name in ("link", "cores", "GPU rate"):
        for field in FIELDS[name]:
            assert getattr(steps[name].hardware, field) == 2 * getattr(L4, field)
    assert [(step.before, step.after) for step in steps.values()] == [
        ("22.50 GiB", "30.50 GiB"),
        ("163.20 GiB", "244.80 GiB"),
        ("12.3 GB/s", "24.7 GB/s"),
        ("24 with 82 GB/s", "48 with 163 GB/s"),
        ("60 TFLOP/s", "120 TFLOP/s"),
    ]


def test_measured_curves_follow() -> None:
    """Every curve belongs to one of the steps, and is twice as high there."""
    node = measured()
    of_host = {field.name for field in fields(HostCurves)}
    of_device: list[str] = []
    for step in next_steps(node):
        spec = step.hardware
        assert changed(node.host_curves, spec.host_curves) == (
            of_host if step.resource == "cores" else set()
        )
        faster = changed(node.device_curves, spec.device_curves)
        of_device += faster
        for name in faster:
            before, after = getattr(node.device_curves, name), getattr(spec.device_curves, name)
            if isinstance(before, Curve):
                assert after.points == tuple((size, 2 * rate) for size, rate in before.points)
            else:
                assert after == 2 * before
    assert sorted(of_device) == sorted(field.name for field in fields(DeviceCurves))


@pytest.mark.parametrize("node", [L4.without_gpu(), measured(has_gpu=False)])
def test_a_host_alone_has_two_steps(node: HardwareSpec) -> None:
    assert [step.resource for step in next_steps(node)] == ["host memory", "cores"]
    for step in next_steps(node):
        assert not step.hardware.has_gpu
