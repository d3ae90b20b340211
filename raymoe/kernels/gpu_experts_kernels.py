"""Triton kernels of MoE experts; tokens are grouped by expert on the device, without a host sync.

T tokens, K experts per token, R = T * K rows (one per choice of a token), E experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.gpu_common import BIAS, decoded, load_scaling, load_units, pointer, rounded

TILE_FIELDS = 5  # columns of `tile_table`


class ExpertGroups(NamedTuple):
    """Rows sorted by expert and, within an expert, by token.

    Attributes:
        tokens_R: int32, the token of each row.
        bounds_E1: int32, the first row of each expert, and R.
        places_TK: int32, the rows of each token by ascending expert: the order of its sum.
        weights_TK: float32, the weights of these rows.
    """

    tokens_R: Tensor
    bounds_E1: Tensor
    places_TK: Tensor
    weights_TK: Tensor


def group_by_expert(topk_ids_TK: Tensor, topk_weights_TK: Tensor, num_experts: int) -> ExpertGroups:
    """Sort the choices of all tokens by expert; a token's int32 expert ids are distinct."""
    num_tokens, top_k = topk_ids_TK.shape
    device = topk_ids_TK.device
    ids_R, order_R = topk_ids_TK.reshape(-1).sort(stable=True)
    experts_E1 = torch.arange(num_experts + 1, dtype=ids_R.dtype, device=device)
    bounds_E1 = torch.searchsorted(ids_R, experts_E1, out_int32=True)
    rows_R = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device)
    places_R = torch.empty_like(rows_R).scatter_(0, order_R, rows_R)
    places_TK, slots_TK = places_R.view(num_tokens, top_k).sort(dim=1)
    tokens_R = order_R.div(top_k, rounding_mode="floor").int()
    return ExpertGroups(tokens_R, bounds_E1, places_TK, topk_weights_TK.gather(1, slots_TK))


def max_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Return the largest number of tiles that any distribution of the rows over experts needs."""
    return num_rows // tile_rows + min(num_rows, num_experts)


def tile_table(bounds_E1: Tensor, num_rows: int, tile_rows: int) -> Tensor:
    """Return what each tile works on, int32 [tiles, 5]; tiles of an expert are consecutive.

    The columns are expert, its first tile, its number of tiles, its first row, and its end row
    (exclusive). There are `max_tiles` tiles; unused ones have expert -1. The last tile of an expert
    may have fewer than `tile_rows` rows.
    """
    num_experts = len(bounds_E1) - 1
    tiles_E = (bounds_E1.diff() + (tile_rows - 1)).div(tile_rows, rounding_mode="floor")
    ends_E = tiles_E.cumsum(0, dtype=torch.int32)
    count = max_tiles(num_rows, num_experts, tile_rows)
    numbers_N = torch.arange(count, dtype=torch.int32, device=bounds_E1.device)
    experts_N = torch.searchsorted(ends_E, numbers_N, right=True)
    known_N = experts_N.clamp(max=num_experts - 1)
    columns = (
        torch.where(experts_N < num_experts, known_N, -1),
        ends_E[known_N] - tiles_E[known_N],
        tiles_E[known_N],
        bounds_E1[known_N],
        bounds_E1[known_N + 1],
    )
    return torch.stack([column.int() for column in columns], dim=1)


def in_planes(input_TI: Tensor, planes: int) -> Tensor:
    """Reorder columns into planes: p, p + P, p + 2 P, ... for codes that lie P to a unit.

    [T, I] -> [T, P * ceil(I / P)], contiguous, padded with zeros.
    """
    num_tokens, num_inputs = input_TI.shape
    if planes == 1:
        return input_TI.contiguous()
    padded_TI = torch.nn.functional.pad(input_TI, (0, -num_inputs % planes))
    return padded_TI.view(num_tokens, -1, planes).transpose(1, 2).reshape(num_tokens, -1)


LAUNCH_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit
def _tile(
    tiles_ptr: tl.tensor, NUM_BLOCKS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return expert, block of outputs, rows [N] and end row of this program.

    Consecutive programs are the tiles of one expert and block of outputs, so its weights are read
    once from memory, whatever the cache size.
    """
    program = tl.program_id(0)
    row_ptr = tiles_ptr + program // NUM_BLOCKS * LAUNCH_TILE_FIELDS
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
    """Load one plane of the inputs as a right operand, [U, N]; `places_ptr` are rows [N, 1]."""
    columns_1U = (units_U + PLANE * M.num_units)[None, :]
    if M.is_even:
        input_NU = tl.load(places_ptr + columns_1U)
    else:
        input_NU = tl.load(places_ptr + columns_1U, mask=(units_U < M.num_units)[None, :], other=0)
    return tl.trans(input_NU.to(M.dot))


@triton.jit
def _gated(
    gate_ON: tl.tensor,
    up_ON: tl.tensor,
    GAIN: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:
    """Compute `cpu_experts.gated_product` for `SIGMOID_GATES` or with limits; NaN stays NaN."""
    if LIMIT is not None:
        gate_ON = tl.where(gate_ON > GATE_LIMIT, GATE_LIMIT, gate_ON)
        up_ON = tl.where(up_ON > LIMIT, LIMIT, up_ON)
        up_ON = tl.where(up_ON < -LIMIT, -LIMIT, up_ON) + OFFSET
    scaled_ON = gate_ON * GAIN
    if CUBIC != 0:  # Triton takes no float as a condition
        scaled_ON *= 1.0 + CUBIC * gate_ON * gate_ON
    # exp takes only negative numbers, so it never overflows.
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
    """Multiply the same inputs with gate and up, float32 [O, N] each."""
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
    """Multiply inputs with one matrix, float32 [O, N]."""
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
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute activation(gate) * up for the rows of one tile and a block of outputs.

    Args:
        hidden_ptr: [T, P * units], in planes as GATE reads them.
        tokens_ptr: int32 [R], the token of each row.
        product_ptr: [R, planes * ...], in planes as `down_kernel` reads them.
    """
    expert, block, rows_N, end = _tile(tiles_ptr, (GATE.outputs + OUTPUTS - 1) // OUTPUTS, ROWS)
    if expert < 0:
        return
    row_ptr = table_ptr + expert.to(tl.int64) * TABLE_FIELDS
    outputs_O = block * OUTPUTS + tl.arange(0, OUTPUTS)
    # Padding rows repeat the token of the last row and are not written.
    tokens_N = tl.load(tokens_ptr + tl.minimum(rows_N, end - 1)).to(tl.int64)
    inputs_ptr = hidden_ptr + (tokens_N * (GATE.unit_inputs * GATE.num_units))[:, None]
    gate_ON, up_ON = _project_both(row_ptr, inputs_ptr, outputs_O, GATE, UP, OUTPUTS, ROWS)
    is_output_O = outputs_O < GATE.outputs
    if HAS_BIAS:
        gate_ON += _load_bias(row_ptr, outputs_O, is_output_O, GATE)
        up_ON += _load_bias(row_ptr, outputs_O, is_output_O, UP)
    gated_ON = _gated(gate_ON, up_ON, GAIN, CUBIC, LIMIT, GATE_LIMIT, OFFSET)
    product_ON = rounded(gated_ON, GATE.dtype, GATE.dot)
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
    """Compute down(product) for the rows of one tile and a block of outputs; float32 [R, H]."""
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
    """Sum weight times row over the experts of one token, by ascending expert; round once.

    `places_ptr` holds the rows of each token, int32 [T, K].
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
