"""INT4 of AWQ: eight outputs in a word, in the order that its GPU kernel takes them."""

from torch import Tensor

from raymoe.codecs.codes import Codes, nibbles
from raymoe.codecs.stored import StoredMatrix

# Nibble of each of eight neighbouring outputs: a word holds 0 2 4 6 1 3 5 7.
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]


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
    found = nibbles(words)
    return found.view(len(found), -1, 8)[:, :, _NIBBLE_OF_OUTPUT].flatten(1)
