"""INT4 of compressed-tensors: codes in order along the inputs, zero points along the outputs."""

from raymoe.codecs.codes import Codes, nibbles
from raymoe.codecs.stored import StoredMatrix


def unpack(matrix: StoredMatrix) -> Codes:
    """Of `specs.weight_format.PackedInt4`."""
    outputs, inputs = matrix.shape
    pieces = matrix.pieces
    zeros_OG = None
    if "zeros" in pieces:
        zeros_OG = nibbles(pieces["zeros"].t().contiguous())[:, :outputs].t()
    return Codes(
        kind="int4",
        codes_OI=nibbles(pieces["codes"])[:, :inputs],
        scales_BG=pieces["scales"],
        group_size=inputs // pieces["scales"].shape[1],
        zeros_OG=zeros_OG,
        order_I=pieces.get("order"),
    )
