"""Coded experts on a GPU: rows gathered by expert, and three grouped products of humming-kernels.

T tokens, K experts per token, R = T * K rows (one per choice of a token), B rows at once, E experts
of the layer, H hidden size, F intermediate size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.cpu_experts import SQUARES, Clamp, ExpertGroup, TopK
from raymoe.kernels.gpu_common import Launch, round_to
from raymoe.kernels.gpu_experts_kernels import (
    CHOICES_AT_ONCE,
    COLUMNS_AT_ONCE,
    add_launch,
    gated,
    gating,
    rows_of,
    write_rows,
)
from raymoe.kernels.gpu_experts_layout import ExpertMatrices
from raymoe.kernels.humming.packing import PackedMatrices, pack_matrices, why_not_packed
from raymoe.kernels.humming.products import GroupedProduct
from raymoe.specs.layers import rows_at_once

# Multiplies rows, offsets and about how many rows there are into results (`GroupedProduct`).
Product = Callable[[Tensor, Tensor, int, Tensor], None]


class SortedChoices(NamedTuple):
    """Rows of neighbouring experts, sorted by expert and, within an expert, by token.

    Attributes:
        tokens_R: int32, the token of each row.
        places_TK: int32, the row of each choice of a token; undefined for those of other experts.
        offsets_E1: int32, the first row of each expert of the layer, and the end of the last.
    """

    tokens_R: Tensor
    places_TK: Tensor
    offsets_E1: Tensor


class HummingExperts:
    """Experts as `GroupedExperts`, with products of humming-kernels.

    Gate, up and down accumulate in float32 and are rounded to the type of the hidden state, as is
    the gated product. Outputs of a token are added in ascending order of expert, in float32, and
    rounded once. Nothing is added atomically and no order depends on the batch.
    """

    def __init__(
        self,
        matrices: tuple[PackedMatrices, PackedMatrices, PackedMatrices],
        *,
        product: Callable[[PackedMatrices], Product],
        activation: str = "silu",
        clamp: Clamp | None = None,
    ) -> None:
        """Prepare the products of gate, up and down.

        Args:
            matrices: `packed_experts` of a layer.
            product: Makes the product with one matrix of each expert: `GroupedProduct`.
        """
        gate, up, down = matrices
        self._num_experts = len(down.codes)
        self._wide, self._hidden = down.layout.shape[1], down.layout.shape[0]
        self._gate, self._down = product(gate), product(down)
        self._up = None if activation in SQUARES else product(up)
        self._gating = gating(activation, clamp)

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        sum_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
        group = ExpertGroup(range(self._num_experts), sum_TH)
        self.add(hidden_TH, (topk_ids_TK, topk_weights_TK), group)
        return sum_TH.to(hidden_TH.dtype)

    def add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        """Add the outputs of a group, whose rows are computed `rows_at_once` at a time.

        How many rows it has only the device knows, so there are launches for as many as there may
        be; those beyond its rows do nothing.
        """
        if not len(hidden_TH):
            return
        share = len(group.experts) / self._num_experts
        num_rows = routing[0].numel()
        at_once = rows_at_once(num_rows, share)
        expected = int(share * num_rows)
        sort, choices = self._sort(routing[0], group.experts)
        sort.run()
        for first in range(0, num_rows, at_once):
            rows = range(first, min(first + at_once, num_rows))
            gather, input_BH, offsets_E1 = self._gather(hidden_TH, choices, rows)
            gather.run()
            rows_BH = self._computed(input_BH, offsets_E1, min(expected, len(rows)))
            add_launch(rows_BH, rows, routing, choices.places_TK, group).run()
            del input_BH, rows_BH

    def _computed(self, input_BH: Tensor, offsets_E1: Tensor, expected: int) -> Tensor:
        gate_BF = input_BH.new_empty(len(input_BH), self._wide)
        self._gate(input_BH, offsets_E1, expected, gate_BF)
        up_BF = gate_BF
        if self._up is not None:
            up_BF = torch.empty_like(gate_BF)
            self._up(input_BH, offsets_E1, expected, up_BF)
        self._activate(gate_BF, up_BF, offsets_E1).run()
        rows_BH = input_BH.new_empty(len(input_BH), self._hidden)
        self._down(gate_BF, offsets_E1, expected, rows_BH)
        return rows_BH

    def _sort(self, ids_TK: Tensor, experts: range) -> tuple[Launch, SortedChoices]:
        num_rows = ids_TK.numel()
        choices = SortedChoices(
            ids_TK.new_empty(num_rows),
            torch.empty_like(ids_TK),
            ids_TK.new_empty(self._num_experts + 1),
        )
        launch = Launch(
            kernel=sort_kernel,
            grid=(self._num_experts,),
            arguments={
                "ids_ptr": ids_TK,
                "tokens_ptr": choices.tokens_R,
                "places_ptr": choices.places_TK,
                "offsets_ptr": choices.offsets_E1,
                "num_rows": num_rows,
                "first_expert": experts.start,
                "end_expert": experts.stop,
            },
            constants={
                "NUM_EXPERTS": self._num_experts,
                "TOP_K": ids_TK.shape[1],
                "CHUNK": CHOICES_AT_ONCE,
            },
            options={"num_warps": 4},
        )
        return launch, choices

    def _gather(
        self, hidden_TH: Tensor, choices: SortedChoices, rows: range
    ) -> tuple[Launch, Tensor, Tensor]:
        """Return the launch that copies some rows of hidden states, and what it writes.

        That is [B, H], and int32 [E + 1], where the rows of each expert begin among them.
        """
        hidden_size = hidden_TH.shape[1]
        input_BH = hidden_TH.new_empty(len(rows), hidden_size)
        offsets_E1 = torch.empty_like(choices.offsets_E1)
        launch = Launch(
            kernel=gather_kernel,
            grid=(len(rows), -(-hidden_size // COLUMNS_AT_ONCE)),
            arguments={
                "hidden_ptr": hidden_TH.contiguous(),
                "tokens_ptr": choices.tokens_R,
                "all_offsets_ptr": choices.offsets_E1,
                "input_ptr": input_BH,
                "offsets_ptr": offsets_E1,
                "first_row": rows.start,
                "end_row": rows.stop,
            },
            constants={
                "HIDDEN": hidden_size,
                "NUM_EXPERTS": self._num_experts,
                "OFFSETS": triton.next_power_of_2(self._num_experts + 1),
                "COLUMNS": COLUMNS_AT_ONCE,
            },
            options={"num_warps": 4},
        )
        return launch, input_BH, offsets_E1

    def _activate(self, gate_BF: Tensor, up_BF: Tensor, offsets_E1: Tensor) -> Launch:
        """Return the launch that writes activation(gate) * up over the gates."""
        return Launch(
            kernel=activate_kernel,
            grid=(len(gate_BF), -(-self._wide // COLUMNS_AT_ONCE)),
            arguments={"gate_ptr": gate_BF, "up_ptr": up_BF, "offsets_ptr": offsets_E1},
            constants={
                "WIDE": self._wide,
                "NUM_EXPERTS": self._num_experts,
                "COLUMNS": COLUMNS_AT_ONCE,
                **self._gating,
            },
            options={"num_warps": 4},
        )


def make_humming_experts(
    matrices: ExpertMatrices,
    *,
    activation: str = "silu",
    dtype: torch.dtype,
    clamp: Clamp | None = None,
) -> HummingExperts:
    """Pack the experts of a layer and compile their products, where `why_not_here` is None."""
    packed = packed_experts(matrices, dtype)
    return HummingExperts(packed, product=GroupedProduct, activation=activation, clamp=clamp)


def packed_experts(
    matrices: ExpertMatrices, dtype: torch.dtype
) -> tuple[PackedMatrices, PackedMatrices, PackedMatrices]:
    """Pack gate, up and down of a layer, where they lie, if `why_not_packed` is None."""
    reason = why_not_packed(matrices, dtype)
    assert reason is None, reason
    biases = [None] * 3 if matrices.biases is None else [*zip(*matrices.biases, strict=True)]
    gate, up, down = (
        pack_matrices(weights, bias, dtype)
        for weights, bias in zip(matrices[:3], biases, strict=True)
    )
    return gate, up, down


@triton.jit(
    do_not_specialize=["num_rows", "first_expert", "end_expert"],
    do_not_specialize_on_alignment=["ids_ptr"],
)
def sort_kernel(
    ids_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_rows: tl.tensor,
    first_expert: tl.tensor,
    end_expert: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the rows of one expert: its choices in order, after those of lower experts.

    Experts outside of the group have no rows. Each program counts for itself, so none waits for
    another.
    """
    expert = tl.program_id(0)
    first, end = rows_of(ids_ptr, num_rows, expert, first_expert, end_expert, NUM_EXPERTS, CHUNK)
    tl.store(offsets_ptr + expert, first)
    if expert == NUM_EXPERTS - 1:
        tl.store(offsets_ptr + NUM_EXPERTS, end)
    if first < end:
        write_rows(
            ids_ptr, tokens_ptr, places_ptr, num_rows, expert, first, NUM_EXPERTS, TOP_K, CHUNK
        )


