import re
from dataclasses import replace

import pytest

from raymoe.errors import CheckpointError, UnsupportedModelError
from raymoe.specs.model import ModelSpec
from raymoe.specs.quantization import parse_quantization
from raymoe.specs.weight_format import Fp8Block
from raymoe.specs.weight_names import Location, head_names, locate_weights, model_weights
from raymoe.specs.weights import Shape

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}
MIXTRAL = ModelSpec.from_config(SIZES | {"model_type": "mixtral", "num_local_experts": 2})
GATE = "model.layers.1.mlp.experts.1.gate_proj.weight"
UP = GATE.replace("gate_proj", "up_proj")


def locate(stored: dict) -> dict[str, Location]:
    return locate_weights(MIXTRAL, stored, dict.fromkeys(stored, "a.safetensors"))


def mixtral_names(name: str) -> str:
    for new, old in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(new, old)
    return name.replace(".mlp.", ".block_sparse_moe.")


def fused(stored: dict) -> dict:
    kept = {name: shape for name, shape in stored.items() if ".experts." not in name}
    for i in range(2):
        kept[f"model.layers.{i}.mlp.experts.gate_up_proj"] = (2, 48, 16)
        kept[f"model.layers.{i}.mlp.experts.down_proj"] = (2, 16, 24)
    return kept


def test_sizes_of_all_weights_add_up_to_the_parameters() -> None:
    total = 0
    for shape in model_weights(MIXTRAL).values():
        size = 1
        for n in shape:
            size *= n
        total += size
    assert total == MIXTRAL.num_parameters


def test_canonical_names_are_found_as_they_are() -> None:
    assert locate(model_weights(MIXTRAL))[GATE] == Location(GATE)


def test_names_of_the_original_mixtral_are_found() -> None:
    stored = {mixtral_names(name): shape for name, shape in model_weights(MIXTRAL).items()}
    locations = locate(stored)
    assert locations[GATE].name == "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    assert locations["model.layers.0.mlp.gate.weight"].name.endswith("block_sparse_moe.gate.weight")


def test_experts_stored_as_one_tensor_are_found() -> None:
    locations = locate(fused(model_weights(MIXTRAL)))
    stored = "model.layers.1.mlp.experts.gate_up_proj"
    assert locations[GATE] == Location(stored, expert=1, rows=(0, 24, 1))
    assert locations[UP] == Location(stored, expert=1, rows=(24, 48, 1))


def test_names_of_several_namings_may_be_mixed_tensor_by_tensor() -> None:
    weights = model_weights(MIXTRAL)
    stored = {name: shape for name, shape in fused(weights).items() if "layers.1" not in name}
    stored |= {mixtral_names(name): weights[name] for name in weights if "layers.1" in name}
    gate = "model.layers.0.mlp.gate.weight"
    stored[mixtral_names(gate)] = stored.pop(gate)
    found = locate(stored)
    assert found[GATE].name == "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    assert found[GATE.replace("layers.1", "layers.0")].name.endswith("experts.gate_up_proj")
    assert {location.name for location in found.values()} == stored.keys()


def gemma3_names(spec: ModelSpec, prefix: str = "") -> dict:
    """What a checkpoint of Gemma-3 stores, below a prefix."""
    names = {
        "attention_result_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "ffn_result_norm": "post_feedforward_layernorm",
    }
    pattern = re.compile("|".join(names))
    return {
        prefix + pattern.sub(lambda found: names[found[0]], name): shape
        for name, shape in model_weights(spec).items()
    }


GEMMA = SIZES | {"model_type": "gemma3_text", "head_dim": 8}


def test_a_name_that_means_another_weight_elsewhere_is_never_taken_for_it() -> None:
    """Gemma norms results by post_attention_layernorm; others norm the network's inputs by it."""
    spec = ModelSpec.from_config(GEMMA)
    stored = gemma3_names(spec)
    del stored["model.layers.1.pre_feedforward_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.pre_feedforward_layernorm.*missing"):
        locate_weights(spec, stored, dict.fromkeys(stored, "a.safetensors"))


def test_an_expert_that_lies_in_two_forms_is_refused() -> None:
    both = fused(model_weights(MIXTRAL)) | {GATE: (24, 16)}
    with pytest.raises(CheckpointError, match=r"experts\.1\.gate_proj.*nothing"):
        locate(both)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_a_text_model_of_a_wrapped_family_may_have_any_prefix(prefix: str) -> None:
    spec = ModelSpec.from_config(SIZES | {"model_type": "ministral3"})
    stored = {
        name.replace("model.", prefix, 1): shape for name, shape in model_weights(spec).items()
    }
    found = locate_weights(spec, stored, dict.fromkeys(stored, "a.safetensors"))
    assert {location.name for location in found.values()} == stored.keys()


def test_a_head_beside_tied_embeddings_of_a_wrapper_is_redundant() -> None:
    config = {"model_type": "gemma3", "text_config": GEMMA, "tie_word_embeddings": True}
    spec = ModelSpec.from_config(config)
    stored = gemma3_names(spec, "language_model.")
    for head in ("lm_head.weight", "language_model.lm_head.weight"):
        assert head in head_names(spec)
        with_head = stored | {head: (10, 16)}
        assert locate_weights(spec, with_head, dict.fromkeys(with_head, "a.safetensors"))


