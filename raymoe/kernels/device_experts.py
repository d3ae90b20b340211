"""The experts of a layer on a GPU: three launches for all of them, over weights as they are stored.

Needs Triton; `device_experts_choice` imports this file where a GPU is used. T tokens, H hidden,
E experts, K experts per token, R = T * K rows, F expert hidden, P planes.
"""

import torch
from torch import Tensor

from raymoe.kernels.device_experts_choice import Compute, ExpertMatrices
from raymoe.kernels.device_experts_decode import TRITON_TYPES, kernel_matrix
from raymoe.kernels.device_experts_groups import (
    ExpertGroups,
    group_by_expert,
    in_planes,
    tile_table,
)
from raymoe.kernels.device_experts_kernels import combine_kernel, down_kernel, gate_up_kernel
from raymoe.kernels.device_experts_launch import Launch
from raymoe.kernels.device_experts_layout import MatrixLayout, addresses_of, alignment_of
from raymoe.kernels.device_experts_tiles import TileShape, units_of_step
from raymoe.kernels.packed_experts import Clamp

_COMBINED_COLUMNS = 1024


class GroupedExperts:
    """All experts in one launch for gate and up, one for down, one for the sums.

    Gate, up and down have float32 sums; the gated product is rounded to the type of the hidden
    state. The products of a token are added in ascending order of expert, in float32, and rounded
    once. Nothing is added atomically and no order depends on the batch: on one GPU, the bits of a
    token do not depend on the tokens beside it.

    The matrices may lie anywhere on the device: the kernels take the address of each tensor from a
    table, which is made here. What lies there when they run is read.

    `PlainExperts` on the same device is the reference.
    """

    def __init__(
        self, matrices: ExpertMatrices, *, compute: Compute, clamp: Clamp | None = None
    ) -> None:
        """Make the table.

        Args:
            matrices: On one device; stored alike, as `device_experts_choice` checks.
            compute: How.
            clamp: Limits of the gated product; silu without them.
        """
        layouts = matrices.layouts()
        assert layouts is not None, "the matrices of a layer's experts are stored alike"
        self._gate_up, self._down = layouts
        self._compute, self._matrices = compute, matrices
        self._has_bias = matrices.biases is not None
        self._gating = {"GAIN": 1.0, "LIMIT": None} if clamp is None else _gating(clamp)
        self._table_EA = _table_of(matrices)
        gate_up_alignment = min(alignment_of(matrices.gate_EFH), alignment_of(matrices.up_EFH))
        self._gate, self._up = (
            self._constants(self._gate_up, matrix, gate_up_alignment) for matrix in (0, 1)
        )
        self._down_constants = self._constants(self._down, 2, alignment_of(matrices.down_EHF))

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """See `Experts`."""
        if not len(hidden_TH):
            return torch.empty_like(hidden_TH)
        groups = group_by_expert(topk_ids_TK, topk_weights_TK, len(self._table_EA))
        gate_up, product_RX = self.gate_up(hidden_TH, groups)
        gate_up.run()
        down, rows_RH = self.down(product_RX, groups)
        del product_RX
        down.run()
        combine, out_TH = self.combine(rows_RH, groups)
        combine.run()
        return out_TH

    def gate_up(self, hidden_TH: Tensor, groups: ExpertGroups) -> tuple[Launch, Tensor]:
        """The launch of gate and up, and where its result goes: [R, P * ...] as down reads it."""
        num_rows, (outputs, _) = groups.places_TK.numel(), self._gate_up.shape
        shape = self._shape(self._gate_up, num_rows)
        planes = self._down.unit_inputs
        size = (num_rows, planes * self._down.num_units)
        # Places behind the last column are multiplied by codes that do not exist.
        make = hidden_TH.new_zeros if outputs % planes else hidden_TH.new_empty
        product_RX = make(size)
        tiles = tile_table(groups.bounds_E1, num_rows, shape.rows)
        launch = Launch(
            kernel=gate_up_kernel,
            grid=(len(tiles) * _blocks(outputs, shape),),
            arguments={
                "hidden_ptr": in_planes(hidden_TH, self._gate_up.unit_inputs),
                "tokens_ptr": groups.tokens_R,
                "tiles_ptr": tiles,
                "table_ptr": self._table_EA,
                "product_ptr": product_RX,
            },
            constants={
                "GATE": self._gate,
                "UP": self._up,
                "PLANES_OUT": planes,
                **self._gating,
                **self._common(shape),
            },
            options=_options(shape),
        )
        return launch, product_RX

    def down(self, product_RX: Tensor, groups: ExpertGroups) -> tuple[Launch, Tensor]:
        """The launch of down, and where its result goes: float32 [R, H]."""
        num_rows, (outputs, _) = len(product_RX), self._down.shape
        shape = self._shape(self._down, num_rows)
        rows_RH = product_RX.new_empty(num_rows, outputs, dtype=torch.float32)
        tiles = tile_table(groups.bounds_E1, num_rows, shape.rows)
        launch = Launch(
            kernel=down_kernel,
            grid=(len(tiles) * _blocks(outputs, shape),),
            arguments={
                "product_ptr": product_RX,
                "tiles_ptr": tiles,
                "table_ptr": self._table_EA,
                "out_ptr": rows_RH,
            },
            constants={"DOWN": self._down_constants, **self._common(shape)},
            options=_options(shape),
        )
        return launch, rows_RH

    def combine(self, rows_RH: Tensor, groups: ExpertGroups) -> tuple[Launch, Tensor]:
        """The launch of the sums, and where its result goes: [T, H]."""
        num_tokens, top_k = groups.places_TK.shape
        hidden_size = rows_RH.shape[1]
        out_TH = rows_RH.new_empty(num_tokens, hidden_size, dtype=self._compute.dtype)
        launch = Launch(
            kernel=combine_kernel,
            grid=(num_tokens, -(-hidden_size // _COMBINED_COLUMNS)),
            arguments={
                "rows_ptr": rows_RH,
                "places_ptr": groups.places_TK,
                "weights_ptr": groups.weights_TK,
                "out_ptr": out_TH,
            },
            constants={
                "HIDDEN": hidden_size,
                "TOP_K": top_k,
                "DTYPE": TRITON_TYPES[self._compute.dtype],
                "DOT": TRITON_TYPES[self._compute.dot],
                "COLUMNS": _COMBINED_COLUMNS,
            },
            options={"num_warps": 4},
        )
        return launch, out_TH

    def _shape(self, layout: MatrixLayout, num_rows: int) -> TileShape:
        return self._compute.tiles.shape(layout, num_rows / len(self._table_EA))

    def _common(self, shape: TileShape) -> dict[str, object]:
        return {
            "TABLE_FIELDS": self._table_EA.shape[1],
            "HAS_BIAS": self._has_bias,
            "OUTPUTS": shape.outputs,
            "ROWS": shape.rows,
        }

    def _constants(self, layout: MatrixLayout, matrix: int, alignment: int) -> object:
        return kernel_matrix(
            layout,
            matrix=matrix,
            dtype=self._compute.dtype,
            dot=self._compute.dot,
            step=units_of_step(layout, has_tensor_cores=self._compute.has_tensor_cores),
            alignment=alignment,
        )


def _table_of(matrices: ExpertMatrices) -> Tensor:
    """Addresses of all tensors, int64 [E, A], on the device of the matrices."""
    addresses = [
        [address for matrix in matrices.of_expert(expert) for address in addresses_of(*matrix)]
        for expert in range(matrices.num_experts)
    ]
    return torch.tensor(addresses, dtype=torch.int64, device=matrices.device)


def _gating(clamp: Clamp) -> dict[str, float | None]:
    return {"GAIN": float(clamp.gain), "LIMIT": float(clamp.limit)}


def _blocks(outputs: int, shape: TileShape) -> int:
    return -(-outputs // shape.outputs)


def _options(shape: TileShape) -> dict[str, int]:
    return {"num_warps": shape.warps, "num_stages": shape.stages}
