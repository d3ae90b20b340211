"""StoredMatrix: the tensors of one quantised matrix, as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from raymoe.specs.weight_format import Piece, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredMatrix:
    """A matrix [O, I] that is decoded where it is used.

    Attributes:
        pieces: By `Piece.name`; views of a file, of host or of device memory.
    """

    format: WeightFormat
    shape: tuple[int, int]
    pieces: Mapping[str, Tensor]

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
