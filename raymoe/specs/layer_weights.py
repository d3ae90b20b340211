"""Canonical names and shapes of a layer's weights, and the parts that move as a whole."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from raymoe.specs.layers import (
    AnyAttentionSpec,
    AnyStreamsSpec,
    AttentionSpec,
    CompressedAttentionSpec,
    DenseSpec,
    GatedStreamsSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoeSpec,
    QkNorm,
    RecurrentSpec,
    projections_of,
)

Shape = tuple[int, ...]
NamedShapes = Iterator[tuple[str, Shape]]
FINAL_NORM_BIAS = "model.norm.bias"
HEAD, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
LABEL_HEAD = "score.weight"  # stored name of HEAD in a model with a classification head
EXPERTS = "mlp.experts."
ROUTER = "mlp.gate."
TOKEN_EXPERTS = "mlp.gate.tid2eid"
OUTPUT = "self_attn.o_proj"
GROUPED_OUTPUT = "self_attn.o_a_proj"
COMPRESSOR = "self_attn.compressor."
POSITION_BIAS = f"{COMPRESSOR}position_bias"
OUTPUT_GATE = "self_attn.g_proj"
KV_UP = "self_attn.kv_b_proj"
INDEXER = "self_attn.indexer."
RECURRENT = "linear_attn."
NGRAMS = "ngrams."
NGRAM_TABLE = "ngrams.table."  # its tensors, by their number
MAX_TABLE_TENSORS = 512  # the default of transformers' class
NGRAM_SCALE = "ngrams.table_scale"  # of all that the table holds
# Integers of the hashes, which `NgramSpec` says as well.
NGRAM_MULTIPLIERS, NGRAM_SIZES, NGRAM_OFFSETS = (
    f"{NGRAMS}{name}" for name in ("multipliers", "sizes", "offsets")
)
# What attention and the feed-forward network read of several streams, and add to them.
MIXERS = ATTENTION_MIXER, FFN_MIXER = "attention_mixer", "ffn_mixer"
MERGE = "model.merge_mixer"  # what the final norm reads of several streams
LATENT_IN, LATENT_OUT = "mlp.latent_in_proj", "mlp.latent_out_proj"


def layer_prefix(i: int) -> str:
    return f"model.layers.{i}."


LAYER_NUMBER = re.compile(r"^model\.layers\.(\d+)\.")


def num_elements(weights: Iterable[tuple[str, Shape]]) -> int:
    return sum(math.prod(shape) for _, shape in weights)


def outer_weights(
    vocab_size: int,
    hidden_size: int,
    *,
    head_rows: int,
    has_head_bias: bool,
    has_norm_bias: bool,
    streams: AnyStreamsSpec | None,
) -> NamedShapes:
    """Names and shapes of the weights outside layers; a tied head has no rows of its own."""
    if isinstance(streams, GatedStreamsSpec):
        yield from _gated_mixer(MERGE, streams, hidden_size)
    elif streams is not None and streams.merge == "weighted":
        yield f"{MERGE}.weight", (streams.count, streams.count * hidden_size)
        yield f"{MERGE}.base", (streams.count,)
        yield f"{MERGE}.scale", (1,)
    yield EMBEDDING, (vocab_size, hidden_size)
    if not isinstance(streams, GatedStreamsSpec):
        yield FINAL_NORM, (hidden_size,)
    if has_norm_bias:
        yield FINAL_NORM_BIAS, (hidden_size,)
    if head_rows:
        yield HEAD, (head_rows, hidden_size)
    if has_head_bias:
        yield HEAD_BIAS, (vocab_size,)


def layer_weights(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    weights = dict(attention_weights(layer, hidden_size)) | dict(common_weights(layer, hidden_size))
    weights |= dict(token_tables(layer)) | dict(ngram_tables(layer))
    if isinstance(layer.ffn, MoeSpec):
        for expert in range(layer.ffn.num_experts):
            weights |= dict(expert_weights(layer.ffn, hidden_size, expert))
    return weights


def layer_parameters(layer: LayerSpec, hidden_size: int) -> int:
    count = num_elements(attention_weights(layer, hidden_size))
    count += num_elements(common_weights(layer, hidden_size)) + num_elements(token_tables(layer))
    count += num_elements(each for each in ngram_tables(layer) if each[0] != NGRAM_SCALE)
    if isinstance(layer.ffn, MoeSpec):
        count += layer.ffn.num_experts * expert_parameters(layer.ffn, hidden_size)
    return count


def expert_parameters(moe: MoeSpec, hidden_size: int) -> int:
    return num_elements(expert_weights(moe, hidden_size))


def attention_weights(layer: LayerSpec, hidden_size: int) -> NamedShapes:
    """Weights read around attention: norms, projections, router, projection to a latent."""
    if layer.mixed_streams is not None:
        for name in (ATTENTION_MIXER, FFN_MIXER):
            yield from _mixer(name, layer.mixed_streams, hidden_size)
    if layer.norms.before_attention:
        yield from _norm(INPUT_NORM, layer, hidden_size)
    yield from _attention(layer.attention, hidden_size)
    if layer.norms.after_attention:
        yield from _norm(ATTENTION_RESULT_NORM, layer, hidden_size)
    if layer.norms.before_ffn:
        yield from _norm(FFN_NORM, layer, hidden_size)
    if isinstance(layer.ffn, MoeSpec):
        yield from _router(layer.ffn, hidden_size)
        if layer.ffn.latent_size is not None:
            yield f"{LATENT_IN}.weight", (layer.ffn.latent_size, hidden_size)


def _attention(attention: AnyAttentionSpec, hidden_size: int) -> NamedShapes:
    if isinstance(attention, AttentionSpec):
        return _grouped(attention, hidden_size)
    if isinstance(attention, RecurrentSpec) and attention.ngrams is not None:
        return _ngrams(attention, attention.ngrams.width, hidden_size)
    if isinstance(attention, RecurrentSpec):
        return _recurrent(attention, hidden_size)
    if isinstance(attention, CompressedAttentionSpec):
        return _compressed(attention, hidden_size)
    return _latent(attention, hidden_size)


def token_tables(layer: LayerSpec) -> NamedShapes:
    """Tables of integers by token id, which the host reads."""
    if isinstance(layer.ffn, MoeSpec) and layer.ffn.router.num_token_ids:
        yield TOKEN_EXPERTS, (layer.ffn.router.num_token_ids, layer.ffn.top_k)


def ngram_tables(layer: LayerSpec) -> NamedShapes:
    """The table of embeddings of n-grams, and integers of its hashes, which the host reads."""
    ngrams = layer.ngrams
    if ngrams is None:
        return
    for number, rows in enumerate(ngrams.tensor_rows):
        yield f"{NGRAM_TABLE}{number}", (rows, ngrams.row_width)
    yield NGRAM_SCALE, (1,)
    yield NGRAM_MULTIPLIERS, (len(ngrams.multipliers),)
    yield NGRAM_SIZES, (len(ngrams.sizes),)
    yield NGRAM_OFFSETS, (len(ngrams.sizes),)


def common_weights(layer: LayerSpec, hidden_size: int) -> NamedShapes:
    """Weights that every token reads with the experts: dense network or shared expert, a norm."""
    ffn = layer.ffn
    if layer.norms.after_ffn:
        yield from _norm(FFN_RESULT_NORM, layer, hidden_size)
    if layer.has_scalar:
        yield LAYER_SCALAR, (1,)
    if isinstance(ffn, MoeSpec) and ffn.has_branch_norms:
        for name in (EXPERTS_INPUT_NORM, EXPERTS_RESULT_NORM, SHARED_RESULT_NORM):
            yield from _norm(name, layer, hidden_size)
    if isinstance(ffn, MoeSpec) and ffn.latent_size is not None:
        yield f"{LATENT_OUT}.weight", (hidden_size, ffn.latent_size)
    if isinstance(ffn, DenseSpec):
        if layer.has_network:
            yield from _network("mlp.", ffn, hidden_size)
    elif ffn.shared is not None:
        shared = ffn.shared
        yield from _network("mlp.shared_expert.", shared.network(ffn.activation), hidden_size)
        if shared.is_gated:
            yield "mlp.shared_expert_gate.weight", (1, hidden_size)


def expert_weights(moe: MoeSpec, hidden_size: int, expert: int = 0) -> NamedShapes:
    """Weights of one expert; all experts of a layer have the same shapes."""
    network = DenseSpec(hidden=moe.expert_hidden, activation=moe.activation, has_bias=moe.has_bias)
    yield from _network(f"{EXPERTS}{expert}.", network, moe.input_size(hidden_size))


def _mixer(name: str, streams: AnyStreamsSpec, hidden_size: int) -> NamedShapes:
    if isinstance(streams, GatedStreamsSpec):
        # The first two are one matrix: their places are neighbours.
        yield f"{name}.inject.weight", (streams.count, streams.count * hidden_size)
        yield from _gated_mixer(name, streams, hidden_size)
        return
    yield f"{name}.weight", (streams.num_factors, streams.count * hidden_size)
    yield f"{name}.base", (streams.num_factors,)
    yield f"{name}.scale", (streams.num_scales,)


def _gated_mixer(name: str, streams: GatedStreamsSpec, hidden_size: int) -> NamedShapes:
    width = streams.count * hidden_size
    yield f"{name}.down.weight", (streams.latent_width, width)
    yield f"{name}.up.weight", (width, streams.latent_width)
    yield f"{name}.norm.weight", (width,)


def _norm(name: str, layer: LayerSpec, hidden_size: int) -> NamedShapes:
    yield from _linear(name, (hidden_size,), has_bias=layer.has_norm_bias)


def _linear(name: str, shape: Shape, *, has_bias: bool = False) -> NamedShapes:
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]


def _grouped(attention: AttentionSpec, hidden_size: int) -> NamedShapes:
    query, key = attention.query_width, attention.key_width
    for part, width in attention.projections.items():
        name = f"self_attn.{part}_proj"
        yield from _linear(name, (width, hidden_size), has_bias=attention.qkv_bias)
    head_dim = attention.head_dim
    norms: dict[QkNorm, tuple[Shape, Shape]] = {
        "head": ((head_dim,), (head_dim,)),
        "full": ((query,), (key,)),
        "layer": ((attention.num_heads, head_dim), (attention.num_kv_heads, head_dim)),
    }
    for part, shape in zip("qk", norms.get(attention.qk_norm, ()), strict=False):
        yield f"self_attn.{part}_norm.weight", shape
    if attention.has_sinks:
        yield "self_attn.sinks", (attention.num_heads,)
    yield from _gate(attention, hidden_size)
    if attention.blocks is not None:
        dim = attention.blocks.head_dim
        yield f"{INDEXER}k_proj.weight", (dim, hidden_size)
        yield f"{INDEXER}q_proj.weight", (attention.blocks.num_heads * dim, hidden_size)
        yield f"{INDEXER}q_norm.weight", (dim,)
        yield f"{INDEXER}k_norm.weight", (dim,)
    output = (hidden_size, attention.output_width)
    yield from _linear(OUTPUT, output, has_bias=attention.output_bias)


def _latent(attention: LatentAttentionSpec, hidden_size: int) -> NamedShapes:
    rank, heads, has_bias = attention.q_lora_rank, attention.num_heads, attention.has_bias
    query_width = heads * attention.query_head_dim
    if rank is None:
        yield "self_attn.q_proj.weight", (query_width, hidden_size)
    else:
        yield from _linear("self_attn.q_a_proj", (rank, hidden_size), has_bias=has_bias)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield "self_attn.q_b_proj.weight", (query_width, rank)
    cached = (attention.row_width, hidden_size)
    yield from _linear("self_attn.kv_a_proj_with_mqa", cached, has_bias=has_bias)
    yield "self_attn.kv_a_layernorm.weight", (attention.kv_lora_rank,)
    up_projected = heads * (attention.nope_head_dim + attention.value_head_dim)
    yield f"{KV_UP}.weight", (up_projected, attention.kv_lora_rank)
    yield from _gate(attention, hidden_size)
    if attention.has_sinks:
        yield "self_attn.sinks", (heads,)
    if attention.indexer is not None and not attention.indexer.is_shared:
        yield from _indexer(attention.indexer, rank or hidden_size, hidden_size)
    value_width = heads * attention.value_head_dim
    yield from _linear(OUTPUT, (hidden_size, value_width), has_bias=has_bias)


def _gate(attention: AttentionSpec | LatentAttentionSpec, hidden_size: int) -> NamedShapes:
    if attention.gate is not None:
        shape = (attention.gate_width, hidden_size)
        yield from _linear(OUTPUT_GATE, shape, has_bias=attention.gate.has_bias)


def _indexer(indexer: IndexerSpec, query_inputs: int, hidden_size: int) -> NamedShapes:
    yield f"{INDEXER}wq_b.weight", (indexer.num_heads * indexer.head_dim, query_inputs)
    yield f"{INDEXER}wk.weight", (indexer.head_dim, hidden_size)
    yield from _linear(f"{INDEXER}k_norm", (indexer.head_dim,), has_bias=True)
    yield f"{INDEXER}weights_proj.weight", (indexer.num_heads, hidden_size)
    if indexer.pool is not None:
        yield f"{INDEXER}pool_gate.weight", (indexer.head_dim, hidden_size)
        yield f"{INDEXER}pool_bias", (indexer.pool, indexer.head_dim)


def _compressed(attention: CompressedAttentionSpec, hidden_size: int) -> NamedShapes:
    width, rank = attention.head_dim, attention.q_lora_rank
    yield "self_attn.q_a_proj.weight", (rank, hidden_size)
    yield "self_attn.kv_proj.weight", (width, hidden_size)
    yield "self_attn.q_a_norm.weight", (rank,)
    yield "self_attn.kv_norm.weight", (width,)
    yield "self_attn.q_b_proj.weight", (attention.query_width, rank)
    yield "self_attn.sinks", (attention.num_heads,)
    if attention.ratio is not None:
        for part in ("kv_proj", "gate_proj"):
            yield f"{COMPRESSOR}{part}.weight", (attention.pooled_width, hidden_size)
        yield POSITION_BIAS, (attention.ratio, attention.pooled_width)
        yield f"{COMPRESSOR}kv_norm.weight", (width,)
    if attention.indexer is not None and attention.ratio is not None:
        num_heads, dim = attention.indexer.num_heads, attention.indexer.head_dim
        width = attention.num_sums * dim
        yield f"{INDEXER}wq_b.weight", (num_heads * dim, rank)
        yield f"{INDEXER}weights_proj.weight", (num_heads, hidden_size)
        for part in ("kv_proj", "gate_proj"):
            yield f"{INDEXER}{part}.weight", (width, hidden_size)
        yield f"{INDEXER}position_bias", (attention.ratio, width)
        yield f"{INDEXER}kv_norm.weight", (dim,)
    latent = attention.num_groups * attention.group_rank
    yield f"{GROUPED_OUTPUT}.weight", (latent, attention.output_width // attention.num_groups)
    yield f"{OUTPUT}.weight", (hidden_size, latent)


def _recurrent(attention: RecurrentSpec, hidden_size: int) -> NamedShapes:
    has_bias = attention.has_bias
    for part, width in attention.inputs.items():
        yield f"{RECURRENT}{part}_proj.weight", (width, hidden_size)
    for part, width in attention.inputs.items() if has_bias else ():
        yield f"{RECURRENT}{part}_proj.bias", (width,)
    latent = attention.latent_width
    if latent is None:
        gate = (attention.gate_width, hidden_size)
        yield from _linear(f"{RECURRENT}g_proj", gate, has_bias=has_bias)
    else:
        yield f"{RECURRENT}g_a_proj.weight", (latent, hidden_size)
        for part, width in attention.latent_outputs.items():
            yield f"{RECURRENT}{part}_proj.weight", (width, latent)
    for part, width in attention.projections.items():
        conv = (width, 1, attention.conv_width)
        yield from _linear(f"{RECURRENT}{part}_conv", conv, has_bias=attention.has_conv_bias)
    if attention.has_matrices:
        yield f"{RECURRENT}A_log", (attention.num_heads,)
        yield f"{RECURRENT}dt_bias", (attention.decay_width,)
        yield f"{RECURRENT}norm.weight", (attention.norm_width,)
    if attention.kind == "mamba2":
        yield f"{RECURRENT}D", (attention.num_heads,)
    output = (hidden_size, attention.output_width)
    yield from _linear(f"{RECURRENT}o_proj", output, has_bias=has_bias)


def _ngrams(attention: RecurrentSpec, inputs: int, hidden_size: int) -> NamedShapes:
    width = attention.conv_channels
    yield f"{NGRAMS}k_proj.weight", (width, inputs)
    yield f"{NGRAMS}v_proj.weight", (hidden_size, inputs)
    for name in ("k_norm", "q_norm", "conv_norm"):
        yield f"{NGRAMS}{name}.weight", (width,)
    taps = (attention.conv_width - 1) // attention.conv_dilation + 1
    yield f"{NGRAMS}conv.weight", (width, 1, taps)


def _router(moe: MoeSpec, hidden_size: int) -> NamedShapes:
    yield f"{ROUTER}weight", (moe.num_experts, hidden_size)
    if moe.router.has_bias:
        yield f"{ROUTER}bias", (moe.num_experts,)
    if moe.router.has_input_norm:
        yield f"{ROUTER}input_norm.weight", (hidden_size,)
    if moe.router.has_expert_scales:
        yield f"{ROUTER}expert_scales", (moe.num_experts,)
    if moe.router.has_selection_bias:
        yield f"{ROUTER}e_score_correction_bias", (moe.num_experts,)


def _network(prefix: str, network: DenseSpec, hidden_size: int) -> NamedShapes:
    wide = (network.hidden, hidden_size)
    for part in dict.fromkeys(projections_of(network.activation)):
        shape = wide[::-1] if part == "down" else wide
        yield from _linear(f"{prefix}{part}_proj", shape, has_bias=network.has_bias)


# Alignment of parts in bytes, so that elements of any type can be read in place.
PART_ALIGNMENT = 16
_FIRST = ("input_layernorm.weight", *(f"self_attn.{part}_proj.weight" for part in "qkv"))
_NEXT = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    name: str  # "attention", "common" (dense network or shared expert) or "expert <n>"
    shapes: Mapping[str, Shape]  # by canonical name without the layer's prefix, in memory order


def layer_parts(layer: LayerSpec, hidden_size: int) -> tuple[WeightPart, ...]:
    """The parts of a layer in memory order, without empty ones."""
    attention = dict(attention_weights(layer, hidden_size))
    first = [name for name in (*_FIRST, *_NEXT) if name in attention]
    parts = {
        "attention": {name: attention[name] for name in (*first, *attention)},
        "common": dict(common_weights(layer, hidden_size)),
    }
    if isinstance(layer.ffn, MoeSpec):
        for expert in range(layer.ffn.num_experts):
            parts[f"expert {expert}"] = dict(expert_weights(layer.ffn, hidden_size, expert))
    return tuple(WeightPart(name=name, shapes=shapes) for name, shapes in parts.items() if shapes)


EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
# Norms of a layer: the inputs of attention and feed-forward network, and their results.
INPUT_NORM, FFN_NORM = "input_layernorm", "post_attention_layernorm"
ATTENTION_RESULT_NORM, FFN_RESULT_NORM = "attention_result_norm", "ffn_result_norm"
EXPERTS_INPUT_NORM, EXPERTS_RESULT_NORM = "mlp.experts_input_norm", "mlp.experts_result_norm"
SHARED_RESULT_NORM = "mlp.shared_result_norm"
LAYER_SCALAR = "layer_scalar"