def test_frequencies_of_old_checkpoints_are_ignored() -> None:
    stored = model_weights(MIXTRAL) | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    assert locate(stored)


@pytest.mark.parametrize("name", [GATE, "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(name: str) -> None:
    stored = model_weights(MIXTRAL)
    del stored[name]
    with pytest.raises(CheckpointError, match=f"{name}.*missing"):
        locate(stored)


def test_missing_experts_are_named_with_every_form() -> None:
    stored = {n: s for n, s in model_weights(MIXTRAL).items() if "layers.1.mlp.experts" not in n}
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj.*w1.*gate_up_proj"):
        locate(stored)


def test_experts_as_mlx_stores_them_are_told() -> None:
    stored = {n: s for n, s in model_weights(MIXTRAL).items() if ".experts." not in n}
    stored["model.layers.0.block_sparse_moe.switch_mlp.gate_proj.weight"] = (2, 24, 16)
    with pytest.raises(CheckpointError, match=r"missing.*switch_mlp.*MLX.*converted from"):
        locate(stored)


def test_a_wrong_shape_names_file_tensor_and_both_shapes() -> None:
    stored = model_weights(MIXTRAL) | {GATE: (24, 17)}
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*experts\.1.*24, 17.*24, 16"):
        locate(stored)


def test_a_tensor_that_belongs_to_nothing_is_named() -> None:
    stored = model_weights(MIXTRAL) | {"model.layers.2.input_layernorm.weight": (16,)}
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*layers\.2.*nothing"):
        locate(stored)


FP8 = ModelSpec.from_config(
    SIZES
    | {"model_type": "mixtral", "num_local_experts": 2}
    | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
)


def fp8_shapes(*, is_fused: bool) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of FP8 blocks stores, experts apart or in one tensor each."""
    stored = dict(fused(model_weights(FP8)) if is_fused else model_weights(FP8))
    for name, shape in list(stored.items()):
        is_fused_tensor = name.endswith(("gate_up_proj", "down_proj"))
        if is_fused_tensor:
            stored[f"{name}_scale_inv"] = (shape[0], 1, 1)
        elif "_proj" in name:
            stored[f"{name}_scale_inv"] = (1, 1)
    return stored


def test_the_tensors_of_a_quantised_matrix_follow_the_name_of_its_module() -> None:
    stored = fp8_shapes(is_fused=False)
    found = locate_weights(FP8, stored, dict.fromkeys(stored, "a.safetensors"))
    assert found[GATE].tensor_names() == (GATE, f"{GATE}_scale_inv")
    assert found["model.norm.weight"].tensor_names() == ("model.norm.weight",)


def test_tiles_that_hold_rows_of_two_weights_are_refused() -> None:
    """Gate and up of 24 rows each, in one tensor: the tile of 128 rows is of both."""
    stored = fp8_shapes(is_fused=True)
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj.*one entry for 128 rows.*24"):
        locate_weights(FP8, stored, dict.fromkeys(stored, "a.safetensors"))


@pytest.mark.parametrize("end", [".weight_packed", ".weight_scale", ".qweight"])
def test_codes_of_a_module_that_no_format_is_known_of_are_named(end: str) -> None:
    query = "model.layers.0.self_attn.q_proj"
    stored = model_weights(MIXTRAL) | {f"{query}{end}": (16, 1)}
    if end != ".weight_scale":
        del stored[f"{query}.weight"]
    message = f"there is '{query}{end}', and quantization_config has no such format for {query}"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        locate(stored)


@pytest.mark.parametrize("scales", [".scale", ".weight_scale_inv", ".weight_scale"])
@pytest.mark.parametrize("block", [(1, 1), (1, 1, 1, 1)])  # the second as modelopt writes them
def test_scales_of_blocks_are_found_beside_experts_in_nvfp4(scales: str, block: Shape) -> None:
    """nvidia/DeepSeek-V4-Flash-NVFP4: the experts' are called as those of blocks may be."""
    spec = replace(
        ModelSpec.from_config(
            SIZES | {"model_type": "mixtral", "num_local_experts": 2, "intermediate_size": 32}
        ),
        quantization=parse_quantization(
            {"quant_method": "fp8", "weight_block_size": [128, 128], "moe_quant_algo": "NVFP4"}
        ),
    )
    stored: dict[str, Shape] = {}
    for name, shape in model_weights(spec).items():
        module, form = name.removesuffix(".weight"), spec.format_of(name, shape)
        stored[name] = shape
        if isinstance(form, Fp8Block):
            stored[f"{module}{scales}"] = block
        elif form is not None:
            rows, columns = shape
            stored[name] = (rows, columns // 2)
            stored |= {
                f"{module}.weight_scale": (rows, columns // 16),
                f"{module}.weight_scale_2": (),
            }
    found = locate_weights(spec, stored, dict.fromkeys(stored, "a.safetensors"))
    query = found["model.layers.0.self_attn.q_proj.weight"].tensor_names()
    assert query[1] == f"model.layers.0.self_attn.q_proj{scales}"
