"""DummyWeights: random weights of a model that are on no disk, for measuring speed.

Values are drawn once and dealt to all matrices from different places: matrices of layers and
experts differ, and a hundred gigabytes are made as fast as they are copied.
"""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight
from raymoe.codecs.stored import TORCH_DTYPES
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Piece, WeightFormat
from raymoe.specs.weight_names import EMBEDDING, Shape, model_weights

NUM_VALUES = (1 << 24) - 3  # odd, so that rows of matrices do not repeat
STANDARD_DEVIATION = 0.02
# Scales with which decoded codes are as small as the other weights.
SCALE, EXPONENT = 1e-3, 118
LARGEST_CODE = 0x7E  # of E4M3; the next one is NaN


class DummyWeights:
    """Makes the weight of a canonical name whenever it is asked for; the same each time.

    Attributes:
        dtype: Of weights that are not quantised.

    Args:
        spec: The model.
        dtype: See above.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._spec = spec
        self._shapes = model_weights(spec)
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(NUM_VALUES, generator=generator)
        self._values = values.mul_(STANDARD_DEVIATION).to(dtype)
        self._codes = torch.randint(
            LARGEST_CODE + 1, (NUM_VALUES,), dtype=torch.uint8, generator=generator
        )

    def __call__(self, name: str) -> Weight:
        """The weight [O, I] or vector of a canonical name."""
        shape = self._shapes[name]
        stored = self._spec.format_of(name, shape)
        if stored is not None:
            rows, columns = shape
            return self._matrix(name, stored, (rows, columns))
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype)
        drawn = dealt(self._values, name, shape)
        # Tokens must differ by more than the layers add, or all of them choose the same experts.
        return drawn.div_(STANDARD_DEVIATION) if name == EMBEDDING else drawn

    def drop_pages(self, names: Iterable[str]) -> None:
        """Nothing: no weight is kept."""

    def _matrix(self, name: str, stored: WeightFormat, shape: tuple[int, int]) -> StoredMatrix:
        pieces = {piece.name: self._piece(name, piece, shape) for piece in stored.pieces(*shape)}
        return StoredMatrix(format=stored, shape=shape, pieces=pieces)

    def _piece(self, name: str, piece: Piece, shape: tuple[int, int]) -> Tensor:
        dtype = TORCH_DTYPES[piece.dtypes[0]]
        if piece.name == "scales":
            value = SCALE if dtype.is_floating_point else EXPONENT
            return torch.full(piece.shape, value, dtype=dtype)
        if piece.name == "shape":
            return torch.tensor(shape, dtype=dtype)
        if piece.name == "order":  # all columns in the first group
            return torch.zeros(piece.shape, dtype=dtype)
        width = (*piece.shape[:-1], piece.shape[-1] * dtype.itemsize)
        return dealt(self._codes, name + piece.suffix, width).view(dtype)


def dealt(values: Tensor, name: str, shape: Shape) -> Tensor:
    """Values from a place that the name decides, again from the first one behind the last.

    Args:
        values: One dimension.
        name: Of the weight.
        shape: Of the result.
    """
    out = torch.empty(shape, dtype=values.dtype)
    flat, at = out.view(-1), zlib.crc32(name.encode()) % len(values)
    done = 0
    while done < len(flat):
        count = min(len(flat) - done, len(values) - at)
        flat[done : done + count] = values[at : at + count]
        done, at = done + count, 0
    return out
