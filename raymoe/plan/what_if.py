"""What one more step of each resource of a node would be: nodes to plan for, one by one.

A step is what the next offer has: a larger card of the same kind, half as much memory again, the
next generation of the link, twice the cores with their memory channels, a GPU twice as fast.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from raymoe.specs.hardware import HardwareSpec
from raymoe.units import GB, GIB, TB, format_bytes

MORE_DEVICE_BYTES = 8 * GIB
HOST_MEMORY_FACTOR = 1.5
RATE_FACTOR = 2

LINK_FIELDS = ("htod_bytes_per_s", "dtoh_bytes_per_s")
HOST_FIELDS = ("num_cores", "host_bytes_per_s", "host_flop_per_s", "host_copy_bytes_per_s")
GPU_FIELDS = ("gpu_flop_per_s", "gpu_bytes_per_s")


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
    device_memory = node.gpu_memory_bytes + MORE_DEVICE_BYTES
    host_memory = int(HOST_MEMORY_FACTOR * node.host_memory_bytes)
    steps: tuple[tuple[str, HardwareSpec, Callable[[HardwareSpec], str]], ...] = (
        ("host memory", replace(node, host_memory_bytes=host_memory), _host_memory),
        ("cores, host bandwidth", _faster(node, HOST_FIELDS), _cores),
    )
    if node.has_gpu:
        steps = (
            ("GPU memory", replace(node, gpu_memory_bytes=device_memory), _device_memory),
            *steps,
            ("link", _faster(node, LINK_FIELDS), _link),
            ("GPU rate", _faster(node, GPU_FIELDS), _gpu),
        )
    for resource, hardware, describe in steps:
        yield Step(
            resource=resource, before=describe(node), after=describe(hardware), hardware=hardware
        )


def _faster(node: HardwareSpec, fields: tuple[str, ...]) -> HardwareSpec:
    return replace(node, **{field: RATE_FACTOR * getattr(node, field) for field in fields})


def _device_memory(node: HardwareSpec) -> str:
    return format_bytes(node.gpu_memory_bytes)


def _host_memory(node: HardwareSpec) -> str:
    return format_bytes(node.host_memory_bytes)


def _link(node: HardwareSpec) -> str:
    return f"{node.htod_bytes_per_s / GB:.1f} GB/s"


def _cores(node: HardwareSpec) -> str:
    return f"{node.num_cores} cores, {node.host_bytes_per_s / GB:.0f} GB/s"


def _gpu(node: HardwareSpec) -> str:
    return f"{node.gpu_flop_per_s / TB:.0f} TFLOP/s, {node.gpu_bytes_per_s / GB:.0f} GB/s"
