"""Where is the record of a key? 16 bytes of memory for each, whatever the records hold."""

import numpy as np
import numpy.typing as npt

from raymoe.data.records import KEY_BYTES

OFFSET_BITS = 40  # files of up to 1 TiB, 16 million of them
MIN_RECENT = 1 << 14
RECENT_PER_SORTED = 8

UInt64s = npt.NDArray[np.uint64]


class RowIndex:
    """Half a key -> file and offset of its latest record. Not thread-safe.

    The whole key is in the record itself: who finds a place compares it there. Two rows whose keys
    agree in the half that is kept cost one of them its place, so that it is generated again.

    Entries are sorted arrays, and a dict of the latest that is merged into them when it has grown
    to an eighth of theirs: then a dict's 150 bytes for each are never needed for all.
    """

    def __init__(self) -> None:
        self._halves: UInt64s = np.empty(0, np.uint64)
        self._places: UInt64s = np.empty(0, np.uint64)
        self._recent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._halves) + len(self._recent)

    @property
    def num_bytes(self) -> int:
        """Memory of the sorted entries."""
        return self._halves.nbytes + self._places.nbytes

    def add(self, key: bytes, file_number: int, offset: int) -> None:
        """Remember where the record of a key begins."""
        self._recent[_half(key)] = file_number << OFFSET_BITS | offset
        if len(self._recent) >= max(MIN_RECENT, len(self._halves) // RECENT_PER_SORTED):
            self._merge()

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return file number and offset of what may be the record of a key."""
        half = _half(key)
        place = self._recent.get(half)
        if place is None:
            at = int(np.searchsorted(self._halves, np.uint64(half)))
            if at == len(self._halves) or int(self._halves[at]) != half:
                return None
            place = int(self._places[at])
        return place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)

    def _merge(self) -> None:
        count = len(self._recent)
        halves = np.fromiter(self._recent.keys(), np.uint64, count)
        places = np.fromiter(self._recent.values(), np.uint64, count)
        self._recent.clear()
        halves = np.concatenate([halves, self._halves])
        places = np.concatenate([places, self._places])
        # Of equal ones the first stays, which is the latest.
        self._halves, first = np.unique(halves, return_index=True)
        self._places = places[first]


def _half(key: bytes) -> int:
    return int.from_bytes(key[: KEY_BYTES // 2], "little")
