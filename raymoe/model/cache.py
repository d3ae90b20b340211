"""How the cache of a model is laid out."""

import torch

from raymoe.errors import UnsupportedModelError
from raymoe.kernels.paged_kv import CacheLayout, KvLayout
from raymoe.kernels.paged_latent import LatentLayout
from raymoe.specs.model import AttentionSpec, LatentAttentionSpec, ModelSpec


def cache_layout(spec: ModelSpec, dtype: torch.dtype) -> CacheLayout:
    """The layout that all layers share.

    Raises:
        UnsupportedModelError: Layers differ in what a token leaves in the cache.
        ConfigError: No kernel reads a cache of this type or of these sizes.
    """
    layouts = {_layout(layer.attention, dtype) for layer in spec.layers}
    if len(layouts) > 1:
        shapes = sorted(layout.block_shape for layout in layouts)
        raise UnsupportedModelError(
            f"{spec.name}: layers with different KV heads or head_dim (blocks of {shapes})"
        )
    return layouts.pop()


def _layout(
    attention: AttentionSpec | LatentAttentionSpec, dtype: torch.dtype
) -> KvLayout | LatentLayout:
    if isinstance(attention, LatentAttentionSpec):
        return LatentLayout(
            rank=attention.kv_lora_rank, rope_dim=attention.rope_head_dim, dtype=dtype
        )
    return KvLayout(num_kv_heads=attention.num_kv_heads, head_dim=attention.head_dim, dtype=dtype)
