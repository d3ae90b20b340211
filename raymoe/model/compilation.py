"""Compiling the kernels of a GPU while a model is loaded, so that no step waits for a compiler.

What is in weights and caches does not matter here; what comes of them is dropped.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.elementwise import Projected, Routing
from raymoe.kernels.gpu_attention_batch import SPLIT_POSITIONS
from raymoe.kernels.gpu_experts_layout import BUCKETS, balanced_routing
from raymoe.kernels.paged_kv import BLOCK_TOKENS, CacheLayout, largest_layout
from raymoe.kernels.tensors import to_device
from raymoe.model.decoder import Decoder
from raymoe.specs.layer_weights import expert_weights, layer_prefix
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import LayerSpec, ModelSpec
from raymoe.specs.weight_format import WeightFormat

# `Decoder.local_ffn`: no rank waits for another. Layer, hidden states, and the experts of each
# token.
ComputeExperts = Callable[[int, Tensor, Routing], object]


@torch.inference_mode()
def compile_experts(
    spec: ModelSpec,
    compute: ComputeExperts,
    max_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compute experts of each kind once with as many tokens as each tile is for.

    What is in the weights does not matter; what comes of them is dropped.

    Args:
        compute: Computes the experts of a layer.
    """
    for i, moe in _kinds(spec):
        for num_tokens in _sizes(moe, max_tokens):
            hidden_TH = torch.zeros(num_tokens, spec.hidden_size, dtype=dtype, device=device)
            routing = balanced_routing(num_tokens, moe.num_experts, moe.top_k, device)
            compute(i, hidden_TH, Routing(*routing))


def _sizes(moe: MoeSpec, max_tokens: int) -> Iterator[int]:
    for bucket in BUCKETS:
        num_tokens = -(-bucket * moe.num_experts // moe.top_k)
        if num_tokens <= max_tokens or bucket == BUCKETS[0]:
            yield min(num_tokens, max_tokens)


def _kinds(spec: ModelSpec) -> Iterator[tuple[int, MoeSpec]]:
    seen = set()
    for i, layer in enumerate(spec.layers):
        kind = (layer.ffn, _formats(spec, i, layer))
        if layer.moe is not None and kind not in seen:
            seen.add(kind)
            yield i, layer.moe


def _formats(spec: ModelSpec, i: int, layer: LayerSpec) -> tuple[WeightFormat | None, ...]:
    if layer.moe is None:
        return ()
    weights = expert_weights(layer.moe, spec.hidden_size)
    return tuple(spec.format_of(layer_prefix(i) + each.name, each.shape) for each in weights)


PROMPT_TOKENS = 1024  # enough for the plain form of latent attention


@torch.inference_mode()
def compile_attention(
    decoder: Decoder,
    layouts: Sequence[CacheLayout],
    max_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Attend in each kind of layer: decoding with a short and a long context, and for a prompt."""
    prompt = max(2, min(PROMPT_TOKENS, max_tokens))
    steps = ((1, 1), (1, SPLIT_POSITIONS + 1), (prompt, prompt))
    sequences = [_one_sequence(*step) for step in steps]
    decoder.reserve(SPLIT_POSITIONS + 1)
    batches = [
        to_device(
            decoder.staged_batch(each, largest_layout(layouts), device, with_states=each), device
        )
        for each in sequences
    ]
    kinds = [
        (layer.attention, layout)
        for layer, layout in zip(decoder.spec.layers, layouts, strict=True)
    ]
    for i, (attention, layout) in enumerate(kinds):
        if kinds.index(kinds[i]) < i:
            continue
        shapes = attention.token_shapes
        num_blocks = -(-PROMPT_TOKENS // BLOCK_TOKENS) + 1
        num_bytes = num_blocks * layout.block_bytes + layout.sequence_bytes
        cache = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if not layout.sequence_bytes:
            cache = cache.view(layout.dtype).view(num_blocks, *layout.block_shape)
        for (num_tokens, _), batch in zip(steps, batches, strict=True):
            projected = Projected(
                *(
                    torch.zeros(num_tokens, *shape, dtype=dtype, device=device)
                    for shape in (shapes.query, shapes.key, shapes.value)
                )
            )
            decoder.attend_staged(i, projected, cache, batch)


def _one_sequence(num_new: int, context: int) -> AttentionBatch:
    num_blocks = -(-context // BLOCK_TOKENS)
    return AttentionBatch(
        query_start=torch.tensor([0, num_new], dtype=torch.int32),
        context_tokens=torch.tensor([context], dtype=torch.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        slots=torch.zeros(1, dtype=torch.int32),
    )
