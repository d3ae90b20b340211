"""Which tokens an expert works on, found on the device: nothing here waits for the host.

T tokens, K experts per token, R = T * K rows (one for each choice of a token), E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE_FIELDS = 5  # of a row of `tile_table`


class ExpertGroups(NamedTuple):
    """The rows sorted by expert, and the way back; rows of one expert are in the order of tokens.

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
    """Sort the choices of all tokens by expert.

    Args:
        topk_ids_TK: int32 experts; distinct within a token.
        topk_weights_TK: float32 weights.
        num_experts: Of the layer; ids are below it.
    """
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
    """Tiles that any distribution of the rows needs at most."""
    return num_rows // tile_rows + min(num_rows, num_experts)


def tile_table(bounds_E1: Tensor, num_rows: int, tile_rows: int) -> Tensor:
    """What each tile works on, int32 [tiles, 5]; tiles of an expert are neighbours.

    The columns: expert, its first tile, the number of its tiles, its first row, the row behind its
    last. There are as many tiles as `max_tiles` says; those that are left over have expert -1.

    Args:
        bounds_E1: Of `ExpertGroups`.
        num_rows: R.
        tile_rows: Rows of a tile; the last of an expert has fewer.
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
    """Columns p, p + P, p + 2 P, ... of P planes side by side, for codes that lie P in a unit.

    [T, I] -> [T, P * ceil(I / P)], contiguous, with zeros where there is no column.
    """
    num_tokens, num_inputs = input_TI.shape
    if planes == 1:
        return input_TI.contiguous()
    padded_TI = torch.nn.functional.pad(input_TI, (0, -num_inputs % planes))
    return padded_TI.view(num_tokens, -1, planes).transpose(1, 2).reshape(num_tokens, -1)
