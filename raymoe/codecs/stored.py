"""StoredMatrix: the tensors of one quantised matrix, as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from raymoe.specs.weight_format import Piece, WeightFormat

# By their names in the format safetensors: all types in which weights are stored.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredMatrix:
    """A matrix [O, I] that is decoded where it is used.

    Attributes:
        pieces: By `Piece.name`; views of a file, of host or of device memory.
    """

    format: WeightFormat
    shape: tuple[int, int]
    pieces: Mapping[str, Tensor]

    @classmethod
    def without_data(cls, stored: WeightFormat, shape: tuple[int, int]) -> Self:
        """Pieces of the right types and shapes on the device "meta"."""
        pieces = {
            piece.name: torch.empty(piece.shape, dtype=TORCH_DTYPES[piece.dtypes[0]], device="meta")
            for piece in stored.pieces(*shape)
        }
        return cls(format=stored, shape=shape, pieces=pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(tensor.nbytes for tensor in self.pieces.values())

    def rows(self, begin: int, end: int, step: int = 1) -> "StoredMatrix":
        """Every `step`-th of the outputs `begin` to `end`; views.

        Pieces whose entries hold several outputs must be cut between two entries.
        """
        pieces = {
            piece.name: _cut(self.pieces[piece.name], piece, slice(begin, end, step))
            for piece in self.format.pieces(*self.shape)
        }
        shape = (len(range(begin, end, step)), self.shape[1])
        return replace(self, shape=shape, pieces=pieces)


def _cut(tensor: Tensor, piece: Piece, rows: slice) -> Tensor:
    if piece.row_axis is None:
        return tensor
    assert rows.start % piece.rows == 0, f"{piece.suffix} cannot be cut at output {rows.start}"
    assert rows.step == 1 or piece.rows == 1, f"{piece.suffix} cannot be cut in steps"
    entries = slice(rows.start // piece.rows, -(-rows.stop // piece.rows), rows.step)
    return tensor[(slice(None),) * piece.row_axis + (entries,)]
