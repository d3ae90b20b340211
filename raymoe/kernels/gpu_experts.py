"""MoE experts on a GPU: grouped Triton kernels, and per-expert products with decoded weights."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from raymoe.kernels.cpu_experts import (
    SQUARES,
    Biases,
    Clamp,
    ExpertGroup,
    TopK,
    add_one_by_one,
    gated_product,
    one_by_one,
)
from raymoe.kernels.gpu_codes import (
    KernelMatrix,
    decoded,
    kernel_matrix,
    load_scaling,
    load_units,
)
from raymoe.kernels.gpu_common import TRITON_TYPES, Launch, round_to
from raymoe.kernels.gpu_experts_kernels import (
    COLUMNS_AT_ONCE,
    ExpertGroups,
    add_launch,
    align,
    combine_kernel,
    down_kernel,
    gate_up_kernel,
    gating,
    in_planes,
    num_tiles,
)
from raymoe.kernels.gpu_experts_layout import (
    Compute,
    ExpertMatrices,
    MatrixLayout,
    TileShape,
    addresses_of,
    alignment_of,
    units_of_step,
)
from raymoe.specs.layers import rows_at_once


class GroupedExperts:
    """All experts in four launches: sort, gate and up, down, and the weighted sums.

    Gate, up and down accumulate in float32; the gated product is rounded to the type of the hidden
    state. Expert outputs of a token are added in ascending order of expert, in float32, and rounded
    once. Nothing is added atomically and no order depends on the batch: on one GPU, the bits of a
    token do not depend on the other tokens.

    The kernels read the address of each matrix from a table that is made here, so matrices may lie
    anywhere on the device, and their contents may change between launches. `PlainExperts` on the
    same device is the reference.
    """

    def __init__(
        self,
        matrices: ExpertMatrices,
        *,
        compute: Compute,
        activation: str = "silu",
        clamp: Clamp | None = None,
    ) -> None:
        """Make the address table for matrices on one device that are all stored the same way."""
        layouts = matrices.layouts()
        assert layouts is not None, "the matrices of a layer's experts are stored the same"
        self._gate_up, self._down = layouts
        self._compute, self._matrices = compute, matrices
        self._has_bias = matrices.biases is not None
        self._gating = gating(activation, clamp)
        self._table_EA = _table_of(matrices)
        gate_up_alignment = min(alignment_of(matrices.gate_EFH), alignment_of(matrices.up_EFH))
        self._gate, self._up = (
            self._constants(self._gate_up, matrix, gate_up_alignment) for matrix in (0, 1)
        )
        self._squares = activation in SQUARES
        self._down_constants = self._constants(self._down, 2, alignment_of(matrices.down_EHF))

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        if not len(hidden_TH):
            return torch.empty_like(hidden_TH)
        sort, groups = self.align((topk_ids_TK, topk_weights_TK))
        sort.run()
        hidden_TX = in_planes(hidden_TH, self._gate_up.unit_inputs)
        rows_RH = self._computed(hidden_TX, groups, range(topk_ids_TK.numel()))
        combine, out_TH = self.combine(rows_RH, groups)
        combine.run()
        return out_TH

    def add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        """Add the outputs of a group, whose rows are computed `rows_at_once` at a time.

        How many rows it has only the device knows, so there are launches for as many as there may
        be; those beyond its rows do nothing.
        """
        if not len(hidden_TH):
            return
        sort, groups = self.align(routing, group.experts)
        sort.run()
        hidden_TX = in_planes(hidden_TH, self._gate_up.unit_inputs)
        num_rows = routing[0].numel()
        at_once = rows_at_once(num_rows, len(group.experts) / len(self._table_EA))
        for first in range(0, num_rows, at_once):
            rows = range(first, min(first + at_once, num_rows))
            rows_BH = self._computed(hidden_TX, groups, rows)
            add_launch(rows_BH, rows, routing, groups.places_TK, group).run()
            del rows_BH

    def _computed(self, hidden_TX: Tensor, groups: ExpertGroups, rows: range) -> Tensor:
        gate_up, product_BX = self.gate_up(hidden_TX, groups, rows)
        gate_up.run()
        down, rows_BH = self.down(product_BX, groups, rows)
        down.run()
        return rows_BH

    def align(self, routing: TopK, experts: range | None = None) -> tuple[Launch, ExpertGroups]:
        """Return the launch that sorts choices of `experts`, by default all, and what it writes."""
        num_rows = routing[0].numel()
        shapes = (self._shape(each, num_rows) for each in (self._gate_up, self._down))
        gate_up, down = (shape.rows for shape in shapes)
        return align(routing, len(self._table_EA), (gate_up, down), experts)

    def gate_up(
        self, hidden_TX: Tensor, groups: ExpertGroups, rows: range
    ) -> tuple[Launch, Tensor]:
        """Return the launch of gate and up for some rows, B of them, and its output.

        Args:
            hidden_TX: In the planes of gate and up (`in_planes`).
            rows: They begin at a multiple of `MAX_TILE_ROWS`.

        Returns:
            The output is [B, P * ...], in the planes of down.
        """
        outputs, _ = self._gate_up.shape
        shape = self._shape(self._gate_up, groups.places_TK.numel())
        planes = self._down.unit_inputs
        size = (len(rows), planes * self._down.num_units)
        # Padding columns are multiplied by codes that do not exist, so they must be zero.
        make = hidden_TX.new_zeros if outputs % planes else hidden_TX.new_empty
        product_BX = make(size)
        tiles = num_tiles(len(rows), shape.rows, groups.experts)
        launch = Launch(
            kernel=gate_up_kernel,
            grid=(tiles * _blocks(outputs, shape),),
            arguments={
                "hidden_ptr": hidden_TX,
                "tokens_ptr": groups.tokens_R,
                "tiles_ptr": groups.gate_up_tiles_NF,
                "table_ptr": self._table_EA,
                "product_ptr": product_BX,
                "first_row": rows.start,
                "end_row": rows.stop,
            },
            constants={
                "GATE": self._gate,
                "UP": self._up,
                "SQUARES": self._squares,
                "PLANES_OUT": planes,
                **self._gating,
                **self._common(shape),
            },
            options=_options(shape),
        )
        return launch, product_BX

    def down(self, product_BX: Tensor, groups: ExpertGroups, rows: range) -> tuple[Launch, Tensor]:
        """Return the launch of down for the same rows and its output, float32 [B, H]."""
        outputs, _ = self._down.shape
        shape = self._shape(self._down, groups.places_TK.numel())
        if self._compute.has_tensor_cores:
            shape = replace(shape, outputs=2 * shape.outputs)  # as many sums as of gate and up
        rows_BH = product_BX.new_empty(len(rows), outputs, dtype=torch.float32)
        tiles = num_tiles(len(rows), shape.rows, groups.experts)
        launch = Launch(
            kernel=down_kernel,
            grid=(tiles * _blocks(outputs, shape),),
            arguments={
                "product_ptr": product_BX,
                "tiles_ptr": groups.down_tiles_NF,
                "table_ptr": self._table_EA,
                "out_ptr": rows_BH,
                "first_row": rows.start,
                "end_row": rows.stop,
            },
            constants={"DOWN": self._down_constants, **self._common(shape)},
            options=_options(shape),
        )
        return launch, rows_BH

    def combine(self, rows_RH: Tensor, groups: ExpertGroups) -> tuple[Launch, Tensor]:
        """Return the launch of the weighted sums and its output, [T, H]."""
        num_tokens, top_k = groups.places_TK.shape
        hidden_size = rows_RH.shape[1]
        out_TH = rows_RH.new_empty(num_tokens, hidden_size, dtype=self._compute.dtype)
        launch = Launch(
            kernel=combine_kernel,
            grid=(num_tokens, -(-hidden_size // COLUMNS_AT_ONCE)),
            arguments={
                "rows_ptr": rows_RH,
                "places_ptr": groups.places_TK,
                "weights_ptr": groups.weights_TK,
                "out_ptr": out_TH,
            },
            constants={
                "HIDDEN": hidden_size,
                "TOP_K": top_k,
                "CHOICES": triton.next_power_of_2(top_k),
                "DTYPE": TRITON_TYPES[self._compute.dtype],
                "DOT": TRITON_TYPES[self._compute.dot],
                "COLUMNS": COLUMNS_AT_ONCE,
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
    addresses = [
        [address for matrix in matrices.of_expert(expert) for address in addresses_of(*matrix)]
        for expert in range(matrices.num_experts)
    ]
    return torch.tensor(addresses, dtype=torch.int64, device=matrices.device)


def _blocks(outputs: int, shape: TileShape) -> int:
    return -(-outputs // shape.outputs)


def _options(shape: TileShape) -> dict[str, int]:
    return {"num_warps": shape.warps, "num_stages": shape.stages}


DECODED_BYTES = 128 << 20  # maximum per block of outputs; the planner reserves it
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
    """Decode a block of outputs and one step of units, in planes, to [end - begin, P * U]."""
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
        # Codes beyond the last input are padding.
        is_input_1U = (units_U * M.unit_inputs + plane < M.inputs)[None, :]
        elements_OU = tl.where(is_input_1U, elements_OU, 0.0)
        columns_1U = (units_U + plane * M.num_units)[None, :]
        tl.store(out_ptr + (rows_O[:, None] + columns_1U), elements_OU, mask=inside_OU)


class DecodedMatrix:
    """A stored matrix [O, I] that is decoded for each product; torch multiplies."""

    def __init__(
        self, row_A: Tensor, matrix: KernelMatrix, layout: MatrixLayout, dtype: torch.dtype
    ) -> None:
        self._row_A, self._matrix, self._layout, self._dtype = row_A, matrix, layout, dtype

    def decode(self, begin: int, end: int) -> Tensor:
        """Decode outputs `begin` to `end` in planes, [end - begin, P * U]; padding inputs are zero.

        An element is the exact product of number and scale in float32, rounded.
        """
        launch, out_OX = self.launch(begin, end)
        launch.run()
        return out_OX

    def launch(self, begin: int, end: int) -> tuple[Launch, Tensor]:
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
        gate_TF = self.gate.multiply(hidden_TH, self._biases[0])
        up_TF = self.up.multiply(hidden_TH, self._biases[1])
        product_TF = gated_product(gate_TF, up_TF, self._activation, self._clamp)
        return self.down.multiply(product_TF, self._biases[2])


class DecodedExperts:
    """The loop of `PlainExperts`, which is the reference, with weights decoded on the GPU."""

    def __init__(
        self,
        matrices: ExpertMatrices,
        *,
        compute: Compute,
        activation: str,
        clamp: Clamp | None = None,
    ) -> None:
        layouts = matrices.layouts()
        assert layouts is not None, "the matrices of a layer's experts are stored the same"
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
        self._matrices = matrices  # keeps the tensors behind the addresses alive
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
        return one_by_one(self.ffns, hidden_TH, topk_ids_TK, topk_weights_TK)

    def add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        add_one_by_one(self.ffns, hidden_TH, routing, group)


_PRODUCT_COLUMNS = 1024


@triton.jit(do_not_specialize=["size"])
def gated_product_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    GAIN: tl.constexpr,
    CUBIC: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Multiply the activation of some gates by their ups; both are rounded."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    places = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    gate = tl.load(gate_ptr + places, mask=places < size, other=0).to(tl.float32)
    up = tl.load(up_ptr + places, mask=places < size, other=0).to(tl.float32)
    scaled = gate * GAIN
    if CUBIC != 0:  # Triton takes no float as a condition
        scaled *= 1.0 + CUBIC * gate * gate
    power = tl.exp(-tl.abs(scaled))  # of no positive number, so that it never overflows
    activated = gate * tl.div_rn(tl.where(scaled >= 0, 1.0, power), 1.0 + power)
    tl.store(out_ptr + places, round_to(round_to(activated, TYPE) * up, TYPE), mask=places < size)


def gated_product_launch(gate_TF: Tensor, up_TF: Tensor, gate: tuple[float, float]) -> Launch:
    """Multiply activation(gate) * up into `gate_TF`, for gain and cubic of `SIGMOID_GATES`."""
    return Launch(
        kernel=gated_product_kernel,
        grid=(-(-gate_TF.numel() // _PRODUCT_COLUMNS),),
        arguments={
            "gate_ptr": gate_TF,
            "up_ptr": up_TF,
            "out_ptr": gate_TF,
            "size": gate_TF.numel(),
        },
        constants={
            "GAIN": float(gate[0]),
            "CUBIC": float(gate[1]),
            "COLUMNS": _PRODUCT_COLUMNS,
        },
        options={"num_warps": 4},
    )
