"""A host arena whose memory other processes have too."""

from torch import Tensor

from raymoe.errors import ExecutionError
from raymoe.memory.arena import HostArena, aligned_bytes
from raymoe.memory.shared_file import SharedFile
from raymoe.units import format_bytes


class SharedArena(HostArena):
    """Hands out the same places of the same memory in every process that asks in the same order.

    The first process fills it and calls `seal`; for the others it `is_filled`, and read-only.
    """

    def __init__(
        self, num_bytes: int, file: SharedFile, note: bytes, *, is_writable: bool = False
    ) -> None:
        """Map the memory.

        Args:
            num_bytes: As for `HostArena`.
            file: Filled, or to be filled with `num_bytes`.
            note: For the other processes, if this one fills it.
            is_writable: Map it so that it could be written, as drivers want what they pin.

        Raises:
            CapacityError: There is not so much shared memory.
            ExecutionError: What others have filled has another size.
        """
        self._file, self._note, self._is_writable = file, note, is_writable
        self.is_filled = file.is_whole
        super().__init__(num_bytes)

    def seal(self) -> None:
        """Say that everything is in it."""
        if not self.is_filled:
            self._file.publish(self._note, is_writable=self._is_writable)
            self.is_filled = True

    def close(self) -> None:
        """As for `HostArena`; the last process frees the memory of all."""
        super().close()
        self._file.close()

    def _map(self, num_bytes: int) -> Tensor:
        if not self.is_filled:
            return self._file.create(num_bytes)
        if self._file.num_bytes != aligned_bytes(num_bytes):
            raise ExecutionError(
                f"weights that other processes share have {format_bytes(self._file.num_bytes)}, "
                f"{format_bytes(num_bytes)} are expected; set shared_weights=False"
            )
        return self._file.memory(is_writable=self._is_writable)
