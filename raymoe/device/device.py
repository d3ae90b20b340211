"""What the runtime needs to know of a device, real or emulated."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from raymoe.device.batched_copies import Runs
from raymoe.device.lane import Lane
from raymoe.device.ledger import MemoryLedger
from raymoe.schedule.graph import Resource


class Device(Protocol):
    """Memory with a limit and the lanes on which a schedule runs; owns both."""

    @property
    def lanes(self) -> Mapping[Resource, Lane]:
        """One lane for each resource."""

    @property
    def ledger(self) -> MemoryLedger:
        """Who has how much of the device's memory."""

    @property
    def torch_device(self) -> torch.device:
        """Where torch finds the memory."""

    @property
    def poison(self) -> Callable[[Tensor], None] | None:
        """Spoils device memory that nobody will read any more; None where that cannot be known."""

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Take device memory as a uint8 tensor with unspecified contents.

        Raises:
            CapacityError: The device has not that much left; shows what has been taken.
        """

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Take page-locked host memory as a uint8 tensor, for buffers copied in every pass."""

    def pin(self, memory: Tensor) -> str | None:
        """Page-lock host memory until `close`; the reason where that is refused."""

    def load(self, target: Tensor, source: Tensor) -> None:
        """Copy a page of weights from pinned host memory; only in tasks of the HTOD lane."""

    def reserve(self, num_bytes: int) -> None:
        """Have memory for what operations allocate while they run; before the first pass.

        Raises:
            CapacityError: There is not that much.
        """

    def memory_near(self) -> AbstractContextManager[None]:
        """Have host memory that this thread is the first to touch come from beside the device."""

    def load_blocks(self, target: Tensor, source: Tensor, runs: Runs) -> None:
        """Copy runs of rows from host memory; only in tasks of the HTOD lane.

        Args:
            target: On the device; in one piece, as is the source.
            source: Rows of the same size.
            runs: Source row, target row and number of rows of each.
        """

    def settle(self) -> None:
        """Wait until what the calling thread itself has put on the device is there."""

    def close(self) -> None:
        """Finish what was submitted and end the lanes; may be called again."""