@triton.jit(do_not_specialize=["first_row", "end_row"])
def gather_kernel(
    hidden_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    all_offsets_ptr: tl.tensor,
    input_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copy the hidden state of one row; the first program writes where experts begin."""
    number, block = tl.program_id(0), tl.program_id(1)
    if (number == 0) & (block == 0):
        experts_E = tl.arange(0, OFFSETS)
        is_expert_E = experts_E <= NUM_EXPERTS
        rows_E = tl.load(all_offsets_ptr + experts_E, mask=is_expert_E, other=0)
        rows_E = tl.minimum(tl.maximum(rows_E, first_row), end_row) - first_row
        tl.store(offsets_ptr + experts_E, rows_E, mask=is_expert_E)
    if first_row + number >= tl.load(all_offsets_ptr + NUM_EXPERTS):
        return
    token = tl.load(tokens_ptr + first_row + number).to(tl.int64)
    columns_C = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < HIDDEN
    hidden_C = tl.load(hidden_ptr + token * HIDDEN + columns_C, mask=is_column_C)
    tl.store(input_ptr + number.to(tl.int64) * HIDDEN + columns_C, hidden_C, mask=is_column_C)


@triton.jit
def activate_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    WIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GAIN: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """Write activation(gate) * up of one row over its gates, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets_ptr + NUM_EXPERTS):
        return
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < WIDE
    places_C = row * WIDE + columns_C
    gate_C = tl.load(gate_ptr + places_C, mask=is_column_C, other=0).to(tl.float32)
    up_C = tl.load(up_ptr + places_C, mask=is_column_C, other=0).to(tl.float32)
    product_C = gated(gate_C, up_C, GAIN, CUBIC, LIMIT, GATE_LIMIT, OFFSET)
    tl.store(gate_ptr + places_C, round_to(product_C, gate_ptr.dtype.element_ty), mask=is_column_C)
