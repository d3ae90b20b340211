"""Which part of a model a rank has, and what cannot be divided."""

from dataclasses import replace

import pytest

from raymoe.errors import ConfigError
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.attention.kind import OutputGate
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.layer_weights import layer_weights
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from raymoe.specs.quantization import Quantization
from raymoe.specs.tensor_shards import Cut, cut_of, shard_model
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Gptq,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)


def preset(name: str) -> ModelSpec:
    return ModelSpec.from_config(MODEL_PRESETS[name], name=name)


def cuts(model: ModelSpec, name: str, count: int) -> list[Cut]:
    part = shard_model(model, count)
    whole, shape = (layer_weights(spec.layers[-1], spec.hidden_size) for spec in (model, part))
    return [cut_of(name, whole[name], shape[name], rank=rank, count=count) for rank in range(count)]


def test_one_rank_has_all() -> None:
    model = preset("mixtral-8x7b")
    assert shard_model(model, 1) is model


def test_heads_and_columns_are_divided_and_the_rest_is_not() -> None:
    model = preset("mixtral-8x7b")  # 32 heads and 8 KV heads of 128; 14336 columns
    part = shard_model(model, 4)
    attention, moe = part.layers[0].attention, part.layers[0].ffn
    assert isinstance(attention, AttentionSpec)
    assert isinstance(moe, MoeSpec)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 2, 128)
    assert (moe.expert_hidden, moe.num_experts, moe.top_k) == (3584, 8, 2)
    assert (part.hidden_size, part.vocab_size, part.num_shards) == (4096, 32000, 4)
    assert part.kv_bytes_per_token(2) * 4 == model.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("name", "axis", "size"),
    [
        ("self_attn.q_proj.weight", 0, 1024),
        ("self_attn.k_proj.weight", 0, 256),
        ("self_attn.v_proj.weight", 0, 256),
        ("self_attn.o_proj.weight", 1, 1024),
        ("mlp.experts.5.gate_proj.weight", 0, 3584),
        ("mlp.experts.5.up_proj.weight", 0, 3584),
        ("mlp.experts.5.down_proj.weight", 1, 3584),
    ],
)
def test_ranks_have_neighbouring_parts(name: str, axis: int, size: int) -> None:
    found = cuts(preset("mixtral-8x7b"), name, 4)
    assert found == [Cut(axis, rank * size, (rank + 1) * size) for rank in range(4)]


@pytest.mark.parametrize("name", ["mlp.gate.weight", "input_layernorm.weight"])
def test_what_every_token_needs_is_on_every_rank(name: str) -> None:
    assert cuts(preset("mixtral-8x7b"), name, 4) == [Cut()] * 4


def test_ranks_that_outnumber_kv_heads_share_them() -> None:
    model = preset("mixtral-8x7b")
    few = replace(
        model,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, num_kv_heads=2))
            for layer in model.layers
        ),
    )
    assert [cut.begin for cut in cuts(few, "self_attn.k_proj.weight", 8)] == [0] * 4 + [128] * 4
    assert [cut.begin for cut in cuts(few, "self_attn.q_proj.weight", 8)] == [
        512 * rank for rank in range(8)
    ]


def test_latent_attention_divides_heads_and_keeps_the_latent() -> None:
    model = preset("deepseek-v3")
    part = shard_model(model, 2)
    attention = part.layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    assert attention.num_heads == 64
    assert part.kv_bytes_per_token(2) == model.kv_bytes_per_token(2)
    assert cuts(model, "self_attn.kv_b_proj.weight", 2)[1] == Cut(0, 64 * 256, 128 * 256)
    assert cuts(model, "self_attn.o_proj.weight", 2)[1] == Cut(1, 64 * 128, 128 * 128)
    for name in ("kv_a_proj_with_mqa", "q_a_proj", "kv_a_layernorm"):
        assert cuts(model, f"self_attn.{name}.weight", 2) == [Cut()] * 2
    for is_per_head, width in ((True, 1), (False, 128)):
        gate = OutputGate(activation="sigmoid", is_per_head=is_per_head)
        gated = replace(
            model,
            quantization=None,  # 64 rows would be half a block of FP8
            layers=tuple(
                replace(layer, attention=replace(layer.attention, gate=gate))
                for layer in model.layers
            ),
        )
        assert cuts(gated, "self_attn.g_proj.weight", 2)[1] == Cut(0, 64 * width, 128 * width)


