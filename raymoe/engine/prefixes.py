"""Which blocks of a prompt are in the KV cache already? Blocks are known by their tokens.

A full block of a prompt and the blocks before it hold the same KV for every row whose prompt
begins with the same tokens (Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", SOSP 2023, section 4.4). Only blocks of live sequences are found.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from raymoe.engine.sequence import Int32s
from raymoe.kernels.paged_kv import BLOCK_TOKENS

KEY_BYTES = 16


def prefix_keys(prompt: Int32s, salt: int = 0) -> tuple[bytes, ...]:
    """A key for each full block of a prompt: equal where all tokens up to its end are.

    The block with the last token has none: the logits of that token are wanted of every row.

    Args:
        prompt: Token ids.
        salt: Prompts of different salts share nothing.
    """
    tokens = np.ascontiguousarray(prompt, "<i4").tobytes()
    size = BLOCK_TOKENS * 4
    key, keys = salt.to_bytes(8, "little"), []
    for end in range(size, (len(prompt) - 1) // BLOCK_TOKENS * size + 1, size):
        key = hashlib.blake2b(key + tokens[end - size : end], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


class PrefixIndex:
    """Blocks of live sequences by key, and keys that they will have computed soon.

    The engine thread owns it.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._coming: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._blocks) + len(self._coming)

    def find(self, keys: Sequence[bytes]) -> Int32s:
        """Computed blocks of the longest prefix that has them."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return np.array(found, np.int32)

    def is_computed(self, key: bytes) -> bool:
        """Whether a live sequence has this block."""
        return key in self._blocks

    def is_coming(self, key: bytes) -> bool:
        """Whether a live sequence will have computed this block, and none has."""
        return key in self._coming and key not in self._blocks

    def expect(self, keys: Iterable[bytes]) -> None:
        """Note that a sequence begins to compute these blocks."""
        self._coming.update(keys)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that a sequence computes these no longer, or has done so."""
        for key in keys:
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]

    def add(self, keys: Iterable[bytes], blocks: Iterable[int]) -> None:
        """Take computed blocks; of several with the same key, the first."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._blocks:
                self._blocks[key], self._keys[block] = block, key

    def remove(self, blocks: Iterable[int]) -> None:
        """Drop blocks that nobody owns any more."""
        for block in blocks:
            key = self._keys.pop(block, None)
            if key is not None:
                del self._blocks[key]
