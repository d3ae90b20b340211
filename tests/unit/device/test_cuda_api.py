"""Pinning in chunks, and what happens when it is refused."""

import pytest
import torch
from torch import Tensor

from raymoe.device.cuda_api import HOST_PAGE_BYTES, PinnedMemory
from raymoe.errors import ConfigError

CHUNK = 4 * HOST_PAGE_BYTES


class Registrar:
    """Registers up to `limit` ranges."""

    def __init__(self, limit: int = 1000) -> None:
        self.ranges: dict[int, int] = {}
        self._limit = limit

    def register(self, address: int, num_bytes: int) -> str | None:
        if len(self.ranges) == self._limit:
            return "out of memory"
        assert address not in self.ranges
        self.ranges[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.ranges[address]


def memory_at_a_page(num_bytes: int, *, page: int = 0) -> Tensor:
    """Host memory whose address is `page` pages behind a multiple of a chunk."""
    memory = torch.zeros(num_bytes + 2 * CHUNK, dtype=torch.uint8)
    begin = -memory.data_ptr() % CHUNK + page * HOST_PAGE_BYTES
    return memory[begin : begin + num_bytes]


@pytest.mark.parametrize("page", [0, 1, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
def test_chunks_cover_the_memory_and_end_at_multiples_of_their_size(
    page: int, num_bytes: int
) -> None:
    memory, registrar = memory_at_a_page(num_bytes, page=page), Registrar()
    pinned = PinnedMemory(memory, registrar)
    assert pinned.register(chunk_bytes=CHUNK) is None
    position = memory.data_ptr()
    for address, size in sorted(registrar.ranges.items()):
        assert address == position
        assert 0 < size <= CHUNK
        assert address // CHUNK == (address + size - 1) // CHUNK
        position += size
    assert position == memory.data_ptr() + num_bytes
    pinned.close()
    pinned.close()
    assert registrar.ranges == {}


def test_a_refusal_unpins_all_and_says_how_far_it_came() -> None:
    registrar = Registrar(limit=2)
    pinned = PinnedMemory(memory_at_a_page(4 * CHUNK), registrar)
    reason = pinned.register(chunk_bytes=CHUNK)
    assert reason == "out of memory after 32.00 KiB of 64.00 KiB"
    assert registrar.ranges == {}


def test_memory_that_shares_its_first_page_or_is_in_pieces_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins at a page"):
        PinnedMemory(memory_at_a_page(CHUNK)[1:], Registrar()).register()
    with pytest.raises(ConfigError, match="in one piece"):
        PinnedMemory(memory_at_a_page(CHUNK)[::2], Registrar()).register()
