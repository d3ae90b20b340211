"""Prefixes that prompts share: keys of their blocks, those to come, and states after them."""

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from raymoe.kernels.paged_kv import BLOCK_TOKENS

Int32s = npt.NDArray[np.int32]

KEY_BYTES = 16
PrefixSalt = Callable[[int], bytes]


def no_salt(prompt_tokens: int) -> bytes:  # noqa: ARG001 - of models whose KV fits all lengths
    return b""


def prefix_keys(prompt: Int32s, salt: bytes = b"") -> tuple[bytes, ...]:
    """A key for each full block of a prompt: equal where all tokens up to its end are.

    The block with the last token has none: the logits of that token are wanted of every row.

    Args:
        salt: Prompts of different salts share nothing.
    """
    tokens = np.ascontiguousarray(prompt, "<i4").tobytes()
    size = BLOCK_TOKENS * 4
    key, keys = hashlib.blake2b(salt, digest_size=KEY_BYTES).digest(), []
    for end in range(size, (len(prompt) - 1) // BLOCK_TOKENS * size + 1, size):
        key = hashlib.blake2b(key + tokens[end - size : end], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


class ComingPrefixes:
    """Keys of blocks that live sequences will have computed soon. The engine thread owns it."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def expect(self, keys: Iterable[bytes]) -> None:
        """Note that a sequence begins to compute these blocks."""
        self._counts.update(keys)
        self.num_changes += 1

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that a sequence computes these no longer, or has done so."""
        for key in keys:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self.num_changes += 1


class StateSnapshots:
    """States of sequences after prefixes of whole blocks, each copied to a slot of its own.

    A sequence that shares the blocks of a prefix goes on from a copy of its snapshot. There are few
    slots: a new snapshot takes that of the one that was used or wanted least recently, if none is
    free. The engine thread owns it.

    Args:
        slots: Those after the slots of sequences.
    """

    def __init__(self, slots: range) -> None:
        self.num_slots = len(slots)
        self._free = list(reversed(slots))
        self._slots: dict[bytes, int] = {}  # by key of the last block, the first is replaced first
        self._copies: list[tuple[int, int]] = []
        self.num_changes = 0  # of the prefixes that have snapshots

    def __len__(self) -> int:
        return len(self._slots)

    def num_blocks(self, keys: Sequence[bytes]) -> int:
        """The length in blocks of the longest of these prefixes that has a snapshot."""
        for index in range(len(keys) - 1, -1, -1):
            if keys[index] in self._slots:
                return index + 1
        return 0

    def want(self, keys: Container[bytes]) -> int:
        """Keep the snapshots of these prefixes longer than others; return their number."""
        wanted = [key for key in self._slots if key in keys]
        for key in wanted:
            self._slots[key] = self._slots.pop(key)
        return len(wanted)

    def take(self, key: bytes, slot: int) -> None:
        """Keep the state in `slot`, that of a sequence which ends with this block."""
        kept = self._slots.pop(key, None)
        if kept is None:
            if not self._free:
                self._free.append(self._slots.pop(next(iter(self._slots))))
            kept = self._free.pop()
            self.num_changes += 1
            self._copies.append((slot, kept))
        self._slots[key] = kept

    def restore(self, key: bytes, slot: int) -> None:
        """Let the sequence in `slot` go on from the snapshot of this prefix."""
        self._slots[key] = kept = self._slots.pop(key)
        self._copies.append((kept, slot))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Give up the snapshots of prefixes whose blocks are gone."""
        freed = [self._slots.pop(key) for key in keys if key in self._slots]
        self._free += freed
        self.num_changes += len(freed)

    def begin_step(self) -> tuple[tuple[int, int], ...]:
        """Copies between slots, (from, to), that come before the next step, in this order."""
        copies, self._copies = tuple(self._copies), []
        return copies


def branch_points(num_sharing: Sequence[int], begin: int, max_points: int) -> list[int]:
    """Lengths in blocks beyond `begin` at which others leave a prompt.

    Args:
        num_sharing: How many others share the first block, the first two, and so on.
        max_points: If there are more, those count that save the most.
    """
    after = [*num_sharing[1:], 0]
    points = [i + 1 for i, count in enumerate(num_sharing) if i >= begin and count > after[i]]
    points.sort(key=lambda length: length * num_sharing[length - 1], reverse=True)
    return sorted(points[:max_points])
