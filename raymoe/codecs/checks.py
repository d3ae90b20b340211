"""Values that a quantised matrix must not have: scales or groups that are not there."""

from collections.abc import Callable

import torch
from torch import Tensor

from raymoe.codecs.stored import StoredMatrix
from raymoe.errors import CheckpointError

E8M0_NAN = 255


def check_values(matrix: StoredMatrix, describe: Callable[[str], str]) -> None:
    """Read scales, order and shape of a matrix, but not its codes.

    Args:
        matrix: As it is stored.
        describe: Name of a piece -> which file and tensor it is, for messages.

    Raises:
        CheckpointError: A scale is NaN or infinite, a column names a group that does not exist, or
            the shape that is stored differs from the one that is expected.
    """
    pieces = matrix.pieces
    scales = pieces["scales"]
    is_bad = scales == E8M0_NAN if scales.dtype == torch.uint8 else ~scales.isfinite()
    _refuse_any(is_bad, scales, describe("scales"), "scales that are not finite")
    if "order" in pieces:
        num_groups, order = _num_groups(matrix), pieces["order"]
        is_bad = (order < 0) | (order >= num_groups)
        _refuse_any(is_bad, order, describe("order"), f"groups other than 0 to {num_groups - 1}")
    if "shape" in pieces and tuple(pieces["shape"].tolist()) != matrix.shape:
        raise CheckpointError(
            f"{describe('shape')} is {pieces['shape'].tolist()}, config.json says "
            f"{list(matrix.shape)}"
        )


def is_in_order(matrix: StoredMatrix) -> bool:
    """Whether the table that names the group of each input names neighbours."""
    inputs = matrix.shape[1]
    neighbours = torch.arange(inputs) // (inputs // _num_groups(matrix))
    return torch.equal(matrix.pieces["order"].long(), neighbours)


def _num_groups(matrix: StoredMatrix) -> int:
    scales = next(p for p in matrix.format.pieces(*matrix.shape) if p.name == "scales")
    return scales.shape[1 - (scales.row_axis or 0)]


def _refuse_any(is_bad: Tensor, values: Tensor, where: str, what: str) -> None:
    if is_bad.any():
        place = is_bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{where} has {int(is_bad.sum())} {what}, the first at {place} "
            f"({values[tuple(place)].item()})"
        )
