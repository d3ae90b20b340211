"""Choice of the kernels for the experts of a layer on a GPU: Triton or torch.

This module does not import Triton, so that it can be used without a GPU.
"""

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix
from raymoe.kernels.cpu_experts import (
    SIGMOID_GATES,
    Clamp,
    ExpertGroup,
    ExpertsInGroups,
    PlainExperts,
    TopK,
)
from raymoe.kernels.elementwise import FLOAT_DTYPES, triton_runs_on
from raymoe.kernels.gpu_experts_layout import (
    Compute,
    ExpertMatrices,
    TileTable,
)
from raymoe.kernels.triton_support import TENSOR_CORES_SINCE

# Per expert: a T4 computes 8.1 TFLOP/s without tensor cores, which balances 16-bit weights at 320
# GB/s at about as many tokens. From the data sheet, not measured.
MAX_SMALL_BATCH_TOKENS = 16


def make_device_experts(
    matrices: ExpertMatrices,
    *,
    activation: str,
    dtype: torch.dtype,
    clamp: Clamp | None = None,
    tiles: TileTable | None = None,
) -> ExpertsInGroups:
    """Return the fastest experts for weights that stay where they are."""
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
    # These modules import Triton.

    from raymoe.kernels.gpu_experts import DecodedExperts, GroupedExperts  # noqa: PLC0415 - needs Triton

    found = tiles or TileTable(capability=torch.cuda.get_device_capability(matrices.device))
    compute = Compute.on(found, dtype)
    grouped = GroupedExperts(matrices, compute=compute, activation=activation, clamp=clamp)
    if found.capability >= TENSOR_CORES_SINCE or dtype != torch.float16:
        return grouped
    if not isinstance(matrices.gate_EFH[0], StoredMatrix):
        return DispatchByBatchSize(grouped, plain, matrices.num_experts)
    decoded = DecodedExperts(matrices, compute=compute, activation=activation, clamp=clamp)
    return DispatchByBatchSize(grouped, decoded, matrices.num_experts)


class DispatchByBatchSize:
    """Triton kernels for small batches, cuBLAS expert by expert for large ones: float16 on Turing.

    Triton does not use the tensor cores of Turing, but reads weights at full bandwidth. The bits of
    a token depend on the choice, and so on the batch.
    """

    def __init__(self, few: ExpertsInGroups, many: ExpertsInGroups, num_experts: int) -> None:
        self._small_batch, self._large_batch, self._num_experts = few, many, num_experts

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        return self._chosen(topk_ids_TK)(hidden_TH, topk_ids_TK, topk_weights_TK)

    def add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        self._chosen(routing[0]).add(hidden_TH, routing, group)

    def _chosen(self, topk_ids_TK: Tensor) -> ExpertsInGroups:
        is_small_batch = topk_ids_TK.numel() <= MAX_SMALL_BATCH_TOKENS * self._num_experts
        return self._small_batch if is_small_batch else self._large_batch


def grouped_experts_are_used(
    matrices: ExpertMatrices, activation: str, dtype: torch.dtype, clamp: Clamp | None
) -> bool:
    """Whether `make_device_experts` uses the grouped Triton kernels.

    It does on a GPU from Turing on, if Triton is installed, for the activations of `SIGMOID_GATES`
    and the clamped product, and if all experts of the layer are stored the same way.
    """
    if not triton_runs_on(matrices.device) or dtype not in FLOAT_DTYPES:
        return False
    return (activation in SIGMOID_GATES or clamp is not None) and matrices.layouts() is not None
