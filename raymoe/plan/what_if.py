"""What one more step of each resource of a node would be: nodes to plan for, one by one.

A step is what the next offer has: a larger card of the same kind, half as much memory again, the
next generation of the link, twice the cores with their memory channels, a GPU twice as fast.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from raymoe.specs.hardware import Curve, DeviceCurves, HardwareSpec, HostCurves
from raymoe.units import GB, GIB, TB, format_bytes

MORE_DEVICE_BYTES = 8 * GIB
HOST_MEMORY_FACTOR = 1.5
RATE_FACTOR = 2

Rates = TypeVar("Rates", HardwareSpec, HostCurves, DeviceCurves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A node that has more of one thing.

    Attributes:
        resource: What there is more of.
        before: How much of it the node has.
        after: How much it would have.
        hardware: The node with it.
    """

    resource: str
    before: str
    after: str
    hardware: HardwareSpec


def next_steps(node: HardwareSpec) -> Iterator[Step]:
    """One step of each resource; those of the GPU and its link only where there is one."""
    host_memory = int(HOST_MEMORY_FACTOR * node.host_memory_bytes)
    if node.has_gpu:
        device_memory = node.gpu_memory_bytes + MORE_DEVICE_BYTES
        more = replace(node, gpu_memory_bytes=device_memory)
        yield _step("GPU memory", node, more, _device_memory)
    yield _step("host memory", node, replace(node, host_memory_bytes=host_memory), _host_memory)
    if node.has_gpu:
        yield _step("link", node, _with_faster_link(node), _link)
    yield _step("cores", node, _with_faster_host(node), _host)
    if node.has_gpu:
        yield _step("GPU rate", node, _with_faster_gpu(node), _gpu)


def _step(
    resource: str, node: HardwareSpec, more: HardwareSpec, describe: Callable[[HardwareSpec], str]
) -> Step:
    return Step(resource=resource, before=describe(node), after=describe(more), hardware=more)


def _with_faster_link(node: HardwareSpec) -> HardwareSpec:
    curves = node.device_curves
    if curves is not None:
        names = [field.name for field in fields(curves) if "htod" in field.name]
        names += [field.name for field in fields(curves) if "dtoh" in field.name]
        curves = _faster(curves, *names)
    return replace(_faster(node, "htod_bytes_per_s", "dtoh_bytes_per_s"), device_curves=curves)


def _with_faster_host(node: HardwareSpec) -> HardwareSpec:
    """All that the cores do, measured alone or beside the link."""
    host, device = node.host_curves, node.device_curves
    if host is not None:
        host = _faster(host, *(field.name for field in fields(host)))
    if device is not None:
        device = _faster(device, "busy_attention_bytes_per_s")
    names = ("num_cores", "host_bytes_per_s", "host_flop_per_s", "host_copy_bytes_per_s")
    return replace(_faster(node, *names), host_curves=host, device_curves=device)


def _with_faster_gpu(node: HardwareSpec) -> HardwareSpec:
    curves = node.device_curves
    if curves is not None:
        curves = _faster(curves, "product_flop_per_s", "expert_flop_per_s")
    return replace(_faster(node, "gpu_flop_per_s", "gpu_bytes_per_s"), device_curves=curves)


def _faster(rates: Rates, *names: str) -> Rates:
    """The same with some numbers or curves multiplied."""
    changes: dict[str, Any] = {}
    for name in names:
        value = getattr(rates, name)
        is_curve = isinstance(value, Curve)
        changes[name] = value.scaled(RATE_FACTOR) if is_curve else RATE_FACTOR * value
    return replace(rates, **changes)


def _device_memory(node: HardwareSpec) -> str:
    return format_bytes(node.gpu_memory_bytes)


def _host_memory(node: HardwareSpec) -> str:
    return format_bytes(node.host_memory_bytes)


def _link(node: HardwareSpec) -> str:
    return f"{node.htod_bytes_per_s / GB:.1f} GB/s"


def _host(node: HardwareSpec) -> str:
    return f"{node.num_cores} with {node.host_bytes_per_s / GB:.0f} GB/s"


def _gpu(node: HardwareSpec) -> str:
    return f"{node.gpu_flop_per_s / TB:.0f} TFLOP/s"
