"""Hold a task back: until a deadline, or for a random moment."""

import random
import select
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from raymoe.device.cuda_api import Runs
from raymoe.device.device import MemoryLedger
from raymoe.device.lane import Call, ThreadLane
from raymoe.schedule.graph import Resource, Task
from raymoe.schedule.timeline import CostModel

SPIN_S = 150e-6  # Linux wakes a sleeper 70 to 90 us late, of which 50 us are its timer slack


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s`, in seconds of `time.perf_counter`; at once if it has passed.

    Sleeps, then spins for the last part; the interpreter is free all the while.
    """
    rest_s = deadline_s - time.perf_counter()
    if rest_s > SPIN_S:
        time.sleep(rest_s - SPIN_S)
    while time.perf_counter() < deadline_s:
        # Lets other threads run and returns at once; `time.sleep(0)` may take 50 us.
        select.select((), (), (), 0)


class RandomStalls:
    """Some tasks wait before they work, so that a missing dependency shows.

    The choice depends on the seed and the task alone, not on the order of the threads.
    """

    def __init__(self, *, probability: float, longest_s: float, seed: int = 0) -> None:
        """Choose the stalls.

        Args:
            probability: Share of the tasks that stall, 0..1.
            longest_s: They stall for 0..`longest_s` seconds, uniformly.
            seed: Another seed stalls other tasks.
        """
        self._probability = probability
        self._longest_s = longest_s
        self._seed = seed

    def __call__(self, task: Task) -> float:
        dice = random.Random(f"{self._seed} {task}")
        return dice.random() * self._longest_s if dice.random() < self._probability else 0.0


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
        """Host memory for buffers that are copied in every step; all of it is as good as pinned."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @staticmethod
    def pin(memory: Tensor) -> None:
        """See `Device`; nothing to do."""

    @staticmethod
    def load(target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    @staticmethod
    def reserve(num_bytes: int) -> None:
        """See `Device`; nothing to do."""

    @staticmethod
    def memory_near() -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def load_blocks(target: Tensor, source: Tensor, runs: Runs) -> None:
        """Copy runs of rows, (source row, target row, rows)."""
        for begin, into, count in runs:
            target[into : into + count].copy_(source[begin : begin + count])

    @staticmethod
    def synchronize() -> None:
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
