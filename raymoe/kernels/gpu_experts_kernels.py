"""Triton kernels of MoE experts; tokens are grouped by expert on the device, without a host sync.

T tokens, K experts per token, R = T * K rows (one per choice of a token), E experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.cpu_experts import SIGMOID_GATES, Clamp, ExpertGroup, TopK
from raymoe.kernels.gpu_codes import BIAS, decoded, load_scaling, load_units, pointer
from raymoe.kernels.gpu_common import Launch, rounded

TILE_FIELDS = 5  # columns of the tiles in `ExpertGroups`
CHOICES_AT_ONCE = 1024  # that a program reads to sort them
COLUMNS_AT_ONCE = 1024  # of a row, that a program computes


class ExpertGroups(NamedTuple):
    """Rows of neighbouring experts, sorted by expert and, within an expert, by token.

    Tiles are int32 [N, 5]: expert (-1 for a tile without rows), the expert's first tile, its number
    of tiles, its first row, and its end row (exclusive). The tiles of an expert are consecutive;
    the last one may have fewer rows than the others.

    Attributes:
        experts: Those whose rows are counted, from 0.
        tokens_R: int32, the token of each row.
        places_TK: int32, the row of each choice of a token; undefined for those of other experts.
        weights_TK: float32, its weight.
        gate_up_tiles_NF: Tiles of the rows that a program of the first product has.
        down_tiles_NF: Those of the second product.
    """

    experts: range
    tokens_R: Tensor
    places_TK: Tensor
    weights_TK: Tensor
    gate_up_tiles_NF: Tensor
    down_tiles_NF: Tensor


def align(
    routing: TopK, num_experts: int, tile_rows: tuple[int, int], experts: range | None = None
) -> tuple[Launch, ExpertGroups]:
    """Return the launch that sorts choices by expert, and what it writes.

    Args:
        routing: Ids are contiguous; the experts of a token are distinct.
        tile_rows: Rows of a tile in the first and in the second product.
        experts: Those whose rows are sorted; all by default.
    """
    topk_ids_TK, topk_weights_TK = routing
    experts = experts or range(num_experts)
    num_tokens, top_k = topk_ids_TK.shape
    num_rows = num_tokens * top_k
    tiles = [
        topk_ids_TK.new_empty(num_tiles(num_rows, rows, experts), TILE_FIELDS) for rows in tile_rows
    ]
    groups = ExpertGroups(
        experts,
        topk_ids_TK.new_empty(num_rows),
        torch.empty_like(topk_ids_TK),
        topk_weights_TK,
        *tiles,
    )
    launch = Launch(
        kernel=align_kernel,
        grid=(len(experts),),
        arguments={
            "ids_ptr": topk_ids_TK,
            "tokens_ptr": groups.tokens_R,
            "places_ptr": groups.places_TK,
            "gate_up_tiles_ptr": groups.gate_up_tiles_NF,
            "down_tiles_ptr": groups.down_tiles_NF,
            "num_rows": num_rows,
            "first_expert": experts.start,
            "end_expert": experts.stop,
        },
        constants={
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "GATE_UP_ROWS": tile_rows[0],
            "DOWN_ROWS": tile_rows[1],
            "CHUNK": CHOICES_AT_ONCE,
        },
        options={"num_warps": 4},
    )
    return launch, groups


def num_tiles(num_rows: int, tile_rows: int, experts: range) -> int:
    """The most tiles that so many rows of these experts take."""
    return num_rows // tile_rows + len(experts)


def add_launch(
    rows_BH: Tensor, rows: range, routing: TopK, places_TK: Tensor, group: ExpertGroup
) -> Launch:
    """Return the launch that adds these rows of a group of experts, weighted, to its sums."""
    topk_ids_TK, topk_weights_TK = routing
    num_tokens, top_k = topk_ids_TK.shape
    hidden_size = rows_BH.shape[1]
    return Launch(
        kernel=add_kernel,
        grid=(num_tokens, -(-hidden_size // COLUMNS_AT_ONCE)),
        arguments={
            "rows_ptr": rows_BH,
            "ids_ptr": topk_ids_TK,
            "places_ptr": places_TK,
            "weights_ptr": topk_weights_TK,
            "sum_ptr": group.sum_TH,
            "first_expert": group.experts.start,
            "end_expert": group.experts.stop,
            "first_row": rows.start,
            "end_row": rows.stop,
        },
        constants={
            "HIDDEN": hidden_size,
            "TOP_K": top_k,
            "CHOICES": triton.next_power_of_2(top_k),
            "COLUMNS": COLUMNS_AT_ONCE,
        },
        options={"num_warps": 4},
    )


def gating(activation: str, clamp: Clamp | None) -> dict[str, float | None]:
    """Return the constants of `gated`."""
    if clamp is not None:
        return {
            "GAIN": float(clamp.gain),
            "CUBIC": 0.0,
            "LIMIT": float(clamp.limit),
            "GATE_LIMIT": float(clamp.gate_limit),
            "OFFSET": float(clamp.offset),
        }
    gain, cubic = SIGMOID_GATES[activation]
    return {"GAIN": gain, "CUBIC": cubic, "LIMIT": None, "GATE_LIMIT": 0.0, "OFFSET": 0.0}


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
LAST_PLACE = tl.constexpr(2**31 - 1)
TOGETHER = tl.constexpr(8)  # tiles whose inputs are read for one block of outputs after another


@triton.jit(
    do_not_specialize=["num_rows", "first_expert", "end_expert"],
    do_not_specialize_on_alignment=["ids_ptr"],
)
def align_kernel(
    ids_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    gate_up_tiles_ptr: tl.tensor,
    down_tiles_ptr: tl.tensor,
    num_rows: tl.tensor,
    first_expert: tl.tensor,
    end_expert: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE_UP_ROWS: tl.constexpr,
    DOWN_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the rows and tiles of one expert: its choices in order, after those of lower experts.

    Rows are counted from those of the first expert. Each program counts for itself, so none waits
    for another.
    """
    number = tl.program_id(0)
    expert, is_last = first_expert + number, first_expert + number == end_expert - 1
    first, end = rows_of(ids_ptr, num_rows, expert, first_expert, end_expert, NUM_EXPERTS, CHUNK)
    _write_tiles(gate_up_tiles_ptr, number, expert, first, end, GATE_UP_ROWS)
    _write_tiles(down_tiles_ptr, number, expert, first, end, DOWN_ROWS)
    if is_last:
        num_experts = end_expert - first_expert
        _write_no_tiles(gate_up_tiles_ptr, num_experts, end, num_rows, GATE_UP_ROWS, CHUNK)
        _write_no_tiles(down_tiles_ptr, num_experts, end, num_rows, DOWN_ROWS, CHUNK)
    if first < end:
        write_rows(
            ids_ptr, tokens_ptr, places_ptr, num_rows, expert, first, NUM_EXPERTS, TOP_K, CHUNK
        )


