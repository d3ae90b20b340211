"""A CUDA device: one stream per resource of the device, pinned host memory, copies in packets."""

import logging
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor

from raymoe.device.batched_copies import Runs, cut_runs
from raymoe.device.cuda_api import CudaDriver, EventT, StreamT, TorchCuda, copy_one_by_one
from raymoe.device.cuda_lane import CudaLane
from raymoe.device.lane import Lane, ThreadLane
from raymoe.device.ledger import MemoryLedger
from raymoe.device.numa import NumaPlace, find_place, memory_near, near
from raymoe.device.packets import PacketCopier
from raymoe.device.pinned import CHUNK_BYTES, PinnedMemory
from raymoe.errors import CapacityError, ConfigError
from raymoe.schedule.graph import Resource
from raymoe.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

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

    def __init__(
        self,
        driver: CudaDriver[StreamT, EventT],
        memory_bytes: int,
        place: NumaPlace | None = None,
    ) -> None:
        """Start the lanes; `open_cuda` is the usual way.

        Args:
            driver: Of the GPU.
            memory_bytes: How much `allocate` gives out in all.
            place: NUMA node of the GPU, on which the threads stay that feed it; kernels of the CPU
                lane use all cores that this process may.
        """
        self._place = place
        nearby = near(place, driver.thread_context)
        self._driver = driver
        self.ledger = MemoryLedger(memory_bytes)
        self.torch_device = driver.device
        self._pinned: list[PinnedMemory] = []
        streams = {
            resource: CudaLane(resource, driver, nearby)
            for resource in (Resource.GPU, Resource.HTOD, Resource.DTOH)
        }
        threads = {
            Resource.CPU: ThreadLane(Resource.CPU, context=driver.thread_context),
            Resource.HOST_COPY: ThreadLane(Resource.HOST_COPY, context=nearby),
        }
        self._compute_stream = streams[Resource.GPU].stream
        self.lanes: Mapping[Resource, Lane] = MappingProxyType({**streams, **threads})
        self._copy_stream = streams[Resource.HTOD].stream
        self._loader = PacketCopier(driver, self._copy_stream)

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Take device memory as a uint8 tensor with unspecified contents.

        Args:
            num_bytes: Size.
            purpose: Row of the table that a refusal shows, such as "weight slots".

        Raises:
            CapacityError: The device has not that much left.
        """
        self.ledger.take(num_bytes, purpose)
        try:
            return self._driver.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            raise self._no_room(num_bytes, purpose) from error

    def reserve(self, num_bytes: int) -> None:
        """Take memory for what operations allocate while they run, and leave it to them.

        Raises:
            CapacityError: The GPU has not that much left.
        """
        try:
            self._driver.reserve(num_bytes, self._compute_stream)
        except torch.OutOfMemoryError as error:
            raise self._no_room(num_bytes, "intermediates") from error

    def _no_room(self, num_bytes: int, purpose: str) -> CapacityError:
        return CapacityError(
            f"the GPU has no {format_bytes(num_bytes)} left for {purpose}, although "
            f"{format_bytes(self.ledger.memory_bytes)} may be used: something else uses it (see "
            f"nvidia-smi). Taken so far:\n{self.ledger.table()}\n"
            "Free it, or set device_memory_bytes to what there is"
        )

    def memory_near(self) -> AbstractContextManager[None]:
        """Have host memory that this thread is the first to touch come from the GPU's node."""
        return memory_near(self._place)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Take page-locked host memory, for buffers that are copied in every pass."""
        return self._driver.allocate_pinned(num_bytes)

    def pin(self, memory: Tensor) -> str | None:
        """Page-lock host memory until `close`; the reason where that is refused."""
        pinned = PinnedMemory(memory, self._driver)
        reason = pinned.register()
        if reason is None:
            self._pinned.append(pinned)
            logger.info("pinned %s in %.1f s", format_bytes(memory.nbytes), pinned.seconds)
        return reason

    def load(self, target: Tensor, source: Tensor) -> None:
        """Copy a page of weights in packets; only in tasks of the HTOD lane."""
        self._loader.copy(target, source)

    def load_blocks(self, target: Tensor, source: Tensor, runs: Runs) -> None:
        """Copy runs of rows in one call where CUDA has it; only in tasks of the HTOD lane."""
        if not runs:
            return
        row_bytes = source[0].nbytes
        pieces = cut_runs(runs, row_bytes, source.data_ptr(), CHUNK_BYTES)
        if any(pinned.holds(source) for pinned in self._pinned):
            self._driver.copy_batch(target, source, pieces, self._copy_stream)
        else:
            copy_one_by_one(target, source, pieces)

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
        memory_bytes: How much may be used, by torch's allocator too; None for what is free now,
            less 512 MiB for what torch itself needs.

    Raises:
        ConfigError: There is no such GPU, or torch was built without CUDA.
    """
    check_cuda(index)
    driver = TorchCuda(index)
    driver.limit_memory(memory_bytes)
    if memory_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info(driver.device)
        memory_bytes = max(free_bytes - RESERVE_BYTES, 0)
    return CudaDevice(driver, memory_bytes, find_place(driver.pci_address))
