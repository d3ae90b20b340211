"""How weights are packed for the CPU kernels: panels of bfloat16, or of codes as they are stored.

O outputs, I inputs, F expert hidden, H hidden.
"""

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from raymoe import _native
from raymoe.codecs import Codes, StoredMatrix, Weight, unpack
from raymoe.codecs.codes import float_scales
from raymoe.specs.weight_format import WeightFormat

_KINDS = {
    ("int4", torch.float16): "int4_float16",
    ("int4", torch.bfloat16): "int4_bfloat16",
    ("e2m1", torch.uint8): "e2m1",
}


class Packing(Protocol):
    """A packed form."""

    @property
    def format(self) -> _native.CodeFormat | None:
        """Of the codes; None: bfloat16."""

    def linear_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a matrix [O, I]."""

    def gate_up_bytes(self, expert_size: int, hidden_size: int) -> int:
        """Bytes of gate and up [F, H] of one expert together."""

    def pack_linear(self, weight_OI: Weight, out: Tensor) -> None:
        """Pack a matrix into memory of that many bytes, aligned to 64."""

    def pack_gate_up(self, gate_FH: Weight, up_FH: Weight, out: Tensor) -> None:
        """Pack gate and up together."""


class BFloat16Packing:
    """Weights in bfloat16."""

    format: _native.CodeFormat | None = None

    def linear_bytes(self, out_features: int, in_features: int) -> int:
        """See `Packing`."""
        return _native.packed_bytes(out_features, in_features)

    def gate_up_bytes(self, expert_size: int, hidden_size: int) -> int:
        """See `Packing`."""
        return _native.packed_gate_up_bytes(expert_size, hidden_size)

    def pack_linear(self, weight_OI: Weight, out: Tensor) -> None:
        """See `Packing`."""
        assert isinstance(weight_OI, Tensor)
        _native.pack_linear(weight_OI.detach(), out)

    def pack_gate_up(self, gate_FH: Weight, up_FH: Weight, out: Tensor) -> None:
        """See `Packing`."""
        assert isinstance(gate_FH, Tensor)
        assert isinstance(up_FH, Tensor)
        _native.pack_gate_up(gate_FH.detach(), up_FH.detach(), out)


class CodePacking:
    """Codes, scales and zero points in as many bits as they are stored.

    The kernels decode a block of a panel right before they multiply it: elements are rounded to
    bfloat16, subnormal ones to zero, and multiplied as if they had been stored so.
    """

    def __init__(self, codes: Codes) -> None:
        self.format = _native.CodeFormat(
            _kind(codes),
            codes.group_size,
            codes.block_rows > 1,
            codes.zeros_OG is not None,
            codes.order_I is not None,
        )

    def linear_bytes(self, out_features: int, in_features: int) -> int:
        """See `Packing`."""
        return self.format.packed_bytes(out_features, in_features)

    def gate_up_bytes(self, expert_size: int, hidden_size: int) -> int:
        """See `Packing`."""
        return self.format.packed_gate_up_bytes(expert_size, hidden_size)

    def pack_linear(self, weight_OI: Weight, out: Tensor) -> None:
        """See `Packing`."""
        _native.pack_codes(self.format, _tensors(weight_OI), out)

    def pack_gate_up(self, gate_FH: Weight, up_FH: Weight, out: Tensor) -> None:
        """See `Packing`."""
        _native.pack_gate_up_codes(self.format, _tensors(gate_FH), _tensors(up_FH), out)


def packing_of(weight: Weight) -> Packing:
    """How a weight is packed."""
    return CodePacking(unpack(weight)) if isinstance(weight, StoredMatrix) else BFloat16Packing()


@lru_cache
def packing_for(stored: WeightFormat | None, out_features: int, in_features: int) -> Packing:
    """A packing of the same sizes before there is a weight; None: it is not quantised."""
    if stored is None:
        return BFloat16Packing()
    shape = (out_features, in_features)
    return CodePacking(unpack(StoredMatrix.without_data(stored, shape)))


def _kind(codes: Codes) -> str:
    return "e4m3" if codes.kind == "e4m3" else _KINDS[codes.kind, codes.scales_BG.dtype]


def _tensors(
    weight: Weight,
) -> tuple[Tensor, Tensor, int, Tensor | None, Tensor | None]:
    assert isinstance(weight, StoredMatrix)
    codes = unpack(weight)
    scales_BG = float_scales(codes.scales_BG) if codes.kind == "e4m3" else codes.scales_BG
    return codes.codes_OI, scales_BG, codes.block_rows, codes.zeros_OG, codes.order_I
