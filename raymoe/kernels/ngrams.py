"""Embeddings of n-grams of token ids: rows of a table, which the host finds and reads.

T tokens of a step, S sequences, P tokens before a token that decide its rows, N hashes, R rows of
the table, D elements of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from raymoe.errors import CheckpointError
from raymoe.specs.attention.ngrams import NGRAM_TABLE, NgramSpec

NO_TOKEN = -1  # in place of an id, before the beginning of a sequence


def table_rows(
    token_ids_T: Tensor, query_start: Tensor, past_SP: Tensor | None, spec: NgramSpec
) -> Tensor:
    """Return the rows of the table that each token reads, int64 [T, N].

    Args:
        token_ids_T: int64, one sequence after the other.
        query_start: [S + 1], index of each sequence's first token; the last entry is T.
        past_SP: The last ids of each sequence before those of the step, the oldest first, or
            `NO_TOKEN`; None if all sequences begin with the step.
    """
    firsts_S, counts_S = query_start[:-1].long(), query_start.diff().long()
    num_past, places_T = spec.num_past, torch.arange(len(token_ids_T))
    if past_SP is None:
        past_SP = torch.full((len(counts_S), num_past), NO_TOKEN)
    offsets_T = places_T - firsts_S.repeat_interleave(counts_S)
    sequence_T = torch.arange(len(counts_S)).repeat_interleave(counts_S)
    mixed_T = token_ids_T * spec.multipliers[0]
    has_ended_T = torch.zeros(len(token_ids_T), dtype=torch.bool)
    hashes = []
    hashes_per_length = len(spec.sizes) // num_past
    for back in range(1, num_past + 1):
        new_T = token_ids_T[(places_T - back).clamp_min(0)]
        column_T = (num_past + offsets_T - back).clamp_max(num_past - 1)
        old_T = past_SP[sequence_T, column_T].long()
        ids_T = torch.where(offsets_T >= back, new_T, old_T)
        has_ended_T |= (ids_T == spec.separator) | (ids_T == NO_TOKEN)
        ids_T = torch.where(has_ended_T, spec.separator, ids_T)
        mixed_T = mixed_T ^ (ids_T * spec.multipliers[back])
        hashes += [mixed_T] * hashes_per_length
    mixed_TN = torch.stack(hashes, dim=1)
    return torch.remainder(mixed_TN, torch.tensor(spec.sizes)) + torch.tensor(spec.offsets)


def read_rows(table_RD: Tensor, rows_TN: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return rows of a table side by side, [T, N D], times the scale of all."""
    # Rows are read as bytes, because not all types of tables can be indexed.
    found = table_RD.view(torch.uint8).index_select(0, rows_TN.flatten())
    num_tokens, num_hashes = rows_TN.shape
    shape = (num_tokens, num_hashes * table_RD.shape[1])
    if table_RD.dtype == torch.float8_e4m3fn:  # torch looks codes up faster than it converts them
        codes = torch.arange(256, dtype=torch.uint8).view(table_RD.dtype)
        values = (codes.float() * scale).to(dtype)
        return values.index_select(0, found.flatten().int()).view(shape)
    wide = found.view(table_RD.dtype)
    return (wide if scale == 1 else wide.float() * scale).to(dtype).view(shape)


def fill_table(memory: Tensor, spec: NgramSpec, get: Callable[[str], object]) -> Tensor:
    """Copy a table from its stored tensors into memory, and return it, [R, D].

    Args:
        get: Name of a tensor, without the prefix of its layer -> the tensor.

    Raises:
        CheckpointError: A tensor has another type than the table.
    """
    table_RD = table_view(memory, spec)
    begin = 0
    for number, rows in enumerate(spec.tensor_rows):
        stored = get(f"{NGRAM_TABLE}{number}")
        assert isinstance(stored, Tensor), "tables are never quantised"
        if stored.dtype != table_RD.dtype:
            raise CheckpointError(
                f"tensor {number} of the table of n-grams is stored as {stored.dtype}, and others, "
                f"or the model, have {table_RD.dtype}"
            )
        table_RD[begin : begin + rows].view(torch.uint8).copy_(stored.view(torch.uint8))
        begin += rows
    return table_RD


def table_view(memory: Tensor, spec: NgramSpec) -> Tensor:
    """Memory as a table, [R, D]."""
    return memory.view(getattr(torch, spec.dtype)).view(spec.num_rows, spec.row_width)
