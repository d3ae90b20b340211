"""Which weights an adapter changes, and tensors that fit nothing."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import CheckpointError, RaymoeError, UnsupportedModelError
from raymoe.specs.adapter_config import AdapterConfig
from raymoe.specs.adapters import Change, adapted_model, find_changes
from raymoe.specs.layer_weights import EMBEDDING, HEAD
from raymoe.specs.model import ModelSpec
from raymoe.specs.weights import Shape
from tests.parity.fields import BASE
from tests.parity.wrapper_families import WRAPPER_FAMILIES

CONFIG = BASE | {
    "model_type": "mixtral",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
SPEC = ModelSpec.from_config(CONFIG, "tiny")
LAYER = "base_model.model.model.layers.0."
QUERY = f"{LAYER}self_attn.q_proj"


def factors(module: str, outputs: int, inputs: int, rank: int = 4) -> dict[str, Shape]:
    return {f"{module}.lora_A.weight": (rank, inputs), f"{module}.lora_B.weight": (outputs, rank)}


def changes(shapes: dict[str, Shape], spec: ModelSpec = SPEC, **fields: Any) -> dict[str, Change]:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/other"}
    return find_changes(spec, AdapterConfig.of(config | fields, "adapter_config.json"), shapes)


def test_a_stacked_parameter_changes_the_matrices_of_all_experts() -> None:
    experts = f"{LAYER}mlp.experts"
    shapes = factors(f"{experts}.base_layer", 192, 64, 16) | factors(experts, 64, 96, 16)
    found = changes(shapes, target_parameters=["experts.down_proj", "experts.gate_up_proj"])
    assert sorted(found) == sorted(
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(4)
        for part in ("gate", "up", "down")
    )
    up = found["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert up.location.expert == 2
    assert up.location.rows == (96, 192, 1)
    assert up.factors is not None
    assert (up.factors.num_experts, up.factors.is_swapped, up.factors.scale) == (4, False, 2.0)
    assert up.factors.a == f"{experts}.base_layer.lora_A.weight"


def test_parameters_are_transposed_as_peft_0_17_took_them() -> None:
    experts = f"{LAYER}mlp.experts"
    shapes = factors(experts, 96, 64, 16)  # of [inputs, outputs]: 64 x 96
    found = changes(shapes, target_parameters=["experts.down_proj"])
    assert all(change.factors and change.factors.is_swapped for change in found.values())


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (factors(QUERY, 64, 64, rank=8), r"q_proj.lora_A.weight' has shape \[8, 64\].* \[4, 64\]"),
        (factors(QUERY, 32, 64), r"lora_B.weight' has shape \[32, 4\], expected is \[64, 4\]"),
        ({f"{QUERY}.lora_A.weight": (4, 64)}, "self_attn.q_proj has .*lora_A.weight alone"),
        (factors(f"{LAYER}self_attn.qkv_proj", 64, 64), "changes model.layers.0.self_attn.qkv_pro"
         "j, which tiny does not have .mixtral.; the adapter may be one of org/other"),
        (factors("base_model.model.model.layers.9.self_attn.q_proj", 64, 64), "layers.9.self_attn"),
        (factors(f"{LAYER}input_layernorm", 64, 64), r"input_layernorm of shape \[64\]; LoRA chang"
         "es matrices"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 64)}, "does not begin with 'base_m"),
        ({f"{QUERY}.lora_magnitude_vector": (64,)}, r"of a kind \(lora_magnitude_vector\) that is "
         "not supported"),
        ({"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 64)},
         r"of a kind \(token_adapter\)"),
        ({"base_model.model.lm_head.weight": (102, 64)}, r"lm_head.weight' has shape \[102, 64\], "
         r"expected is \[100, 64\].*another vocabulary than its base"),
        ({f"{QUERY}.lora_A.default.weight": (4, 64)},
         r"lora_A.default.weight' has the name of an adapter in its own, 'default', .*save_pretr"),
        ({f"{LAYER}mlp.gate.modules_to_save.my-run.weight": (4, 64)}, "in its own, 'my-run'"),
        ({f"{LAYER}embed_tokens.lora_embedding_A.default": (4, 64)}, "in its own, 'default'"),
        ({"base_model.model.score.weight": (3, 64)},
         "head of a classifier.*AutoPeftModelForSequenceClassification.*num_labels=COUNT"),
        ({f"{LAYER}self_attn.q_proj.bias": (64,)}, "q_proj.bias, which tiny does not have"),
        (factors(QUERY, 64, 64) | {f"{QUERY}.lora_B.bias": (64,)}, "lora_B.bias' is added to mode"),
    ],
)  # fmt: skip
def test_a_tensor_that_fits_nothing_is_refused_by_name(
    shapes: dict[str, Shape], match: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=match):
        changes(shapes)


MODULES = [
    *("self_attn.q_proj", "mlp.experts", "mlp.experts.base_layer", "mlp.gate", "input_layernorm"),
    *("mlp.experts.base_layer.base_layer", "block_sparse_moe.experts.0.w1", ""),
]
ENDS = [
    *(".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B"),
    *(".lora_B.bias", ".lora_A.bias", ".weight", ".bias", ""),
]
TENSORS = st.dictionaries(
    st.tuples(st.sampled_from(MODULES), st.sampled_from(ENDS)),
    st.lists(st.sampled_from([0, 4, 16, 64, 96, 192]), max_size=3).map(tuple),
    min_size=1,
    max_size=5,
)


@given(TENSORS, st.lists(st.sampled_from(["down_proj", "gate_up_proj", "weight", ""])))
@settings(max_examples=200, deadline=None)
def test_whatever_an_adapter_holds_it_is_found_or_refused_by_an_error_of_ours(
    tensors: dict[tuple[str, str], Shape], targets: list[str]
) -> None:
    shapes = {f"{LAYER}{module}{end}": shape for (module, end), shape in tensors.items()}
    with contextlib.suppress(RaymoeError):
        assert changes(shapes, target_parameters=targets)


def test_a_matrix_that_two_tensors_change_is_refused() -> None:
    stacked = factors(f"{LAYER}mlp.experts", 64, 96, 16)
    single = factors(f"{LAYER}block_sparse_moe.experts.1.w2", 64, 96)
    with pytest.raises(CheckpointError, match="another tensor changes too"):
        changes(stacked | single, target_parameters=["experts.down_proj"])


def test_parts_of_images_are_not_read() -> None:
    outer, variants = WRAPPER_FAMILIES["qwen3_vl_moe"]
    spec = ModelSpec.from_config({"model_type": "qwen3_vl_moe", **outer, **variants["plain"]})
    query = spec.layers[0].attention
    rows = query.num_heads * query.head_dim
    text = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    images = factors("base_model.model.model.visual.blocks.0.attn.qkv", 48, 16)
    found = changes(factors(text, rows, spec.hidden_size) | images, spec)
    assert list(found) == ["model.layers.0.self_attn.q_proj.weight"]


def test_a_head_that_was_tied_is_its_own_where_one_of_both_changes() -> None:
    tied = ModelSpec.from_config(CONFIG | {"tie_word_embeddings": True}, "tied")
    config = AdapterConfig.of({"peft_type": "LORA", "r": 4, "lora_alpha": 8}, "a.json")
    assert adapted_model(tied, config, ["model.norm.weight"]).tie_word_embeddings
    for name in (EMBEDDING, HEAD):
        assert not adapted_model(tied, config, [name]).tie_word_embeddings
    keeps = AdapterConfig.of(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "ensure_weight_tying": True}, "a.json"
    )
    with pytest.raises(UnsupportedModelError, match="ensure_weight_tying"):
        adapted_model(tied, keeps, [HEAD])
