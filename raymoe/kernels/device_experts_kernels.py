"""The three kernels of a layer's experts on a GPU: gate and up, down, and the sum of each token.

Needs Triton: imported only where a kernel runs. Tiles are as `device_experts_groups.tile_table`
lists them; a row of the table of addresses belongs to an expert. Weights are the left operand of
every product, so that the same instruction multiplies few tokens and many: the order of the sums,
and with it the bits of a token, does not depend on how many tokens there are beside it.

N rows of a tile, O outputs of a tile, U units of codes, P planes of a unit.
"""

import triton
import triton.language as tl

from raymoe.kernels.device_experts_decode import (
    BIAS,
    decoded,
    load_scaling,
    load_units,
    pointer,
    rounded,
)
from raymoe.kernels.device_experts_groups import TILE_FIELDS as _TILE_FIELDS

TILE_FIELDS = tl.constexpr(_TILE_FIELDS)


@triton.jit
def _tile(
    tiles_ptr: tl.tensor, NUM_BLOCKS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Expert, block of outputs, and rows [N] of this program, with the row behind the last.

    Programs that are neighbours work on the same weights: the tiles of an expert come first, its
    blocks of outputs after them, the experts last. So weights are read once, whatever the cache.
    """
    program = tl.program_id(0)
    row_ptr = tiles_ptr + program // NUM_BLOCKS * TILE_FIELDS
    expert = tl.load(row_ptr)
    first, count = tl.load(row_ptr + 1), tl.load(row_ptr + 2)
    begin, end = tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    count = tl.maximum(count, 1)
    within = program - first * NUM_BLOCKS
    rows_N = begin + within % count * ROWS + tl.arange(0, ROWS)
    return expert, within // count, rows_N, end


@triton.jit
def _load_inputs(
    places_ptr: tl.tensor, units_U: tl.tensor, PLANE: tl.constexpr, M: tl.constexpr
) -> tl.tensor:
    """Inputs of one plane as a right operand, [U, N]; `places_ptr` are rows [N, 1]."""
    columns_1U = (units_U + PLANE * M.num_units)[None, :]
    if M.is_even:
        input_NU = tl.load(places_ptr + columns_1U)
    else:
        input_NU = tl.load(places_ptr + columns_1U, mask=(units_U < M.num_units)[None, :], other=0)
    return tl.trans(input_NU.to(M.dot))


@triton.jit
def _gated(
    gate_ON: tl.tensor, up_ON: tl.tensor, GAIN: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """The product of `cpu_experts.gated_product`, silu or clamped; NaN stays NaN."""
    if LIMIT is not None:
        gate_ON = tl.where(gate_ON > LIMIT, LIMIT, gate_ON)
        up_ON = tl.where(up_ON > LIMIT, LIMIT, up_ON)
        up_ON = tl.where(up_ON < -LIMIT, -LIMIT, up_ON) + 1.0
    scaled_ON = gate_ON * GAIN
    # The exponential of a negative number only: it never overflows.
    power_ON = tl.exp(-tl.abs(scaled_ON))
    sigmoid_ON = tl.where(scaled_ON >= 0, 1.0, power_ON) / (1.0 + power_ON)
    return gate_ON * sigmoid_ON * up_ON


@triton.jit
def _project_both(
    row_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    outputs_O: tl.tensor,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products of the same inputs with both matrices, float32 [O, N] each."""
    gate_ON = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    up_ON = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    for step in range(GATE.num_steps):
        units_U = step * GATE.step + tl.arange(0, GATE.step)
        gate_OU = load_units(row_ptr, outputs_O, units_U, GATE)
        up_OU = load_units(row_ptr, outputs_O, units_U, UP)
        for plane in tl.static_range(GATE.unit_inputs):
            if GATE.kind == "plain":
                gate_scaling = (0.0, 0.0)
                up_scaling = (0.0, 0.0)
            elif plane == 0 or GATE.groups == "plane":
                gate_scaling = load_scaling(row_ptr, outputs_O, units_U, step, plane, GATE)
                up_scaling = load_scaling(row_ptr, outputs_O, units_U, step, plane, UP)
            input_UN = _load_inputs(inputs_ptr, units_U, plane, GATE)
            gate = decoded(gate_OU, gate_scaling[0], gate_scaling[1], outputs_O, plane, GATE)
            gate_ON = tl.dot(gate, input_UN, gate_ON, input_precision="ieee")
            up = decoded(up_OU, up_scaling[0], up_scaling[1], outputs_O, plane, UP)
            up_ON = tl.dot(up, input_UN, up_ON, input_precision="ieee")
    return gate_ON, up_ON


@triton.jit
def _project(
    row_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    outputs_O: tl.tensor,
    M: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Product of inputs with one matrix, float32 [O, N]."""
    out_ON = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    for step in range(M.num_steps):
        units_U = step * M.step + tl.arange(0, M.step)
        units_OU = load_units(row_ptr, outputs_O, units_U, M)
        for plane in tl.static_range(M.unit_inputs):
            if M.kind == "plain":
                scaling = (0.0, 0.0)
            elif plane == 0 or M.groups == "plane":
                scaling = load_scaling(row_ptr, outputs_O, units_U, step, plane, M)
            input_UN = _load_inputs(inputs_ptr, units_U, plane, M)
            element_OU = decoded(units_OU, scaling[0], scaling[1], outputs_O, plane, M)
            out_ON = tl.dot(element_OU, input_UN, out_ON, input_precision="ieee")
    return out_ON


@triton.jit
def gate_up_kernel(
    hidden_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    table_ptr: tl.tensor,
    product_ptr: tl.tensor,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    TABLE_FIELDS: tl.constexpr,
    PLANES_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    LIMIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """activation(gate(hidden)) * up(hidden) of the rows of one tile, for one block of outputs.

    Args:
        hidden_ptr: [T, P * units], in planes as GATE reads them.
        tokens_ptr: int32 [R], the token of each row.
        tiles_ptr: int32 [tiles, 5].
        table_ptr: int64 [E, TABLE_FIELDS], addresses.
        product_ptr: [R, planes * ...], in planes as the kernel of down reads them.
        GATE: `KernelMatrix` of gate.
        UP: Of up.
        TABLE_FIELDS: Addresses of an expert.
        PLANES_OUT: Planes of the product.
        HAS_BIAS: Whether both have biases.
        GAIN: Of the sigmoid.
        LIMIT: Of the clamp; None without.
        OUTPUTS: O.
        ROWS: N.
    """
    expert, block, rows_N, end = _tile(tiles_ptr, (GATE.outputs + OUTPUTS - 1) // OUTPUTS, ROWS)
    if expert < 0:
        return
    row_ptr = table_ptr + expert.to(tl.int64) * TABLE_FIELDS
    outputs_O = block * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows behind the last are computed with the last one's token, and not written.
    tokens_N = tl.load(tokens_ptr + tl.minimum(rows_N, end - 1)).to(tl.int64)
    inputs_ptr = hidden_ptr + (tokens_N * (GATE.unit_inputs * GATE.num_units))[:, None]
    gate_ON, up_ON = _project_both(row_ptr, inputs_ptr, outputs_O, GATE, UP, OUTPUTS, ROWS)
    is_output_O = outputs_O < GATE.outputs
    if HAS_BIAS:
        gate_ON += _load_bias(row_ptr, outputs_O, is_output_O, GATE)
        up_ON += _load_bias(row_ptr, outputs_O, is_output_O, UP)
    product_ON = rounded(_gated(gate_ON, up_ON, GAIN, LIMIT), GATE.dtype, GATE.dot)
    width = (GATE.outputs + PLANES_OUT - 1) // PLANES_OUT
    columns_O = outputs_O % PLANES_OUT * width + outputs_O // PLANES_OUT
    places_ON = (rows_N.to(tl.int64) * (width * PLANES_OUT))[None, :] + columns_O[:, None]
    tl.store(
        product_ptr + places_ON, product_ON, mask=is_output_O[:, None] & (rows_N < end)[None, :]
    )


@triton.jit
def down_kernel(
    product_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    DOWN: tl.constexpr,
    TABLE_FIELDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """down(product) of the rows of one tile, for one block of outputs; float32 [R, H]."""
    expert, block, rows_N, end = _tile(tiles_ptr, (DOWN.outputs + OUTPUTS - 1) // OUTPUTS, ROWS)
    if expert < 0:
        return
    row_ptr = table_ptr + expert.to(tl.int64) * TABLE_FIELDS
    outputs_O = block * OUTPUTS + tl.arange(0, OUTPUTS)
    places_N = tl.minimum(rows_N, end - 1).to(tl.int64) * (DOWN.unit_inputs * DOWN.num_units)
    inputs_ptr = product_ptr + places_N[:, None]
    out_ON = _project(row_ptr, inputs_ptr, outputs_O, DOWN, OUTPUTS, ROWS)
    is_output_O = outputs_O < DOWN.outputs
    if HAS_BIAS:
        out_ON += _load_bias(row_ptr, outputs_O, is_output_O, DOWN)
    places_ON = (rows_N.to(tl.int64) * DOWN.outputs)[None, :] + outputs_O[:, None]
    tl.store(out_ptr + places_ON, out_ON, mask=is_output_O[:, None] & (rows_N < end)[None, :])


@triton.jit
def _load_bias(
    row_ptr: tl.tensor, outputs_O: tl.tensor, is_output_O: tl.tensor, M: tl.constexpr
) -> tl.tensor:
    """Biases of the outputs, float32 [O, 1]."""
    bias_ptr = pointer(row_ptr, M.field + BIAS, M.dtype, M.dtype_bytes)
    return tl.load(bias_ptr + outputs_O, mask=is_output_O, other=0).to(tl.float32)[:, None]


@triton.jit
def combine_kernel(
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sum of weight times row over the experts of one token, in their order; rounded once.

    Args:
        rows_ptr: float32 [R, H].
        places_ptr: int32 [T, K], rows of each token.
        weights_ptr: float32 [T, K].
        out_ptr: [T, H].
        HIDDEN: H.
        TOP_K: K.
        DTYPE: Of the result.
        DOT: As in `KernelMatrix`.
        COLUMNS: Of the result that one program computes.
    """
    token = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < HIDDEN
    sum_C = tl.full([COLUMNS], 0.0, tl.float32)
    for k in range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + k)
        row_C = tl.load(rows_ptr + place * HIDDEN + columns_C, mask=is_column_C, other=0)
        sum_C += weight * row_C
    tl.store(out_ptr + token * HIDDEN + columns_C, rounded(sum_C, DTYPE, DOT), mask=is_column_C)
