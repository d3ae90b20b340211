"""Which kernels compute the experts of a layer on a device: ours in Triton, or torch's one by one.

Triton is imported where a GPU is used, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight
from raymoe.kernels.cpu_experts import Experts, PlainExperts
from raymoe.kernels.device_experts_layout import MatrixLayout, layout_of
from raymoe.kernels.device_experts_tiles import TENSOR_CORES_SINCE, TileTable
from raymoe.kernels.packed_experts import Biases, Clamp

OLDEST_CAPABILITY = (7, 5)
# Per expert: 8.1 TFLOP/s of a T4 without tensor cores read 16-bit weights at its 320 GB/s for about
# as many. From the data sheet, not measured.
FEW_TOKENS = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class ExpertMatrices(NamedTuple):
    """The weights of all experts of a layer, and their biases; E experts, H hidden, F wide.

    Attributes:
        gate_EFH: Gate projections.
        up_EFH: Up projections.
        down_EHF: Down projections.
        biases: Of all three.
        are_reordered: Whether tables that name the group of each input (act-order) may name others
            than groups of neighbours do; without them they are not read.
    """

    gate_EFH: Sequence[Weight]
    up_EFH: Sequence[Weight]
    down_EHF: Sequence[Weight]
    biases: Sequence[Biases] | None = None
    are_reordered: bool = True

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.gate_EFH)

    def of_expert(self, expert: int) -> list[tuple[Weight, Tensor | None]]:
        """Its three matrices with their biases."""
        weights = (self.gate_EFH[expert], self.up_EFH[expert], self.down_EHF[expert])
        if self.biases is None:
            return [(weight, None) for weight in weights]
        return list(zip(weights, self.biases[expert], strict=True))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        first = self.gate_EFH[0]
        return first.pieces["codes"].device if isinstance(first, StoredMatrix) else first.device

    def layouts(self) -> tuple[MatrixLayout, MatrixLayout] | None:
        """Of gate and up, and of down; None where experts, or gate and up, are stored unlike."""
        found = layout_of([*chain(self.gate_EFH, self.up_EFH)]), layout_of([*self.down_EHF])
        if found[0] is None or found[1] is None:
            return None
        gate_up, down = (
            replace(layout, has_order=layout.has_order and self.are_reordered)
            for layout in (found[0], found[1])
        )
        return gate_up, down


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """How our kernels compute experts.

    Attributes:
        dtype: Type of hidden states; stored weights are rounded to it.
        dot: Type in which the kernels multiply. The same, but float32 for bfloat16 on Turing, which
            has no product of it: exact, and slow (float16 suits Turing), and in the interpreter.
        tiles: How large the tiles are.
    """

    dtype: torch.dtype
    dot: torch.dtype
    tiles: TileTable

    @classmethod
    def on(cls, tiles: TileTable, dtype: torch.dtype) -> "Compute":
        """On the GPU that the tiles are for."""
        has_dot = dtype != torch.bfloat16 or tiles.capability >= TENSOR_CORES_SINCE
        return cls(dtype=dtype, dot=dtype if has_dot else torch.float32, tiles=tiles)

    @property
    def has_tensor_cores(self) -> bool:
        """Whether they multiply."""
        return self.dot != torch.float32 and self.tiles.capability >= TENSOR_CORES_SINCE


def make_device_experts(
    matrices: ExpertMatrices,
    *,
    activation: str,
    dtype: torch.dtype,
    clamp: Clamp | None = None,
    tiles: TileTable | None = None,
) -> Experts:
    """The fastest experts for weights that are where they are.

    Args:
        matrices: Views; nothing is copied.
        activation: Of the gated product, where there is no clamp.
        dtype: Type of hidden states.
        clamp: Limits of the gated product.
        tiles: Measured tiles of the GPU; None for the usual ones.
    """
    plain = PlainExperts(
        matrices.gate_EFH,
        matrices.up_EFH,
        matrices.down_EHF,
        activation=activation,
        biases=matrices.biases,
        clamp=clamp,
    )
    if not grouped_experts_are_used(matrices, activation, dtype, clamp):
        return plain
    # They need Triton.
    from raymoe.kernels.device_experts import GroupedExperts  # noqa: PLC0415
    from raymoe.kernels.device_experts_decoded import DecodedExperts  # noqa: PLC0415

    found = tiles or TileTable(capability=torch.cuda.get_device_capability(matrices.device))
    compute = Compute.on(found, dtype)
    grouped = GroupedExperts(matrices, compute=compute, clamp=clamp)
    if found.capability >= TENSOR_CORES_SINCE or dtype != torch.float16:
        return grouped
    if not isinstance(matrices.gate_EFH[0], StoredMatrix):
        return FewOrMany(grouped, plain, matrices.num_experts)
    decoded = DecodedExperts(matrices, compute=compute, activation=activation, clamp=clamp)
    return FewOrMany(grouped, decoded, matrices.num_experts)


class FewOrMany:
    """Our kernels for few tokens, cuBLAS expert by expert for many: Turing in float16.

    Triton multiplies there without the tensor cores, and still reads weights as fast as they come.
    The bits of a token depend on which of both it is, and so on the tokens beside it.
    """

    def __init__(self, few: Experts, many: Experts, num_experts: int) -> None:
        self._few, self._many, self._num_experts = few, many, num_experts

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """See `Experts`."""
        has_few = topk_ids_TK.numel() <= FEW_TOKENS * self._num_experts
        return (self._few if has_few else self._many)(hidden_TH, topk_ids_TK, topk_weights_TK)


def grouped_experts_are_used(
    matrices: ExpertMatrices, activation: str, dtype: torch.dtype, clamp: Clamp | None
) -> bool:
    """Whether `make_device_experts` takes our kernels.

    It does on a GPU from Turing on, where Triton is installed, for silu and the clamped product, if
    all experts of the layer are stored alike.
    """
    device = matrices.device
    if device.type != "cuda" or find_spec("triton") is None or dtype not in DTYPES:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return False
    return (activation == "silu" or clamp is not None) and matrices.layouts() is not None
