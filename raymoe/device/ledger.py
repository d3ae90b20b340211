"""Who has how much of a device's memory, and no more than there is."""

import threading

from raymoe.errors import CapacityError, ConfigError
from raymoe.units import ceil_div, format_bytes

ALIGNMENT = 256  # as cudaMalloc


class MemoryLedger:
    """Adds up allocations by purpose and refuses those beyond the limit. Thread-safe."""

    def __init__(self, memory_bytes: int) -> None:
        """Open the ledger.

        Raises:
            ConfigError: The limit is negative.
        """
        if memory_bytes < 0:
            raise ConfigError(f"device memory is {memory_bytes} bytes; it cannot be negative")
        self.memory_bytes = memory_bytes
        self._bytes_of: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes taken so far, each allocation rounded up to 256 bytes."""
        with self._lock:
            return sum(self._bytes_of.values())

    def take(self, num_bytes: int, purpose: str) -> None:
        """Enter an allocation.

        Raises:
            ConfigError: The size is negative.
            CapacityError: It does not fit; shows what has been taken, largest first.
        """
        if num_bytes < 0:
            raise ConfigError(f"{purpose}: {num_bytes} bytes asked; it cannot be negative")
        taken = ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT
        with self._lock:
            free_bytes = self.memory_bytes - sum(self._bytes_of.values())
            if taken > free_bytes:
                raise CapacityError(self._refusal(taken, free_bytes, purpose))
            self._bytes_of[purpose] = self._bytes_of.get(purpose, 0) + taken

    def table(self) -> str:
        """What has been taken, largest first, a line for each purpose."""
        with self._lock:
            return _table(self._rows())

    def _rows(self) -> list[tuple[str, int]]:
        return sorted(self._bytes_of.items(), key=lambda row: -row[1])

    def _refusal(self, taken: int, free_bytes: int, purpose: str) -> str:
        table = _table([*self._rows(), ("free", free_bytes), (f"{purpose} (asked)", taken)])
        return (
            f"device memory of {format_bytes(self.memory_bytes)} is "
            f"{format_bytes(taken - free_bytes)} short for {purpose}:\n{table}\n"
            "plan with smaller waves, fewer resident weights or smaller pages, "
            "or give the device more memory"
        )


def _table(rows: list[tuple[str, int]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {format_bytes(size):>12}" for name, size in rows)
