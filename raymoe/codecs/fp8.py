"""FP8 (E4M3) with a float scale for each tile of 128 x 128, or for each output."""

import torch

from raymoe.codecs.codes import Codes
from raymoe.codecs.stored import StoredMatrix
from raymoe.specs.weight_format import FP8_COLUMNS, FP8_ROWS


def unpack_block(matrix: StoredMatrix) -> Codes:
    """Of `specs.weight_format.Fp8Block`."""
    return Codes(
        kind="e4m3",
        codes_OI=matrix.pieces["codes"].view(torch.uint8),
        scales_BG=matrix.pieces["scales"],
        group_size=FP8_COLUMNS,
        block_rows=FP8_ROWS,
    )


def unpack_channel(matrix: StoredMatrix) -> Codes:
    """Of `specs.weight_format.Fp8Channel`."""
    return Codes(
        kind="e4m3",
        codes_OI=matrix.pieces["codes"].view(torch.uint8),
        scales_BG=matrix.pieces["scales"],
        group_size=matrix.shape[1],
    )
