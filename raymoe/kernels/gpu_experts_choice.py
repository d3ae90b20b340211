"""Which kernels compute the experts of a layer on a GPU: ours in Triton, or torch's one by one.

Triton is imported where a GPU is used, and nowhere else.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix
from raymoe.kernels.cpu_experts import (
    Clamp,
    Experts,
    PlainExperts,
)
from raymoe.kernels.gpu_experts_layout import (
    TENSOR_CORES_SINCE,
    Compute,
    ExpertMatrices,
    TileTable,
)

OLDEST_CAPABILITY = (7, 5)


# Per expert: 8.1 TFLOP/s of a T4 without tensor cores read 16-bit weights at its 320 GB/s for about
# as many. From the data sheet, not measured.
MAX_SMALL_BATCH_TOKENS = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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

    from raymoe.kernels.gpu_experts import DecodedExperts, GroupedExperts  # noqa: PLC0415 - needs Triton

    found = tiles or TileTable(capability=torch.cuda.get_device_capability(matrices.device))
    compute = Compute.on(found, dtype)
    grouped = GroupedExperts(matrices, compute=compute, clamp=clamp)
    if found.capability >= TENSOR_CORES_SINCE or dtype != torch.float16:
        return grouped
    if not isinstance(matrices.gate_EFH[0], StoredMatrix):
        return DispatchByBatchSize(grouped, plain, matrices.num_experts)
    decoded = DecodedExperts(matrices, compute=compute, activation=activation, clamp=clamp)
    return DispatchByBatchSize(grouped, decoded, matrices.num_experts)


class DispatchByBatchSize:
    """Our kernels for few tokens, cuBLAS expert by expert for many: Turing in float16.

    Triton multiplies there without the tensor cores, and still reads weights as fast as they come.
    The bits of a token depend on which of both it is, and so on the tokens beside it.
    """

    def __init__(self, few: Experts, many: Experts, num_experts: int) -> None:
        self._small_batch, self._large_batch, self._num_experts = few, many, num_experts

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        is_small_batch = topk_ids_TK.numel() <= MAX_SMALL_BATCH_TOKENS * self._num_experts
        return (self._small_batch if is_small_batch else self._large_batch)(
            hidden_TH, topk_ids_TK, topk_weights_TK
        )


def grouped_experts_are_used(
    matrices: ExpertMatrices, activation: str, dtype: torch.dtype, clamp: Clamp | None
) -> bool:
    """Whether `make_device_experts` takes our kernels.

    It does on a GPU from Turing on, where Triton is installed, for silu and the clamped product, if
    all experts of the layer are stored the same.
    """
    device = matrices.device
    if device.type != "cuda" or find_spec("triton") is None or dtype not in DTYPES:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return False
    return (activation == "silu" or clamp is not None) and matrices.layouts() is not None
