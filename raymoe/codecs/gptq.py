"""INT4 of GPTQ: codes in order along the inputs, zero points less one along the outputs."""

import torch

from raymoe.codecs.codes import Codes, nibbles
from raymoe.codecs.stored import StoredMatrix

_ONE_IN_EACH_NIBBLE = 0x11111111


def unpack(matrix: StoredMatrix) -> Codes:
    """Of `specs.weight_format.Gptq`.

    One is added to whole words of zero points, carries and all, as GPTQModel does: it took them
    off in the same way.
    """
    outputs, inputs = matrix.shape
    pieces = matrix.pieces
    words_JO = pieces["codes"]
    bytes_JBO = words_JO.view(torch.uint8).view(*words_JO.shape, 4).transpose(1, 2)
    codes_IO = torch.stack((bytes_JBO & 0xF, bytes_JBO >> 4), 2).reshape(inputs, outputs)
    scales_GO = pieces["scales"]
    group_size = inputs // len(scales_GO)
    return Codes(
        kind="int4",
        codes_OI=codes_IO.t(),
        scales_BG=scales_GO.t(),
        group_size=group_size,
        zeros_OG=nibbles(pieces["zeros"] + _ONE_IN_EACH_NIBBLE).t(),
        order_I=pieces["order"],
    )
