"""A CUDA device: one stream per resource of the device, pinned host memory, copies in packets."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor

from raymoe.device.cuda_api import CudaDriver, EventT, StreamT, TorchCuda
from raymoe.device.cuda_lane import CudaLane
from raymoe.device.lane import Lane, ThreadLane
from raymoe.device.ledger import MemoryLedger
from raymoe.device.packets import PacketCopier
from raymoe.device.pinned import PinnedMemory
from raymoe.errors import ConfigError
from raymoe.schedule.task import Resource
from raymoe.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

# For the kernels themselves, the workspaces of matrix products and the allocator's rounding.
RESERVE_BYTES = 512 * MIB


class CudaDevice(Generic[StreamT, EventT]):
    """One GPU.

    Attributes:
        lanes: GPU, HTOD and DTOH are streams, CPU and HOST_COPY threads; closed with the device.
        ledger: Who has how much of the memory.
        torch_device: Where torch finds the memory.
        poison: None: a stream's work is not done when its call returns.
    """

    poison = None

    def __init__(self, driver: CudaDriver[StreamT, EventT], memory_bytes: int) -> None:
        """Start the lanes; `open_cuda` is the usual way.

        Args:
            driver: Of the GPU.
            memory_bytes: How much `allocate` gives out in all.
        """
        self._driver = driver
        self.ledger = MemoryLedger(memory_bytes)
        self.torch_device = driver.device
        self._pinned: list[PinnedMemory] = []
        streams = {
            resource: CudaLane(resource, driver)
            for resource in (Resource.GPU, Resource.HTOD, Resource.DTOH)
        }
        threads = {
            resource: ThreadLane(resource, context=driver.thread_context)
            for resource in (Resource.CPU, Resource.HOST_COPY)
        }
        self.lanes: Mapping[Resource, Lane] = MappingProxyType({**streams, **threads})
        self._loader = PacketCopier(driver, streams[Resource.HTOD].stream)

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Take device memory as a uint8 tensor with unspecified contents.

        Args:
            num_bytes: Size.
            purpose: Row of the table that a refusal shows, such as "weight slots".

        Raises:
            CapacityError: The device has not that much left.
        """
        self.ledger.take(num_bytes, purpose)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Take page-locked host memory, for buffers that are copied in every pass."""
        return self._driver.allocate_pinned(num_bytes)

    def pin(self, memory: Tensor) -> str | None:
        """Page-lock host memory until `close`; the reason where that is refused."""
        pinned = PinnedMemory(memory, self._driver)
        reason = pinned.register()
        if reason is None:
            self._pinned.append(pinned)
        return reason

    def load(self, target: Tensor, source: Tensor) -> None:
        """Copy a page of weights in packets; only in tasks of the HTOD lane."""
        self._loader.copy(target, source)

    def settle(self) -> None:
        """Wait for the default stream: what the calling thread allocated, copied and computed."""
        self._driver.settle()

    def close(self) -> None:
        """Finish what was submitted, end the lanes, unpin; may be called again."""
        for lane in self.lanes.values():
            lane.close()
        while self._pinned:
            self._pinned.pop().close()


def check_cuda(index: int = 0) -> None:
    """Refuse a CUDA device that is not there.

    Raises:
        ConfigError: There is no such GPU, or torch was built without CUDA.
    """
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no CUDA device {index}: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()}; use the device 'cpu' or 'emulated'"
        )


def open_cuda(
    index: int = 0, memory_bytes: int | None = None
) -> CudaDevice[torch.cuda.Stream, torch.cuda.Event]:
    """The CUDA device `index`.

    Args:
        index: Of the GPU.
        memory_bytes: How much may be used; None for what is free now, less 512 MiB for what torch
            itself needs.

    Raises:
        ConfigError: There is no such GPU, or torch was built without CUDA.
    """
    check_cuda(index)
    driver = TorchCuda(index)
    if memory_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info(driver.device)
        memory_bytes = max(free_bytes - RESERVE_BYTES, 0)
    return CudaDevice(driver, memory_bytes)
