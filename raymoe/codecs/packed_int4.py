"""INT4 of compressed-tensors: codes in order along the inputs, zero points along the outputs."""

import torch

from raymoe.codecs.codes import Codes, nibbles
from raymoe.codecs.stored import StoredMatrix


def unpack(matrix: StoredMatrix) -> Codes:
    """Of `specs.weight_format.PackedInt4`."""
    outputs, inputs = matrix.shape
    pieces = matrix.pieces
    zeros_OG = None
    if "zeros" in pieces:
        words_WG = pieces["zeros"]
        shifts_8 = 4 * torch.arange(8, dtype=torch.int32, device=words_WG.device)
        zeros_OG = (words_WG[:, None] >> shifts_8[:, None] & 0xF).flatten(0, 1)[:outputs].byte()
    return Codes(
        kind="int4",
        codes_OI=nibbles(pieces["codes"])[:, :inputs],
        scales_BG=pieces["scales"],
        group_size=inputs // pieces["scales"].shape[1],
        zeros_OG=zeros_OG,
        order_I=pieces.get("order"),
    )
