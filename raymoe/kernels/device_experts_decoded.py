"""Experts one by one on a GPU: our kernel decodes a matrix, torch multiplies by it.

For Turing and many tokens: cuBLAS uses its tensor cores, Triton does not. Needs Triton. T tokens,
H hidden, F expert hidden, O outputs, I inputs, P planes of U units: see `device_experts_groups`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from raymoe.kernels.cpu_experts import gated_product, one_by_one
from raymoe.kernels.device_experts_choice import Compute, ExpertMatrices
from raymoe.kernels.device_experts_decode import (
    KernelMatrix,
    decoded,
    kernel_matrix,
    load_scaling,
    load_units,
)
from raymoe.kernels.device_experts_groups import in_planes
from raymoe.kernels.device_experts_launch import Launch
from raymoe.kernels.device_experts_layout import (
    MatrixLayout,
    addresses_of,
    alignment_of,
)
from raymoe.kernels.packed_experts import Biases, Clamp

DECODED_BYTES = 128 << 20  # of a block of outputs, at most: the planner counts with it
_OUTPUTS, _STEP = 64, 16


@triton.jit
def decode_kernel(
    row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    M: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """Elements of a block of outputs and one step of units, in planes.

    Args:
        row_ptr: int64, the addresses of the matrix.
        out_ptr: [end - begin, P * U].
        begin: Output of the first row.
        end: Output behind the last.
        M: `KernelMatrix`.
        OUTPUTS: Of one program.
    """
    block, step = tl.program_id(0), tl.program_id(1)
    outputs_O = begin + block * OUTPUTS + tl.arange(0, OUTPUTS)
    units_U = step * M.step + tl.arange(0, M.step)
    units_OU = load_units(row_ptr, outputs_O, units_U, M)
    inside_OU = (outputs_O < end)[:, None] & (units_U < M.num_units)[None, :]
    rows_O = (outputs_O - begin).to(tl.int64) * (M.unit_inputs * M.num_units)
    for plane in tl.static_range(M.unit_inputs):
        if plane == 0 or M.groups == "plane":
            scaling = load_scaling(row_ptr, outputs_O, units_U, step, plane, M)
        elements_OU = decoded(units_OU, scaling[0], scaling[1], outputs_O, plane, M)
        # Behind the last input there are codes of nothing.
        is_input_1U = (units_U * M.unit_inputs + plane < M.inputs)[None, :]
        elements_OU = tl.where(is_input_1U, elements_OU, 0.0)
        columns_1U = (units_U + plane * M.num_units)[None, :]
        tl.store(out_ptr + (rows_O[:, None] + columns_1U), elements_OU, mask=inside_OU)


class DecodedMatrix:
    """A stored matrix [O, I] that is decoded for each product; torch multiplies."""

    def __init__(
        self, row_A: Tensor, matrix: KernelMatrix, layout: MatrixLayout, dtype: torch.dtype
    ) -> None:
        """Decode what lies at the addresses `row_A`."""
        self._row_A, self._matrix, self._layout, self._dtype = row_A, matrix, layout, dtype

    def decode(self, begin: int, end: int) -> Tensor:
        """Outputs `begin` to `end` in planes, [end - begin, P * U], zero behind the last input.

        An element is the exact product of number and scale in float32, rounded.
        """
        launch, out_OX = self.launch(begin, end)
        launch.run()
        return out_OX

    def launch(self, begin: int, end: int) -> tuple[Launch, Tensor]:
        """The launch of `decode`, and where its result goes."""
        columns = self._layout.unit_inputs * self._layout.num_units
        out_OX = torch.empty(end - begin, columns, dtype=self._dtype, device=self._row_A.device)
        launch = Launch(
            kernel=decode_kernel,
            grid=(-(-(end - begin) // _OUTPUTS), -(-self._layout.num_units // _STEP)),
            arguments={"row_ptr": self._row_A, "out_ptr": out_OX, "begin": begin, "end": end},
            constants={"M": self._matrix, "OUTPUTS": _OUTPUTS},
            options={"num_warps": 4},
        )
        return launch, out_OX

    def multiply(self, input_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Products with all outputs, [T, O], rounded to the type of the input."""
        outputs, inputs = self._layout.shape
        input_TX = in_planes(input_TI, self._layout.unit_inputs)
        out_TO = input_TI.new_empty(len(input_TI), outputs)
        rows = max(DECODED_BYTES // (inputs * self._dtype.itemsize) // _OUTPUTS, 1) * _OUTPUTS
        for begin in range(0, outputs, rows):
            end = min(begin + rows, outputs)
            bias = None if bias_O is None else bias_O[begin:end]
            out_TO[:, begin:end] = functional.linear(input_TX, self.decode(begin, end), bias)
        return out_TO


class DecodedFfn:
    """The gated network of one expert; the attributes are its matrices."""

    def __init__(
        self,
        matrices: Sequence[DecodedMatrix],
        biases: Biases | None,
        *,
        activation: str,
        clamp: Clamp | None,
    ) -> None:
        self.gate, self.up, self.down = matrices
        self._biases = (None, None, None) if biases is None else biases
        self._activation, self._clamp = activation, clamp

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """See `cpu_experts.GatedFfn`."""
        gate_TF = self.gate.multiply(hidden_TH, self._biases[0])
        up_TF = self.up.multiply(hidden_TH, self._biases[1])
        product_TF = gated_product(gate_TF, up_TF, self._activation, self._clamp)
        return self.down.multiply(product_TF, self._biases[2])


class DecodedExperts:
    """The loop of `PlainExperts`, which is the reference, with our decoding.

    Attributes:
        ffns: The networks.
    """

    def __init__(
        self,
        matrices: ExpertMatrices,
        *,
        compute: Compute,
        activation: str,
        clamp: Clamp | None = None,
    ) -> None:
        """Make the table of addresses; arguments as of `device_experts.GroupedExperts`."""
        layouts = matrices.layouts()
        assert layouts is not None, "the matrices of a layer's experts are stored alike"
        gate_up, down = layouts
        alignment = min(
            alignment_of(each) for each in (matrices.gate_EFH, matrices.up_EFH, matrices.down_EHF)
        )
        wide, narrow = (
            kernel_matrix(
                layout,
                matrix=0,
                dtype=compute.dtype,
                dot=compute.dot,
                step=_STEP,
                alignment=alignment,
            )
            for layout in (gate_up, down)
        )
        kinds = ((wide, gate_up), (wide, gate_up), (narrow, down))
        self._matrices = matrices  # the addresses are valid for as long as they live
        self.ffns = []
        for expert in range(matrices.num_experts):
            rows = [addresses_of(*matrix) for matrix in matrices.of_expert(expert)]
            table_3A = torch.tensor(rows, dtype=torch.int64, device=matrices.device)
            decoded_3 = [
                DecodedMatrix(row_A, *kind, compute.dtype)
                for row_A, kind in zip(table_3A, kinds, strict=True)
            ]
            biases = None if matrices.biases is None else matrices.biases[expert]
            self.ffns.append(DecodedFfn(decoded_3, biases, activation=activation, clamp=clamp))

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """See `cpu_experts.Experts`."""
        return one_by_one(self.ffns, hidden_TH, topk_ids_TK, topk_weights_TK)
