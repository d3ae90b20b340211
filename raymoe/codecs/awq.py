"""INT4 of AWQ: eight outputs in a word, in the order that its GPU kernel takes them."""

import torch
from torch import Tensor

from raymoe.codecs.codes import Codes
from raymoe.codecs.stored import StoredMatrix

_LOWER_HALF = 0xFFFF


def unpack(matrix: StoredMatrix) -> Codes:
    """Of `specs.weight_format.Awq`."""
    scales_GO = matrix.pieces["scales"]
    return Codes(
        kind="int4",
        codes_OI=_in_order(matrix.pieces["codes"]).t(),
        scales_BG=scales_GO.t(),
        group_size=matrix.shape[1] // len(scales_GO),
        zeros_OG=_in_order(matrix.pieces["zeros"]).t(),
    )


def _in_order(words: Tensor) -> Tensor:
    """Nibbles of words as bytes: the lower half of a word holds outputs 0 2 4 6, the upper 1 3 5 7.

    [n, m] int32 -> [n, 8 * m] uint8.
    """
    even, odd = _spread(words & _LOWER_HALF), _spread(words >> 16 & _LOWER_HALF)
    return torch.stack((even.view(torch.uint8), odd.view(torch.uint8)), -1).flatten(1)


def _spread(halves: Tensor) -> Tensor:
    """The four nibbles of the lower half of each word to its four bytes, in place."""
    halves |= halves << 8
    halves &= 0x00FF00FF
    halves |= halves << 4
    halves &= 0x0F0F0F0F
    return halves
