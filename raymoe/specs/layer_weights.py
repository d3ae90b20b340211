"""Canonical names and shapes of a layer's weights, and the parts that move as a whole."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raymoe.specs.attention.ngrams import (
    NGRAM_MULTIPLIERS,
    NGRAM_OFFSETS,
    NGRAM_SCALE,
    NGRAM_SIZES,
    NGRAM_TABLE,
)
from raymoe.specs.layers import DenseSpec, LayerSpec, MoeSpec, projections_of
from raymoe.specs.streams import AnyStreamsSpec
from raymoe.specs.weights import Shape, Weight, linear, num_elements, shapes

FINAL_NORM_BIAS = "model.norm.bias"
HEAD, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
LABEL_HEAD = "score.weight"  # stored name of HEAD in a model with a classification head
EXPERTS = "mlp.experts."
ROUTER = "mlp.gate."
TOKEN_EXPERTS = "mlp.gate.tid2eid"
# What attention and the feed-forward network read of several streams, and add to them.
MIXERS = ATTENTION_MIXER, FFN_MIXER = "attention_mixer", "ffn_mixer"
MERGE = "model.merge_mixer"  # what the final norm reads of several streams
LATENT_IN, LATENT_OUT = "mlp.latent_in_proj", "mlp.latent_out_proj"


def layer_prefix(i: int) -> str:
    return f"model.layers.{i}."


LAYER_NUMBER = re.compile(r"^model\.layers\.(\d+)\.")


def outer_weights(
    vocab_size: int,
    hidden_size: int,
    *,
    head_rows: int,
    has_head_bias: bool,
    has_norm_bias: bool,
    streams: AnyStreamsSpec | None,
) -> Iterator[Weight]:
    """The weights outside layers; a tied head has no rows of its own."""
    if streams is not None:
        yield from streams.merge_weights(MERGE, hidden_size)
    yield Weight(EMBEDDING, (vocab_size, hidden_size))
    if streams is None or streams.has_final_norm:
        yield Weight(FINAL_NORM, (hidden_size,))
    if has_norm_bias:
        yield Weight(FINAL_NORM_BIAS, (hidden_size,))
    if head_rows:
        yield Weight(HEAD, (head_rows, hidden_size))
    if has_head_bias:
        yield Weight(HEAD_BIAS, (vocab_size,))


def layer_weights(layer: LayerSpec, hidden_size: int) -> dict[str, Shape]:
    parts = (attention_weights, common_weights)
    weights = {
        name: shape for part in parts for name, shape in shapes(part(layer, hidden_size)).items()
    }
    weights |= shapes(token_tables(layer)) | shapes(ngram_tables(layer))
    if layer.moe is not None:
        for expert in range(layer.moe.num_experts):
            weights |= shapes(expert_weights(layer.moe, hidden_size, expert))
    return weights


def layer_parameters(layer: LayerSpec, hidden_size: int) -> int:
    count = num_elements(attention_weights(layer, hidden_size))
    count += num_elements(common_weights(layer, hidden_size)) + num_elements(token_tables(layer))
    count += num_elements(each for each in ngram_tables(layer) if each.name != NGRAM_SCALE)
    if layer.moe is not None:
        count += layer.moe.num_experts * expert_parameters(layer.moe, hidden_size)
    return count


def expert_parameters(moe: MoeSpec, hidden_size: int) -> int:
    return num_elements(expert_weights(moe, hidden_size))


def attention_weights(layer: LayerSpec, hidden_size: int) -> Iterator[Weight]:
    """Weights read around attention: norms, projections, router, projection to a latent."""
    if layer.mixed_streams is not None:
        for name in (ATTENTION_MIXER, FFN_MIXER):
            yield from layer.mixed_streams.mixer_weights(name, hidden_size)
    if layer.norms.before_attention:
        yield from _norm(INPUT_NORM, layer, hidden_size)
    yield from layer.attention.weights(hidden_size)
    if layer.norms.after_attention:
        yield from _norm(ATTENTION_RESULT_NORM, layer, hidden_size)
    if layer.norms.before_ffn:
        yield from _norm(FFN_NORM, layer, hidden_size)
    if layer.moe is not None:
        yield from _router(layer.moe, hidden_size)
        if layer.moe.latent_size is not None:
            yield Weight(f"{LATENT_IN}.weight", (layer.moe.latent_size, hidden_size), "post")


def token_tables(layer: LayerSpec) -> Iterator[Weight]:
    """Tables of integers by token id, which the host reads."""
    moe = layer.moe
    if moe is not None and moe.router.num_token_ids:
        yield Weight(TOKEN_EXPERTS, (moe.router.num_token_ids, moe.top_k))


def ngram_tables(layer: LayerSpec) -> Iterator[Weight]:
    """The table of embeddings of n-grams, and integers of its hashes, which the host reads."""
    ngrams = layer.ngrams
    if ngrams is None:
        return
    for number, rows in enumerate(ngrams.tensor_rows):
        yield Weight(f"{NGRAM_TABLE}{number}", (rows, ngrams.row_width))
    yield Weight(NGRAM_SCALE, (1,))
    yield Weight(NGRAM_MULTIPLIERS, (len(ngrams.multipliers),))
    yield Weight(NGRAM_SIZES, (len(ngrams.sizes),))
    yield Weight(NGRAM_OFFSETS, (len(ngrams.sizes),))


def common_weights(layer: LayerSpec, hidden_size: int) -> Iterator[Weight]:
    """Weights that every token reads with the experts: dense network or shared expert, a norm."""
    ffn = layer.ffn
    if layer.norms.after_ffn:
        yield from _norm(FFN_RESULT_NORM, layer, hidden_size)
    if layer.has_scalar:
        yield Weight(LAYER_SCALAR, (1,))
    if isinstance(ffn, DenseSpec):
        if layer.has_network:
            yield from _network("mlp.", ffn, hidden_size)
        return
    if ffn.has_branch_norms:
        for name in (EXPERTS_INPUT_NORM, EXPERTS_RESULT_NORM, SHARED_RESULT_NORM):
            yield from _norm(name, layer, hidden_size)
    if ffn.latent_size is not None:
        yield Weight(f"{LATENT_OUT}.weight", (hidden_size, ffn.latent_size))
    if ffn.shared is not None:
        shared = ffn.shared
        yield from _network("mlp.shared_expert.", shared.network(ffn.activation), hidden_size)
        if shared.is_gated:
            yield Weight("mlp.shared_expert_gate.weight", (1, hidden_size))


def expert_weights(moe: MoeSpec, hidden_size: int, expert: int = 0) -> Iterator[Weight]:
    """Weights of one expert; all experts of a layer have the same shapes."""
    network = DenseSpec(hidden=moe.expert_hidden, activation=moe.activation, has_bias=moe.has_bias)
    yield from _network(f"{EXPERTS}{expert}.", network, moe.input_size(hidden_size))


def _norm(name: str, layer: LayerSpec, hidden_size: int) -> Iterator[Weight]:
    yield from linear(name, (hidden_size,), has_bias=layer.has_norm_bias)


def _router(moe: MoeSpec, hidden_size: int) -> Iterator[Weight]:
    yield Weight(f"{ROUTER}weight", (moe.num_experts, hidden_size), "router")
    if moe.router.has_bias:
        yield Weight(f"{ROUTER}bias", (moe.num_experts,), "router")
    if moe.router.has_input_norm:
        yield Weight(f"{ROUTER}input_norm.weight", (hidden_size,), "router")
    if moe.router.has_expert_scales:
        yield Weight(f"{ROUTER}expert_scales", (moe.num_experts,), "router")
    if moe.router.has_selection_bias:
        yield Weight(f"{ROUTER}e_score_correction_bias", (moe.num_experts,), "router")


def _network(prefix: str, network: DenseSpec, hidden_size: int) -> Iterator[Weight]:
    wide = (network.hidden, hidden_size)
    for part in dict.fromkeys(projections_of(network.activation)):
        shape = wide[::-1] if part == "down" else wide
        yield from linear(f"{prefix}{part}_proj", shape, has_bias=network.has_bias)


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
    attention = shapes(attention_weights(layer, hidden_size))
    first = [name for name in (*_FIRST, *_NEXT) if name in attention]
    parts = {
        "attention": {name: attention[name] for name in (*first, *attention)},
        "common": shapes(common_weights(layer, hidden_size)),
    }
    if layer.moe is not None:
        for expert in range(layer.moe.num_experts):
            parts[f"expert {expert}"] = shapes(expert_weights(layer.moe, hidden_size, expert))
    return tuple(WeightPart(name=name, shapes=shapes) for name, shapes in parts.items() if shapes)


EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
# Norms of a layer: the inputs of attention and feed-forward network, and their results.
INPUT_NORM, FFN_NORM = "input_layernorm", "post_attention_layernorm"
ATTENTION_RESULT_NORM, FFN_RESULT_NORM = "attention_result_norm", "ffn_result_norm"
EXPERTS_INPUT_NORM, EXPERTS_RESULT_NORM = "mlp.experts_input_norm", "mlp.experts_result_norm"
SHARED_RESULT_NORM = "mlp.shared_result_norm"
LAYER_SCALAR = "layer_scalar"
