"""The least time of a job on a node with a GPU: bytes and operations at the rates of the node.

Whatever the schedule, no job is faster, under these assumptions:

- A pass gives every live sequence one token, so there are as many passes as the longest row has
  tokens, and as many as it takes for the KV of all rows to go through the memory of the node.
- The GPU computes the experts. The weights that a pass reads cross the link, but for those that
  the device holds; with the mean number of tokens, so many distinct experts are expected.
- KV is read once in each pass that extends it, from host memory unless the device holds it. What
  the device holds is weights or KV, not both.
- Operations run on the GPU and on the cores at once; nothing waits for anything else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from raymoe.plan.work import LayerWork, ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.workload import Workload


class Limit(StrEnum):
    """What a node may run out of first."""

    LINK = "link"
    HOST_MEMORY = "host memory"
    GPU = "operations"
    GPU_MEMORY = "GPU memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBound:
    """Seconds that each part of the node needs at least; the longest binds.

    Attributes:
        num_passes: The fewest.
        link_s: Weights over the link from host to device.
        host_memory_s: Weights and KV out of host memory.
        gpu_s: Operations on GPU and cores.
        gpu_memory_s: Weights out of device memory.
    """

    num_passes: float
    link_s: float
    host_memory_s: float
    gpu_s: float
    gpu_memory_s: float

    @property
    def seconds(self) -> float:
        """The least time of the job."""
        return max(self._seconds.values())

    @property
    def limit(self) -> Limit:
        """What it takes the time for."""
        return max(self._seconds, key=self._seconds.__getitem__)

    @property
    def _seconds(self) -> dict[Limit, float]:
        return {
            Limit.LINK: self.link_s,
            Limit.HOST_MEMORY: self.host_memory_s,
            Limit.GPU: self.gpu_s,
            Limit.GPU_MEMORY: self.gpu_memory_s,
        }


def device_bound(work: ModelWork, hardware: HardwareSpec, workload: Workload) -> DeviceBound:
    """Bound of a job.

    Args:
        work: The model.
        hardware: The node, with a GPU, and the memory that may be used of it.
        workload: The rows.
    """
    rows = [workload.lengths(row) for row in range(workload.num_rows)]
    tokens = sum(prompt + generated - 1 for prompt, generated in rows)
    memory = hardware.host_memory_bytes + hardware.gpu_memory_bytes - work.all_weight_bytes
    longest_row = max(_pairs(work, [row], _kv_bytes, 0) / row[1] for row in rows)
    through_memory = _pairs(work, rows, _kv_bytes, 0) / max(memory, longest_row)
    num_passes = max(through_memory, *(generated for _, generated in rows))
    read = num_passes * work.touched_weight_bytes(tokens / num_passes)
    held = num_passes * hardware.gpu_memory_bytes
    kv_read = _pairs(work, rows, _kv_bytes, 1)
    flop: float = work.token_flop * tokens + work.head_flop * sum(
        generated for _, generated in rows
    )
    flop += work.prefill_pair_flop * sum(prompt * (prompt + 1) // 2 for prompt, _ in rows)
    flop += _pairs(work, rows, _pair_flop, 1)
    return DeviceBound(
        num_passes=num_passes,
        link_s=max(0.0, read - held) / hardware.htod_bytes_per_s,
        host_memory_s=max(0.0, read + kv_read - held) / hardware.host_bytes_per_s,
        gpu_s=flop / (hardware.gpu_flop_per_s + hardware.host_flop_per_s),
        gpu_memory_s=read / hardware.gpu_bytes_per_s,
    )


def _pairs(
    work: ModelWork,
    rows: Iterable[tuple[int, int]],
    of_a_token: Callable[[LayerWork], int],
    first_pass: int,
) -> float:
    """What a layer takes of a context token, over all layers, contexts and passes from a first.

    In pass j of a row, counted from 0, its context is the prompt and j tokens.
    """
    windows: dict[int | None, int] = {}
    for layer in work.layers:
        windows[layer.window] = windows.get(layer.window, 0) + of_a_token(layer)
    return float(
        sum(
            amount * _contexts(prompt + first_pass, generated - first_pass, window)
            for prompt, generated in rows
            for window, amount in windows.items()
        )
    )


def _kv_bytes(layer: LayerWork) -> int:
    return layer.kv_token_bytes


def _pair_flop(layer: LayerWork) -> int:
    return layer.pair_flop


def _contexts(first: int, count: int, window: int | None) -> int:
    """Sum of `count` contexts that grow by one from `first`, none of them beyond the window."""
    growing = count if window is None else min(count, max(0, window - first))
    full = 0 if window is None else (count - growing) * window
    return growing * first + growing * (growing - 1) // 2 + full
