"""What the runtime needs to know of a device, real or emulated."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from raymoe.device.lane import Lane
from raymoe.schedule.task import Resource


class Device(Protocol):
    """Memory with a limit and the lanes on which a schedule runs; owns both."""

    @property
    def lanes(self) -> Mapping[Resource, Lane]:
        """One lane for each resource."""

    @property
    def memory_bytes(self) -> int:
        """How much memory the device has for us."""

    @property
    def used_bytes(self) -> int:
        """How much of it is allocated."""

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Take device memory as a uint8 tensor with unspecified contents.

        Raises:
            CapacityError: The device has not that much left; shows what has been taken.
        """

    def close(self) -> None:
        """Finish what was submitted and end the lanes; may be called again."""
