"""Paged attention on a GPU by our kernels: append to blocks of the cache and attend to them there.

Needs Triton. The reference is `device_attention`, torch alone. T tokens of the pass, H query heads,
G KV heads, D head dimension.
"""

import torch
from torch import Tensor

from raymoe.kernels.cpu_rope import Projected
from raymoe.kernels.device_attention_batch import RaggedBatch
from raymoe.kernels.device_attention_launches import (
    Attending,
    DeviceCache,
    Scoring,
    append_launch,
)
from raymoe.kernels.paged_kv import KvLayout


def append_and_attend_ragged(
    projected: Projected, cache: Tensor, batch: RaggedBatch, scoring: Scoring
) -> Tensor:
    """As `cpu_attention.append_and_attend`, on the GPU of its arguments; [T, H * D].

    Nothing is gathered or added atomically: on one GPU, the bits of a token depend on its sequence
    and on whether it comes alone, not on the sequences beside it.

    Args:
        projected: Rotated already; queries in the type of `batch.compute`.
        cache: Blocks of one layer, [N, G, 2, B * D] in the layout of `paged_kv`; changed in place.
        batch: The sequences.
        scoring: What queries do with keys.
    """
    query_THD, key_TGD, _ = projected
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    if not len(query_THD):
        return out_THD.flatten(1)
    _, num_kv_heads, head_dim = key_TGD.shape
    layout = KvLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=cache.dtype)
    append_launch(projected, batch.slots_T, cache, layout).run()
    attending = Attending(
        query_THD=query_THD,
        cache=DeviceCache.of_blocks(cache, layout, batch.table_SM),
        out_THV=out_THD,
        compute=batch.compute,
        scoring=scoring,
    )
    attending.run(batch.alone)
    attending.run(batch.together)
    return out_THD.flatten(1)