def test_biases_behind_a_sum_are_added_once() -> None:
    model = preset("gpt-oss-120b")
    for name in ("self_attn.o_proj.bias", "mlp.experts.3.down_proj.bias"):
        assert [cut.is_zero for cut in cuts(model, name, 2)] == [False, True]
    assert cuts(model, "self_attn.sinks", 2) == [Cut(0, 0, 32), Cut(0, 32, 64)]
    assert cuts(model, "mlp.experts.3.up_proj.bias", 2)[1] == Cut(0, 1440, 2880)


def test_norms_over_all_heads_are_divided_like_the_heads() -> None:
    model = replace(preset("minimax-m2"), quantization=None)  # 48 heads and 8 KV heads of 128
    assert cuts(model, "self_attn.q_norm.weight", 2)[1] == Cut(0, 24 * 128, 48 * 128)
    assert cuts(model, "self_attn.k_norm.weight", 16)[3] == Cut(0, 128, 256)


def test_norms_of_each_head_are_divided_with_the_heads() -> None:
    """Each head of Command-R+ has weights of its own; none is quantised."""
    fields = {"use_qk_norm": True, "num_attention_heads": 64, "num_key_value_heads": 8}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = ModelSpec.from_config(
        {"model_type": "cohere", **fields, "quantization_config": fp8, "intermediate_size": 22528}
    )
    assert cuts(model, "self_attn.q_norm.weight", 2)[1] == Cut(0, 32, 64)
    assert cuts(model, "self_attn.k_norm.weight", 16)[3] == Cut(0, 1, 2)
    assert model.format_of("model.layers.0.self_attn.q_norm.weight", (64, 128)) is None
    assert model.format_of("model.layers.0.self_attn.q_proj.weight", (8192, 8192)) is not None


@pytest.mark.parametrize(
    ("model", "count", "message"),
    [
        ("mixtral-8x7b", 3, "layer 0 has 32 attention heads; tensor_parallel_size 3 does not"),
        ("dbrx", 12, "layer 0 has 8 KV heads; tensor_parallel_size 12 does not"),
    ],
)
def test_what_cannot_be_divided_is_refused(model: str, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_model(preset(model), count)


def quantised(model: ModelSpec, stored: WeightFormat) -> ModelSpec:
    return replace(model, quantization=Quantization(method="test", format=stored))


def with_columns(model: ModelSpec, columns: int) -> ModelSpec:
    """The model with experts of so many columns."""
    layers = []
    for layer in model.layers:
        assert isinstance(layer.ffn, MoeSpec)
        layers.append(replace(layer, ffn=replace(layer.ffn, expert_hidden=columns)))
    return replace(model, layers=tuple(layers))


@pytest.mark.parametrize(
    ("stored", "columns", "message"),
    [
        (Fp8Block(), 384, "fp8_block, in groups of 128 rows .of scales.*gives a rank 192 of 384"),
        (PackedInt4(128), 640, "int4_packed, in groups of 128 columns .of scales."),
        (PackedInt4(0, has_zero_points=True), 24, "int4_packed, in groups of 8 rows .of zeros."),
        (Gptq(128), 640, "gptq, in groups of 128 columns .of zeros."),
        (Awq(128), 640, "awq, in groups of 128 columns .of zeros."),
        (Awq(8), 24, "awq, in groups of 8 rows .of codes."),
        (Mxfp4(), 96, "mxfp4, in groups of 32 columns"),
        (Mxfp8(), 96, "mxfp8, in groups of 32 columns"),
        (Nvfp4(), 48, "nvfp4, in groups of 16 columns"),
    ],
)
def test_cuts_through_groups_are_refused_with_their_size(
    stored: WeightFormat, columns: int, message: str
) -> None:
    model = quantised(with_columns(preset("mixtral-8x7b"), columns), stored)
    with pytest.raises(ConfigError, match=message):
        shard_model(model, 2)


@pytest.mark.parametrize(
    "stored",
    [
        Fp8Block(), PackedInt4(128), PackedInt4(0), Gptq(128), Awq(128), Mxfp4(), Mxfp8(), Nvfp4(),
    ],
)  # fmt: skip
def test_cuts_between_groups_are_made(stored: WeightFormat) -> None:
    model = quantised(preset("mixtral-8x7b"), stored)
    part = shard_model(model, 4)
    assert part.quantization == model.quantization
    assert part.weight_bytes(2) < 0.27 * model.weight_bytes(2)
