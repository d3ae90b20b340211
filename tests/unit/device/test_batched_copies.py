"""Runs of blocks as copies, and many copies in one call of a CUDA runtime that tests bring."""

import ctypes

import numpy as np
import pytest
import torch

from raymoe.device.cuda_api import BatchedCopies, Pieces, cut_runs

ROW = 24


class Runtime:
    """Copies at once; checks what CUDA would."""

    def __init__(self, version: int, code: int = 0) -> None:
        self.version, self.code = version, code
        self.num_calls = 0

    def cudaRuntimeGetVersion(self, version) -> int:
        version._obj.value = self.version
        return 0

    def cudaMemcpyBatchAsync(self, targets, sources, sizes, count, attributes, *rest) -> int:
        first, num_attributes = rest[0]._obj, rest[1]
        assert len(rest) == (4 if self.version < 13000 else 3)
        assert rest[-1].value == 77
        assert (first.value, num_attributes.value) == (0, 1)
        assert attributes._obj.src_access_order == 1
        assert ctypes.sizeof(attributes._obj) == 6 * 4
        self.num_calls += 1
        if self.code:
            return self.code
        arrays = [
            ctypes.cast(each, ctypes.POINTER(ctypes.c_size_t)) for each in (targets, sources, sizes)
        ]
        for i in range(count.value):
            ctypes.memmove(*(array[i] for array in arrays))
        return 0


def addresses_of(pieces: Pieces, source: torch.Tensor, target: torch.Tensor) -> Pieces:
    return Pieces(
        pieces.sources + source.data_ptr(), pieces.targets + target.data_ptr(), pieces.sizes
    )


@pytest.mark.parametrize("version", [12080, 12090, 13000])
def test_all_runs_arrive_in_one_call(version: int) -> None:
    runtime = Runtime(version)
    copies = BatchedCopies.of(runtime)
    assert copies is not None
    source = torch.randint(0, 256, (40, ROW), dtype=torch.uint8)
    target = torch.zeros_like(source)
    runs = ((3, 0, 2), (30, 2, 5), (0, 9, 1))
    pieces = cut_runs(runs, ROW, source.data_ptr(), chunk_bytes=64)
    assert copies.copy(addresses_of(pieces, source, target), 77)
    expected = torch.zeros_like(source)
    for begin, into, count in runs:
        expected[into : into + count] = source[begin : begin + count]
    assert torch.equal(target, expected)
    assert runtime.num_calls == 1


@pytest.mark.parametrize("address", [0, 1, 40, 63, 64])
def test_no_piece_crosses_a_chunk_and_together_they_are_the_runs(address: int) -> None:
    pieces = cut_runs(((0, 5, 4), (7, 0, 1)), ROW, address, chunk_bytes=64)
    first, last = pieces.sources + address, pieces.sources + address + pieces.sizes - 1
    assert (pieces.sizes > 0).all()
    assert (first // 64 == last // 64).all()
    pairs = [
        (source + i, target + i)
        for source, target, size in zip(*pieces, strict=True)
        for i in range(size)
    ]
    expected = [(i, 5 * ROW + i) for i in range(4 * ROW)] + [(7 * ROW + i, i) for i in range(ROW)]
    assert pairs == expected


def test_no_runs_are_no_pieces() -> None:
    assert [len(each) for each in cut_runs((), ROW, 0, 64)] == [0, 0, 0]


def test_an_old_runtime_has_no_batches() -> None:
    assert BatchedCopies.of(Runtime(12060)) is None


@pytest.mark.parametrize("code", [36, 801])
def test_an_old_driver_says_so_and_does_nothing(code: int) -> None:
    copies = BatchedCopies.of(Runtime(13000, code))
    assert copies is not None
    assert not copies.copy(Pieces(*(np.zeros(1, np.int64),) * 3), 77)


def test_a_refusal_is_an_error() -> None:
    copies = BatchedCopies.of(Runtime(13000, 1))
    assert copies is not None
    with pytest.raises(RuntimeError, match="refused 1 copies: CUDA error 1"):
        copies.copy(Pieces(*(np.zeros(1, np.int64),) * 3), 77)
