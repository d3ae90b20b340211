"""Pinning in chunks, and what happens when it is refused."""

from contextlib import nullcontext
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from raymoe.device.cuda_api import HOST_PAGE_BYTES, PinnedMemory, PinningThread
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


def test_whole_chunks_are_registered_as_far_as_memory_is_filled() -> None:
    registrar = Registrar()
    memory = memory_at_a_page(3 * CHUNK, page=1)
    first = CHUNK - HOST_PAGE_BYTES  # a chunk ends at a multiple of its size
    pinned = PinnedMemory(memory, registrar)
    for filled, ends in (
        (-1, []),
        (first - 1, []),
        (first, [first]),
        (first, [first]),
        (first + 2 * CHUNK - 1, [first, first + CHUNK]),
        (None, [first, first + CHUNK, first + 2 * CHUNK, 3 * CHUNK]),
    ):
        assert pinned.register(filled_bytes=filled, chunk_bytes=CHUNK) is None
        found = [begin + size - memory.data_ptr() for begin, size in registrar.ranges.items()]
        assert found == ends
    pinned.close()
    assert registrar.ranges == {}


@pytest.fixture
def seen() -> SimpleQueue[int]:
    return SimpleQueue()


def pin_in_thread(memory: Tensor, registrar: Registrar, seen: SimpleQueue[int]) -> PinningThread:
    """A thread that tells of each range, from the first byte of the memory."""
    register = registrar.register

    def tell(address: int, num_bytes: int) -> str | None:
        reason = register(address, num_bytes)
        seen.put(address - memory.data_ptr())
        return reason

    registrar.register = tell  # type: ignore[method-assign]
    return PinningThread(memory, registrar, nullcontext, chunk_bytes=CHUNK)


def test_memory_is_pinned_while_the_rest_is_filled(seen: SimpleQueue[int]) -> None:
    memory, registrar = memory_at_a_page(3 * CHUNK), Registrar()
    pinning = pin_in_thread(memory, registrar, seen)
    pinning.filled(memory[:10])
    pinning.filled(memory[10 : CHUNK + 10])
    assert seen.get(timeout=60) == 0
    pinning.filled(memory[CHUNK + 10 : 2 * CHUNK])
    assert seen.get(timeout=60) == CHUNK
    assert seen.empty()
    assert pinning.wait() is None
    assert seen.get(timeout=60) == 2 * CHUNK
    pinning.close()
    pinning.close()
    assert registrar.ranges == {}


def test_a_refusal_while_memory_is_filled_unpins_all_and_is_the_last_try(
    seen: SimpleQueue[int],
) -> None:
    memory, registrar = memory_at_a_page(4 * CHUNK), Registrar(limit=1)
    pinning = pin_in_thread(memory, registrar, seen)
    for chunk in memory.split(CHUNK):
        pinning.filled(chunk)
    assert pinning.wait() == "out of memory after 16.00 KiB of 64.00 KiB"
    assert [seen.get(timeout=60), seen.get(timeout=60)] == [0, CHUNK]
    assert seen.empty()
    assert registrar.ranges == {}


def test_an_error_of_the_thread_is_raised_where_it_is_waited_for() -> None:
    pinning = PinningThread(memory_at_a_page(CHUNK)[1:], Registrar(), nullcontext)
    pinning.filled(torch.empty(0))
    with pytest.raises(ConfigError, match="begins at a page"):
        pinning.wait()


def test_a_thread_that_is_closed_before_it_is_waited_for_leaves_nothing_pinned() -> None:
    memory, registrar = memory_at_a_page(3 * CHUNK), Registrar()
    pinning = PinningThread(memory, registrar, nullcontext, chunk_bytes=CHUNK)
    pinning.filled(memory)
    pinning.close()
    assert registrar.ranges == {}


def test_memory_that_shares_its_first_page_or_is_in_pieces_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins at a page"):
        PinnedMemory(memory_at_a_page(CHUNK)[1:], Registrar()).register()
    with pytest.raises(ConfigError, match="in one piece"):
        PinnedMemory(memory_at_a_page(CHUNK)[::2], Registrar()).register()
