"""A device made of host memory: separate buffers, real copies, the pace of other hardware.

Assumptions: the host does the real work of a task faster than the device that is emulated, or the
task takes as long as the host needs; lanes do not slow each other down beyond what the cost model
says.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from raymoe.device.batched_copies import Runs
from raymoe.device.lane import Call, ThreadLane
from raymoe.device.ledger import MemoryLedger
from raymoe.device.pacing import sleep_until
from raymoe.schedule.graph import Resource, Task
from raymoe.schedule.timeline import CostModel

Stall = Callable[[Task], float]


class EmulatedDevice:
    """Memory with a limit, and one lane per resource on which tasks take the time they would.

    Memory that was never written, or that was poisoned, reads as NaN, so that a task that runs too
    early or too late spoils the result instead of passing by luck.

    Attributes:
        cost: What sets the pace; may be replaced between runs, not during one.
        lanes: One for each resource; they belong to the device and are closed with it.
        ledger: Who has how much of the memory.
        torch_device: Where torch finds the memory.
    """

    def __init__(
        self,
        memory_bytes: int,
        cost: CostModel,
        time_scale: float = 1.0,
        *,
        stall: Stall | None = None,
    ) -> None:
        """Start the lanes.

        Args:
            memory_bytes: How much `allocate` gives out in all.
            cost: Duration of each task on the hardware that is emulated.
            time_scale: Tasks last `cost.duration_s(task) * time_scale`; 0 for as fast as possible.
            stall: Seconds by which a task's work begins late, such as `RandomStalls`; it counts
                towards the task's duration.
        """
        self.cost = cost
        self.ledger = MemoryLedger(memory_bytes)
        self.torch_device = torch.device("cpu")
        self._time_scale = time_scale
        self._stall = stall
        self.lanes: Mapping[Resource, ThreadLane] = MappingProxyType(
            {
                resource: ThreadLane(resource, perform=self._stretch, context=torch.inference_mode)
                for resource in Resource
            }
        )

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Take device memory as a uint8 tensor, poisoned; it is freed with its last reference.

        The ledger does not see that: what was allocated counts until the device is gone.

        Args:
            num_bytes: Size.
            purpose: Row of the table that a refusal shows, such as "weight slots".

        Raises:
            CapacityError: The device has not that much left.
        """
        self.ledger.take(num_bytes, purpose)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.poison(memory)
        return memory

    @staticmethod
    def poison(tensor: Tensor) -> None:
        """Overwrite a tensor: NaN in any floating format, -1 or the largest number in others."""
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(-1 if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max)

    @staticmethod
    def allocate_pinned(num_bytes: int) -> Tensor:
        """Host memory for buffers that are copied in every pass; all of it is as good as pinned."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @staticmethod
    def pin(memory: Tensor) -> None:
        """See `Device`; nothing to do."""

    @staticmethod
    def load(target: Tensor, source: Tensor) -> None:
        """Copy a page of weights."""
        target.copy_(source)

    @staticmethod
    def reserve(num_bytes: int) -> None:
        """See `Device`; nothing to do."""

    @staticmethod
    def memory_near() -> AbstractContextManager[None]:
        """See `Device`; all memory is as near."""
        return nullcontext()

    @staticmethod
    def load_blocks(target: Tensor, source: Tensor, runs: Runs) -> None:
        """Copy runs of rows, (source row, target row, rows)."""
        for begin, into, count in runs:
            target[into : into + count].copy_(source[begin : begin + count])

    @staticmethod
    def settle() -> None:
        """See `Device`; copies here are over when they return."""

    def close(self) -> None:
        """Finish what was submitted and end the lanes' threads; may be called again."""
        for lane in self.lanes.values():
            lane.close()

    def _stretch(self, task: Task, call: Call) -> None:
        start_s = time.perf_counter()
        if self._stall is not None:
            sleep_until(start_s + self._stall(task))
        call()
        sleep_until(start_s + self.cost.duration_s(task) * self._time_scale)
