import gc
from contextlib import closing
from pathlib import Path

import pytest
import torch

from raymoe.errors import CapacityError, ConfigError
from raymoe.memory.arena import (
    ALIGNMENT,
    HUGE_PAGE_BYTES,
    HostArena,
    ReusedMemory,
    aligned_bytes,
)
from raymoe.units import MIB, TIB


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_allocations_are_aligned_zero_and_apart() -> None:
    with closing(HostArena(1000)) as arena:
        first, second = arena.allocate(3), arena.allocate(100)
        assert first.data_ptr() % ALIGNMENT == second.data_ptr() % ALIGNMENT == 0
        first.fill_(7)
        assert second.numel() == 100
        assert second.sum() == 0


def test_large_arenas_begin_on_a_huge_page() -> None:
    with closing(HostArena(5 * MIB)) as arena:
        assert arena.allocate(1).data_ptr() % HUGE_PAGE_BYTES == 0


def test_the_sum_of_rounded_requests_fits_exactly() -> None:
    sizes = [1, 64, 65, 0, 1000]
    with closing(HostArena(sum(map(aligned_bytes, sizes)))) as arena:
        for size in sizes:
            assert arena.allocate(size).numel() == size
        assert arena.used_bytes == arena.num_bytes
        with pytest.raises(CapacityError, match="1 B asked"):
            arena.allocate(1)


def test_a_failed_request_takes_nothing() -> None:
    with closing(HostArena(128)) as arena:
        with pytest.raises(CapacityError):
            arena.allocate(129)
        with pytest.raises(CapacityError):
            arena.allocate(-1)
        assert arena.allocate(128).numel() == 128


def test_memory_is_taken_when_written_and_returns_after_close() -> None:
    gc.collect()
    before = resident_bytes()
    arena = HostArena(64 * MIB)
    memory = arena.allocate(64 * MIB)
    assert resident_bytes() - before < 32 * MIB
    memory.fill_(1)
    assert resident_bytes() - before > 60 * MIB
    arena.close()
    assert memory[-1] == 1  # a tensor keeps the mapping alive
    del memory
    gc.collect()
    assert resident_bytes() - before < 32 * MIB


def test_closed_arenas_give_nothing() -> None:
    arena = HostArena(128)
    arena.close()
    with pytest.raises(CapacityError, match="closed"):
        arena.allocate(1)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="negative"):
        HostArena(-1)
    with pytest.raises(CapacityError, match="cannot map"):
        HostArena(2**20 * TIB)


def test_empty_arenas_exist() -> None:
    with closing(HostArena(0)) as arena:
        assert arena.allocate(0).numel() == 0


def test_memory_can_be_viewed_as_any_type() -> None:
    with closing(HostArena(256)) as arena:
        view = arena.allocate(16).view(torch.bfloat16)
        assert view.shape == (8,)


def test_arenas_of_one_engine_after_another_have_the_same_memory() -> None:
    memory = ReusedMemory(8 * MIB)
    first, second = memory.arena(3 * MIB), memory.arena(MIB)
    places = [arena.memory.data_ptr() for arena in (first, second)]
    assert places[1] == places[0] + 4 * MIB
    first.allocate(MIB).fill_(7)
    beyond = memory.arena(4 * MIB)
    assert beyond.memory.data_ptr() not in range(places[0], places[0] + 8 * MIB)
    for arena in (first, second, beyond):
        arena.close()
    memory.restart()
    again = memory.arena(8 * MIB)
    assert again.memory.data_ptr() == places[0]
    assert again.allocate(MIB)[0] == 7
