"""A CUDA device: one stream per resource of the device, pinned host memory, copies in packets."""

from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from raymoe.device.cuda_api import TorchCuda
from raymoe.device.cuda_lane import CudaLane
from raymoe.device.lane import Lane, ThreadLane
from raymoe.device.ledger import MemoryLedger
from raymoe.device.packets import PacketCopier
from raymoe.device.pinned import PinnedMemory, pin_memory
from raymoe.errors import ConfigError
from raymoe.schedule.task import Resource
from raymoe.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

# For the kernels themselves, the workspaces of matrix products and the allocator's rounding.
RESERVE_BYTES = 512 * MIB


class CudaDevice:
    """One GPU.

    Attributes:
        lanes: GPU, HTOD and DTOH are streams, CPU and HOST_COPY threads; closed with the device.
        loader: Copies weight pages on the HTOD lane; only for tasks of that lane.
    """

    def __init__(self, index: int = 0, *, memory_bytes: int | None = None) -> None:
        """Start the lanes.

        Args:
            index: Of the GPU.
            memory_bytes: How much `allocate` gives out in all; None for what is free now, less
                512 MiB for what torch itself needs.

        Raises:
            ConfigError: There is no such GPU, or torch was built without CUDA.
        """
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"there is no CUDA device {index}: torch {torch.__version__} sees "
                f"{torch.cuda.device_count()}; use the device 'cpu' or 'emulated'"
            )
        api = TorchCuda(index)
        if memory_bytes is None:
            free_bytes, _ = torch.cuda.mem_get_info(api.device)
            memory_bytes = max(free_bytes - RESERVE_BYTES, 0)
        self._api = api
        self._ledger = MemoryLedger(memory_bytes)
        self._pinned: list[PinnedMemory] = []
        streams = {
            resource: CudaLane(resource, api)
            for resource in (Resource.GPU, Resource.HTOD, Resource.DTOH)
        }
        threads = {
            resource: ThreadLane(resource, context=api.thread_context)
            for resource in (Resource.CPU, Resource.HOST_COPY)
        }
        self.lanes: Mapping[Resource, Lane] = MappingProxyType({**streams, **threads})
        self.loader = PacketCopier(api, streams[Resource.HTOD].stream)

    @property
    def memory_bytes(self) -> int:
        """How much memory the device has for us."""
        return self._ledger.memory_bytes

    @property
    def used_bytes(self) -> int:
        """How much of it is allocated."""
        return self._ledger.used_bytes

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Take device memory as a uint8 tensor with unspecified contents.

        Args:
            num_bytes: Size.
            purpose: Row of the table that a refusal shows, such as "weight slots".

        Raises:
            CapacityError: The device has not that much left.
        """
        self._ledger.take(num_bytes, purpose)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._api.device)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Take page-locked host memory, for small buffers that are copied every task."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> bool:
        """Pin a host arena until `close`; False, with a warning, where it has to be staged."""
        pinned = pin_memory(memory, self._api)
        if pinned is not None:
            self._pinned.append(pinned)
        return pinned is not None

    def close(self) -> None:
        """Finish what was submitted, end the lanes, unpin; may be called again."""
        for lane in self.lanes.values():
            lane.close()
        while self._pinned:
            self._pinned.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