@triton.jit
def rows_of(
    ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    expert: tl.tensor,
    first_expert: tl.tensor,
    end_expert: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row of an expert and its end, among those of a group of experts."""
    numbers_C = tl.arange(0, CHUNK)
    before_C = tl.full([CHUNK], 0, tl.int32)
    count_C = tl.full([CHUNK], 0, tl.int32)
    for begin in range(0, num_rows, CHUNK):
        inside_C = begin + numbers_C < num_rows
        ids_C = tl.load(ids_ptr + begin + numbers_C, mask=inside_C, other=NUM_EXPERTS)
        is_counted_C = (ids_C >= first_expert) & (ids_C < end_expert)
        before_C += (is_counted_C & (ids_C < expert)).to(tl.int32)
        count_C += (is_counted_C & (ids_C == expert)).to(tl.int32)
    first = tl.sum(before_C)
    return first, first + tl.sum(count_C)


@triton.jit
def write_rows(
    ids_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    num_rows: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the tokens of an expert's rows from the first on, and the rows of its choices."""
    numbers_C = tl.arange(0, CHUNK)
    place = first
    for begin in range(0, num_rows, CHUNK):
        choices_C = begin + numbers_C
        ids_C = tl.load(ids_ptr + choices_C, mask=choices_C < num_rows, other=NUM_EXPERTS)
        is_mine_C = ids_C == expert
        places_C = place + tl.cumsum(is_mine_C.to(tl.int32)) - 1
        tl.store(places_ptr + choices_C, places_C, mask=is_mine_C)
        tl.store(tokens_ptr + places_C, choices_C // TOP_K, mask=is_mine_C)
        place += tl.sum(is_mine_C.to(tl.int32))


@triton.jit
def _write_tiles(
    tiles_ptr: tl.tensor,
    number: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """Write the tiles of an expert, and those without rows up to the first of the next expert.

    `number` counts experts from the first of the group.

    Where an expert begins follows from the rows before it: `a // R + b // R + 1 >= (a + b) // R`
    leaves room for the last, partly filled tile of each.
    """
    begin_tile = first // ROWS + number
    num_tiles = (end - first + ROWS - 1) // ROWS
    for tile in range(begin_tile, end // ROWS + number + 1):
        row_ptr = tiles_ptr + tile * LAUNCH_TILE_FIELDS
        tl.store(row_ptr, tl.where(tile < begin_tile + num_tiles, expert, -1))
        tl.store(row_ptr + 1, begin_tile)
        tl.store(row_ptr + 2, num_tiles)
        tl.store(row_ptr + 3, first)
        tl.store(row_ptr + 4, end)


@triton.jit
def _write_no_tiles(
    tiles_ptr: tl.tensor,
    num_experts: tl.tensor,
    end: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write that tiles behind those of the last expert are without rows."""
    numbers_C = tl.arange(0, CHUNK)
    num_tiles = num_rows // ROWS + num_experts
    for begin in range(end // ROWS + num_experts, num_tiles, CHUNK):
        tiles_C = begin + numbers_C
        tl.store(tiles_ptr + tiles_C * LAUNCH_TILE_FIELDS, -1, mask=tiles_C < num_tiles)


@triton.jit
def _tile(
    tiles_ptr: tl.tensor,
    first_row: tl.tensor,
    num_programs: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return expert, block of outputs, first row and end row of this program.

    The programs of a launch have the tiles from that of `first_row`, a multiple of `ROWS`, on: no
    row lies in a tile before, as `a // R + b // R + 1 >= (a + b) // R`. Consecutive programs are
    `TOGETHER` tiles of one expert and a block of outputs, then the next block for the same tiles,
    whose inputs stay in the second-level cache. So the weights of up to as many tiles are read once
    from memory, whatever the cache size.
    """
    program = tl.program_id(0)
    first_tile, end_tile = first_row // ROWS, first_row // ROWS + num_programs // NUM_BLOCKS
    row_ptr = tiles_ptr + (first_tile + program // NUM_BLOCKS) * LAUNCH_TILE_FIELDS
    expert = tl.load(row_ptr)
    of_expert, count = tl.load(row_ptr + 1), tl.load(row_ptr + 2)
    begin, end = tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    first = tl.maximum(of_expert, first_tile)
    count = tl.maximum(tl.minimum(of_expert + count, end_tile) - first, 1)
    within = program - (first - first_tile) * NUM_BLOCKS
    before = within // (TOGETHER * NUM_BLOCKS) * TOGETHER
    within -= before * NUM_BLOCKS
    together = tl.maximum(tl.minimum(count - before, TOGETHER), 1)
    tile = first - of_expert + before + within % together
    return expert, within // together, begin + tile * ROWS, end


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
def gated(
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


@triton.jit(do_not_specialize=["first_row", "end_row"])
def gate_up_kernel(
    hidden_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    table_ptr: tl.tensor,
    product_ptr: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    SQUARES: tl.constexpr,
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
        product_ptr: [B, planes * ...], in planes as `down_kernel` reads them; of the rows from
            `first_row` to before `end_row`, which alone are computed.
    """
    blocks: tl.constexpr = (GATE.outputs + OUTPUTS - 1) // OUTPUTS
    expert, block, row, end = _tile(tiles_ptr, first_row, tl.num_programs(0), blocks, ROWS)
    if (expert < 0) | (row >= end_row) | (row + ROWS <= first_row):
        return
    rows_N = row + tl.arange(0, ROWS)
    row_ptr = table_ptr + expert.to(tl.int64) * TABLE_FIELDS
    outputs_O = block * OUTPUTS + tl.arange(0, OUTPUTS)
    # Padding rows repeat the token of the last row and are not written.
    tokens_N = tl.load(tokens_ptr + tl.minimum(rows_N, end - 1)).to(tl.int64)
    inputs_ptr = hidden_ptr + (tokens_N * (GATE.unit_inputs * GATE.num_units))[:, None]
    if SQUARES:  # gate and up are one matrix
        gate_ON = _project(row_ptr, inputs_ptr, outputs_O, GATE, OUTPUTS, ROWS)
        up_ON = gate_ON
    else:
        gate_ON, up_ON = _project_both(row_ptr, inputs_ptr, outputs_O, GATE, UP, OUTPUTS, ROWS)
    is_output_O = outputs_O < GATE.outputs
    if HAS_BIAS:
        gate_ON += _load_bias(row_ptr, outputs_O, is_output_O, GATE)
        up_ON += _load_bias(row_ptr, outputs_O, is_output_O, UP)
    gated_ON = gated(gate_ON, up_ON, GAIN, CUBIC, LIMIT, GATE_LIMIT, OFFSET)
    product_ON = rounded(gated_ON, GATE.dtype, GATE.dot)
    width = (GATE.outputs + PLANES_OUT - 1) // PLANES_OUT
    columns_O = outputs_O % PLANES_OUT * width + outputs_O // PLANES_OUT
    places_N = (rows_N - first_row).to(tl.int64) * (width * PLANES_OUT)
    places_ON = places_N[None, :] + columns_O[:, None]
    is_row_N = (rows_N >= first_row) & (rows_N < tl.minimum(end, end_row))
    tl.store(product_ptr + places_ON, product_ON, mask=is_output_O[:, None] & is_row_N[None, :])


@triton.jit(do_not_specialize=["first_row", "end_row"])
def down_kernel(
    product_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    DOWN: tl.constexpr,
    TABLE_FIELDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute down(product) for the rows of one tile and a block of outputs; float32 [B, H].

    Products and results are those of the rows from `first_row` to before `end_row`.
    """
    blocks: tl.constexpr = (DOWN.outputs + OUTPUTS - 1) // OUTPUTS
    expert, block, row, end = _tile(tiles_ptr, first_row, tl.num_programs(0), blocks, ROWS)
    if (expert < 0) | (row >= end_row) | (row + ROWS <= first_row):
        return
    end = tl.minimum(end, end_row)
    rows_N = row + tl.arange(0, ROWS)
    row_ptr = table_ptr + expert.to(tl.int64) * TABLE_FIELDS
    outputs_O = block * OUTPUTS + tl.arange(0, OUTPUTS)
    read_N = tl.maximum(tl.minimum(rows_N, end - 1), first_row) - first_row
    places_N = read_N.to(tl.int64) * (DOWN.unit_inputs * DOWN.num_units)
    inputs_ptr = product_ptr + places_N[:, None]
    out_ON = _project(row_ptr, inputs_ptr, outputs_O, DOWN, OUTPUTS, ROWS)
    is_output_O = outputs_O < DOWN.outputs
    if HAS_BIAS:
        out_ON += _load_bias(row_ptr, outputs_O, is_output_O, DOWN)
    places_ON = ((rows_N - first_row).to(tl.int64) * DOWN.outputs)[None, :] + outputs_O[:, None]
    is_row_N = (rows_N >= first_row) & (rows_N < end)
    tl.store(out_ptr + places_ON, out_ON, mask=is_output_O[:, None] & is_row_N[None, :])


@triton.jit
def _load_bias(
    row_ptr: tl.tensor, outputs_O: tl.tensor, is_output_O: tl.tensor, M: tl.constexpr
) -> tl.tensor:
    bias_ptr = pointer(row_ptr, M.field + BIAS, M.dtype, M.dtype_bytes)
    return tl.load(bias_ptr + outputs_O, mask=is_output_O, other=0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize_on_alignment=["weights_ptr"])
def combine_kernel(
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sum weight times row over the experts of one token, by ascending expert; round once.

    `places_ptr` holds the rows of each token, int32 [T, K]: those of higher experts are higher.
    """
    token = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < HIDDEN
    choices_P = tl.arange(0, CHOICES)
    is_choice_P = choices_P < TOP_K
    places_P = tl.load(places_ptr + token * TOP_K + choices_P, mask=is_choice_P, other=LAST_PLACE)
    weights_P = tl.load(weights_ptr + token * TOP_K + choices_P, mask=is_choice_P, other=0)
    sum_C = tl.full([COLUMNS], 0.0, tl.float32)
    for _ in range(TOP_K):
        place = tl.min(places_P)
        is_next_P = places_P == place
        weight = tl.sum(tl.where(is_next_P, weights_P, 0.0))
        places_P = tl.where(is_next_P, LAST_PLACE, places_P)
        row_ptr = rows_ptr + place.to(tl.int64) * HIDDEN
        sum_C += weight * tl.load(row_ptr + columns_C, mask=is_column_C, other=0)
    tl.store(out_ptr + token * HIDDEN + columns_C, rounded(sum_C, DTYPE, DOT), mask=is_column_C)


@triton.jit(
    do_not_specialize=["first_expert", "end_expert", "first_row", "end_row"],
    do_not_specialize_on_alignment=["ids_ptr", "weights_ptr"],
)
def add_kernel(
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    first_expert: tl.tensor,
    end_expert: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add weight times row to the sums of one token, float32 [T, H], by ascending expert.

    Only experts from first to before end count, and of them the rows from first to before end,
    which `rows_ptr` holds; others are not read. The arithmetic is that of `combine_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    choices_P = tl.arange(0, CHOICES)
    is_choice_P = choices_P < TOP_K
    ids_P = tl.load(ids_ptr + token * TOP_K + choices_P, mask=is_choice_P, other=-1)
    places_P = tl.load(places_ptr + token * TOP_K + choices_P, mask=is_choice_P, other=LAST_PLACE)
    weights_P = tl.load(weights_ptr + token * TOP_K + choices_P, mask=is_choice_P, other=0)
    is_mine_P = (ids_P >= first_expert) & (ids_P < end_expert)
    is_mine_P &= (places_P >= first_row) & (places_P < end_row)
    places_P = tl.where(is_mine_P, places_P - first_row, LAST_PLACE)
    if tl.min(places_P) == LAST_PLACE:
        return
    sum_C = tl.load(sum_ptr + token * HIDDEN + columns_C, mask=columns_C < HIDDEN, other=0)
    for _ in range(TOP_K):
        place = tl.min(places_P)
        is_next_P = places_P == place
        weight = tl.sum(tl.where(is_next_P, weights_P, 0.0))
        places_P = tl.where(is_next_P, LAST_PLACE, places_P)
        num_columns = tl.where(place < LAST_PLACE, HIDDEN, 0)
        row_ptr = rows_ptr + place.to(tl.int64) * HIDDEN
        sum_C += weight * tl.load(row_ptr + columns_C, mask=columns_C < num_columns, other=0)
    tl.store(sum_ptr + token * HIDDEN + columns_C, sum_C, mask=columns_C < HIDDEN)
