"""MXFP4: E2M1 in order along the inputs, one power of two for 32 of them."""

from raymoe.codecs.codes import Codes, nibbles
from raymoe.codecs.stored import StoredMatrix
from raymoe.specs.weight_format import MXFP4_COLUMNS


def unpack(matrix: StoredMatrix) -> Codes:
    """Of `specs.weight_format.Mxfp4`."""
    return Codes(
        kind="e2m1",
        codes_OI=nibbles(matrix.pieces["codes"]).flatten(1),
        scales_BG=matrix.pieces["scales"],
        group_size=MXFP4_COLUMNS,
    )
