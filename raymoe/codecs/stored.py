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
            piece.name: self._cut(piece, piece.row_axis, piece.rows, slice(begin, end, step))
            for piece in self.format.pieces(*self.shape)
        }
        shape = (len(range(begin, end, step)), self.shape[1])
        return replace(self, shape=shape, pieces=pieces)

    def columns(self, begin: int, end: int) -> "StoredMatrix":
        """The inputs `begin` to `end`; views, but for the table that names their groups.

        Pieces whose entries hold several inputs must be cut between two entries, and inputs be in
        the groups of their neighbours (`checks.is_in_order`).
        """
        pieces = {
            piece.name: self._cut(piece, piece.column_axis, piece.columns, slice(begin, end))
            for piece in self.format.pieces(*self.shape)
        }
        if "order" in pieces:  # groups count from those that are left
            pieces["order"] = pieces["order"] - pieces["order"][0]
        return replace(self, shape=(self.shape[0], end - begin), pieces=pieces)

    def _cut(self, piece: Piece, axis: int | None, size: int, cut: slice) -> Tensor:
        """A piece with the entries of an axis, of `size` rows or columns each, that hold a cut."""
        tensor = self.pieces[piece.name]
        if axis is None:
            return tensor
        step = cut.step or 1
        assert cut.start % size == 0, f"{piece.suffix} cannot be cut at {cut.start}"
        assert step == 1 or size == 1, f"{piece.suffix} cannot be cut in steps"
        entries = slice(cut.start // size, -(-cut.stop // size), step)
        return tensor[(slice(None),) * axis + (entries,)]
