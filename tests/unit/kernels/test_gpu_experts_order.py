"""The order of the programs of an expert product, and what a second-level cache makes of it."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from raymoe.kernels.gpu_experts_kernels import TOGETHER, _tile, align  # noqa: E402 - needs Triton

ROWS, BLOCKS = 16, 5
TileOrder = list[tuple[int, int, int]]  # expert, block of outputs and first row of each program


@triton.jit
def order_kernel(
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_row: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
) -> None:
    expert, block, row, _end = _tile(tiles_ptr, first_row, tl.num_programs(0), NUM_BLOCKS, NUM_ROWS)
    row_ptr = out_ptr + tl.program_id(0) * 3
    tl.store(row_ptr, expert)
    tl.store(row_ptr + 1, block)
    tl.store(row_ptr + 2, row)


def order_of(counts: Sequence[int], rows: range | None = None) -> TileOrder:
    """Programs of experts with so many rows each; those without a tile are left out."""
    ids = [expert for expert, count in enumerate(counts) for _ in range(count)]
    ids_TK = torch.tensor(ids, dtype=torch.int32)[:, None]
    launch, groups = align((ids_TK, torch.ones(ids_TK.shape)), len(counts), (ROWS, ROWS))
    launch.run()
    rows = rows or range(len(ids))
    num_programs = BLOCKS * (len(rows) // ROWS + len(counts))
    out = torch.full((num_programs, 3), -2, dtype=torch.int32)
    order_kernel[(num_programs,)](groups.gate_up_tiles_NF, out, rows.start, BLOCKS, ROWS)
    return [(expert, block, row) for expert, block, row in out.tolist() if expert >= 0]


COUNTS = [(1, 300, 0, 130), (40, 40), (0, 9 * ROWS, 0)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_tile_of_every_block_has_one_program(counts: tuple[int, ...]) -> None:
    want, begin = set(), 0
    for expert, count in enumerate(counts):
        rows = range(begin, begin + count, ROWS)
        want |= {(expert, block, row) for row in rows for block in range(BLOCKS)}
        begin += count
    found = order_of(counts)
    assert sorted(found) == sorted(want)
    for row in range(0, begin, 128):  # as many parts as rows that are computed at once
        part = order_of(counts, range(row, min(row + 128, begin)))
        assert len(set(part)) == len(part)
        inside = {each for each in want if row - ROWS < each[2] < row + 128}
        assert inside <= set(part)


def test_tiles_take_one_block_after_another_together() -> None:
    order = order_of((700,))
    tiles = [row // ROWS for _, _, row in order]
    together = TOGETHER.value
    assert tiles[: 2 * together] == [*range(together)] * 2
    assert [block for _, block, _ in order][: together + 1] == [0] * together + [1]
    last = tiles[5 * together * BLOCKS :]
    assert last == [*range(5 * together, 44)] * BLOCKS


def bytes_read(order: Iterable[tuple[int, int, int]], cache_bytes: int, at_once: int) -> int:
    """Bytes that miss a least-recently-used cache, with programs in waves that advance together.

    As for the second product of Mixtral-8x7B in bfloat16: 4,096 inputs of a tile or of a block of
    outputs at a time, for 128 rows and 64 outputs.
    """
    cache: OrderedDict[tuple[str, int, int], int] = OrderedDict()
    order, read, used = list(order), 0, 0
    for begin in range(0, len(order), at_once):
        wave = order[begin : begin + at_once]
        inputs, weights = {row for _, _, row in wave}, {block for _, block, _ in wave}
        for step in range(4):
            wanted = [(("input", row, step), 128) for row in sorted(inputs)]
            wanted += [(("weight", block, step), 64) for block in sorted(weights)]
            for key, lines in wanted:
                if key in cache:
                    cache.move_to_end(key)
                    continue
                cache[key] = lines * 4096 * 2
                read, used = read + cache[key], used + cache[key]
                while used > cache_bytes:
                    used -= cache.popitem(last=False)[1]
    return read


@pytest.mark.parametrize(("cache_bytes", "at_once"), [(38 << 20, 58), (40 << 20, 132)], ids=str)
def test_many_tiles_read_their_inputs_fewer_times(cache_bytes: int, at_once: int) -> None:
    def order(together: int) -> TileOrder:
        return [
            (0, block, row)
            for first in range(0, 64, together)
            for block in range(64)
            for row in range(first, min(first + together, 64))
        ]

    before, after = (
        bytes_read(order(together), cache_bytes, at_once) for together in (64, TOGETHER.value)
    )
    assert 2 * after < before
