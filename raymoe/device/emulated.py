"""Host memory as a device: without lanes, or emulated, with tasks that take the predicted time."""

import random
import select
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from raymoe import _native
from raymoe.device.device import MemoryLedger, NoPinning, T
from raymoe.device.lane import Call, Lane, ThreadLane, call_all
from raymoe.device.mover import CopyTime, Link
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import CostModel, LinkUse
from raymoe.units import UNLIMITED_BYTES

SPIN_S = 150e-6  # Linux wakes a sleeper 70 to 90 us late; 50 us of that is timer slack


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s`, in seconds of `time.perf_counter`; at once if it has passed.

    Sleeps, then spins for the last part without holding the GIL.
    """
    rest_s = deadline_s - time.perf_counter()
    if rest_s > SPIN_S:
        time.sleep(rest_s - SPIN_S)
    while time.perf_counter() < deadline_s:
        # Releases the GIL and returns at once; `time.sleep(0)` may take 50 us.
        select.select((), (), (), 0)


class RandomStalls:
    """Delays random tasks, so that missing dependencies show in tests.

    The choice depends on the seed and the task alone, not on thread timing.
    """

    def __init__(self, *, probability: float, longest_s: float, seed: int = 0) -> None:
        """Choose the stalls: a share of all tasks stalls for 0..`longest_s` seconds, uniformly."""
        self._probability = probability
        self._longest_s = longest_s
        self._seed = seed

    def __call__(self, task: Task) -> float:
        dice = random.Random(f"{self._seed} {task}")
        return dice.random() * self._longest_s if dice.random() < self._probability else 0.0


Stall = Callable[[Task], float]


class HostDevice:
    """The host as a device: no lanes, so tasks run where they are submitted, and no limit."""

    lanes: Mapping[Resource | Op, Lane] = MappingProxyType({})
    torch_device = torch.device("cpu")
    poison: Callable[[Tensor], None] | None = None
    computing: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    traffic: Callable[[], Mapping[Resource, LinkUse]] = staticmethod(dict)

    def __init__(self, memory_bytes: int = UNLIMITED_BYTES) -> None:
        self.ledger = MemoryLedger(memory_bytes)

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Allocate zeroed memory; the ledger counts it until the device is gone."""
        self.ledger.take(num_bytes, purpose)
        return self.allocate_pinned(num_bytes)

    @staticmethod
    def allocate_pinned(num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @staticmethod
    def pin(memory: Tensor) -> None:
        """Do nothing."""

    @staticmethod
    def bind(memory: Tensor) -> None:
        """Do nothing: it is the memory of this device too."""

    @staticmethod
    def start_pinning(memory: Tensor) -> NoPinning:
        del memory  # of a host without a driver, which locks nothing
        return NoPinning()

    @staticmethod
    def prepare(num_bytes: int, compile_kernels: Callable[[], object]) -> None:
        """Do nothing: no kernel has to be compiled."""

    @staticmethod
    def compute(call: Callable[[], T]) -> T:
        """Call: nothing runs elsewhere."""
        return call()

    @staticmethod
    def memory_near() -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def synchronize() -> None:
        """Do nothing: work is done when its call returns."""

    def close(self) -> None:
        """Do nothing."""


class EmulatedDevice(HostDevice):
    """An emulated device with limited memory.

    Memory that was never written, or that was poisoned, reads as NaN, so that a task that runs too
    early or too late spoils the result.

    Attributes:
        cost: Cost model for durations; may be replaced between runs, not during one.
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
            memory_bytes: Total that `allocate` gives out.
            time_scale: Tasks last `cost.duration_s(task) * time_scale`; 0 for as fast as possible.
            stall: Seconds by which a task's work begins late; part of the task's duration.
        """
        super().__init__(memory_bytes)
        self.cost = cost
        self._time_scale = time_scale
        self._stall = stall
        runtime = _native.SimulatedLink(bytes_per_s=0.0, copies=True)
        self._link = Link(runtime, runtime.new_stream, self._copy_time)
        self.lanes = MappingProxyType(
            {
                **self._link.lanes,
                **{
                    resource: ThreadLane(
                        resource, perform=self._stretch, context=torch.inference_mode
                    )
                    for resource in (Resource.GPU, Resource.CPU, Resource.HOST_COPY)
                },
            }
        )

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Allocate poisoned memory; the ledger counts it until the device is gone."""
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

    def traffic(self) -> Mapping[Resource, LinkUse]:
        return self._link.traffic()

    def close(self) -> None:
        call_all(lane.close for lane in self.lanes.values())

    def _copy_time(self, task: Task) -> CopyTime:
        return CopyTime(
            self.cost.duration_s(task) * self._time_scale,
            0.0 if self._stall is None else self._stall(task),
        )

    def _stretch(self, task: Task, call: Call) -> None:
        start_s = time.perf_counter()
        if self._stall is not None:
            sleep_until(start_s + self._stall(task))
        call()
        sleep_until(start_s + self.cost.duration_s(task) * self._time_scale)
