"""Names under which the families store their weights, as the published checkpoints have them."""

import math
import re
from collections.abc import Sequence

import pytest

from raymoe.errors import CheckpointError
from raymoe.memory.checkpoint import Checkpoint
from raymoe.specs.families import FAMILIES
from raymoe.specs.families.stored_names import NAMINGS
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.weight_names import Location, locate_weights, model_weights
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.hybrid_families import AS_PUBLISHED

LAYER = "model.layers.1."
EXPERT = f"{LAYER}mlp.experts.2."
# Family -> canonical name -> where the index of a published checkpoint has it.
PUBLISHED = {
    "mixtral": {  # mistralai/Mixtral-8x7B-v0.1
        f"{EXPERT}up_proj.weight": Location(f"{LAYER}block_sparse_moe.experts.2.w3.weight"),
        f"{LAYER}mlp.gate.weight": Location(f"{LAYER}block_sparse_moe.gate.weight"),
    },
    "phimoe": {  # microsoft/Phi-3.5-MoE-instruct
        f"{EXPERT}down_proj.weight": Location(f"{LAYER}block_sparse_moe.experts.2.w2.weight"),
        f"{LAYER}input_layernorm.bias": Location(f"{LAYER}input_layernorm.bias"),
    },
    "minimax_m2": {  # MiniMaxAI/MiniMax-M2
        f"{EXPERT}gate_proj.weight": Location(f"{LAYER}block_sparse_moe.experts.2.w1.weight"),
        f"{LAYER}mlp.gate.e_score_correction_bias": Location(
            f"{LAYER}block_sparse_moe.e_score_correction_bias"
        ),
    },
    "glm4_moe": {  # zai-org/GLM-4.5-Air
        f"{LAYER}mlp.shared_expert.up_proj.weight": Location(
            f"{LAYER}mlp.shared_experts.up_proj.weight"
        ),
        f"{LAYER}mlp.gate.e_score_correction_bias": Location(
            f"{LAYER}mlp.gate.e_score_correction_bias"
        ),
    },
    "ernie4_5_moe": {  # baidu/ERNIE-4.5-21B-A3B-PT
        f"{LAYER}mlp.gate.e_score_correction_bias": Location(
            f"{LAYER}mlp.moe_statics.e_score_correction_bias", shape=(6,)
        ),
    },
    "hunyuan_v1_moe": {  # tencent/Hunyuan-A13B-Instruct
        f"{LAYER}mlp.gate.weight": Location(f"{LAYER}mlp.gate.wg.weight"),
        f"{LAYER}self_attn.q_norm.weight": Location(f"{LAYER}self_attn.query_layernorm.weight"),
        f"{LAYER}mlp.shared_expert.down_proj.weight": Location(
            f"{LAYER}mlp.shared_mlp.down_proj.weight"
        ),
    },
    "granitemoe": {  # ibm-granite/granite-3.1-3b-a800m-instruct
        f"{LAYER}mlp.gate.weight": Location(f"{LAYER}block_sparse_moe.router.layer.weight"),
        f"{EXPERT}up_proj.weight": Location(
            f"{LAYER}block_sparse_moe.input_linear.weight", expert=2, rows=(56, 112, 1)
        ),
    },
    "granitemoehybrid": {  # ibm-granite/granite-4.0-h-tiny
        f"{LAYER}linear_attn.k_proj.weight": Location(
            f"{LAYER}mamba.in_proj.weight", rows=(192, 208, 1)
        ),
        f"{LAYER}linear_attn.o_proj.weight": Location(f"{LAYER}mamba.out_proj.weight"),
        f"{LAYER}linear_attn.v_conv.bias": Location(f"{LAYER}mamba.conv1d.bias", rows=(0, 96, 1)),
    },
    "nemotron_h": {  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
        "model.layers.0.linear_attn.k_proj.weight": Location(
            "backbone.layers.0.mixer.in_proj.weight", rows=(64, 96, 1)
        ),
        "model.layers.1.linear_attn.D": Location("backbone.layers.2.mixer.D"),
        "model.layers.2.mlp.experts.3.up_proj.weight": Location(
            "backbone.layers.4.mixer.experts.3.up_proj.weight"
        ),
        "model.layers.3.post_attention_layernorm.weight": Location("backbone.layers.6.norm.weight"),
        "model.layers.3.mlp.down_proj.weight": Location("backbone.layers.6.mixer.down_proj.weight"),
        "model.norm.weight": Location("backbone.norm_f.weight"),
    },
    "kimi_linear": {  # moonshotai/Kimi-Linear-48B-A3B-Instruct
        f"{LAYER}linear_attn.k_conv.weight": Location(f"{LAYER}self_attn.k_conv1d.weight"),
        f"{LAYER}linear_attn.A_log": Location(f"{LAYER}self_attn.A_log", shape=(4,)),
        f"{LAYER}linear_attn.f_b_proj.weight": Location(f"{LAYER}self_attn.f_b_proj.weight"),
        f"{EXPERT}up_proj.weight": Location(f"{LAYER}block_sparse_moe.experts.2.w3.weight"),
        f"{LAYER}mlp.gate.e_score_correction_bias": Location(
            f"{LAYER}block_sparse_moe.gate.e_score_correction_bias"
        ),
    },
    "bailing_hybrid": {  # inclusionAI/Ling-3.0-flash
        "model.embed_tokens.weight": Location("model.word_embeddings.weight"),
        f"{LAYER}linear_attn.k_conv.weight": Location(f"{LAYER}attention.k_conv1d.weight"),
        f"{LAYER}linear_attn.a_proj.weight": Location(f"{LAYER}attention.f_proj.weight"),
        f"{LAYER}linear_attn.norm.weight": Location(f"{LAYER}attention.o_norm.weight"),
        f"{LAYER}linear_attn.A_log": Location(f"{LAYER}attention.A_log"),
        "model.layers.2.self_attn.g_proj.weight": Location(
            "model.layers.2.attention.g_proj.weight"
        ),
        "model.layers.2.self_attn.o_proj.weight": Location("model.layers.2.attention.dense.weight"),
        f"{LAYER}mlp.gate.e_score_correction_bias": Location(f"{LAYER}mlp.gate.expert_bias"),
        f"{LAYER}mlp.shared_expert.up_proj.weight": Location(
            f"{LAYER}mlp.shared_experts.up_proj.weight"
        ),
    },
    "gpt_oss": {  # openai/gpt-oss-20b, but for its quantised experts
        f"{LAYER}mlp.gate.bias": Location(f"{LAYER}mlp.router.bias"),
        f"{LAYER}self_attn.sinks": Location(f"{LAYER}self_attn.sinks"),
        f"{EXPERT}up_proj.bias": Location(
            f"{LAYER}mlp.experts.gate_up_proj_bias", expert=2, rows=(1, 112, 2)
        ),
        f"{EXPERT}up_proj.weight": Location(
            f"{LAYER}mlp.experts.gate_up_proj", expert=2, is_transposed=True, rows=(1, 112, 2)
        ),
    },
    "dbrx": {  # databricks/dbrx-instruct
        f"{LAYER}self_attn.v_proj.weight": Location(
            "transformer.blocks.1.norm_attn_norm.attn.Wqkv.weight", rows=(64, 80, 1)
        ),
        f"{EXPERT}gate_proj.weight": Location(
            "transformer.blocks.1.ffn.experts.mlp.w1", shape=(4, 56, 48), expert=2
        ),
        f"{EXPERT}down_proj.weight": Location(
            "transformer.blocks.1.ffn.experts.mlp.w2",
            shape=(4, 56, 48),
            expert=2,
            is_transposed=True,
        ),
        "model.norm.weight": Location("transformer.norm_f.weight"),
    },
}
# Families of today -> expressions that turn canonical names into those of a published checkpoint.
_ROUTER_BIAS = (r"mlp\.gate\.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias")
TODAY: dict[str, tuple[tuple[str, str], ...]] = {
    "minimax_m3_vl": (  # nvidia/MiniMax-M3-NVFP4, quantized_layers
        (r"^(model\.|lm_head\.)", r"language_model.\1"),
        (r"self_attn\.indexer\.", "self_attn.index_"),
        _ROUTER_BIAS,
        (r"mlp\.gate\.", "block_sparse_moe.gate."),
        (r"mlp\.shared_expert\.", "block_sparse_moe.shared_experts."),
        (r"mlp\.(experts\.\d+\.)gate_proj", r"block_sparse_moe.\1w1"),
        (r"mlp\.(experts\.\d+\.)up_proj", r"block_sparse_moe.\1w3"),
        (r"mlp\.(experts\.\d+\.)down_proj", r"block_sparse_moe.\1w2"),
    ),
    "mimo_v2_flash": ((r"self_attn\.sinks", "self_attn.attention_sink_bias"),),
    "bailing_hybrid": (  # inclusionAI/Ling-3.0-flash, as vLLM reads it
        (r"^model\.embed_tokens\.", "model.word_embeddings."),
        (r"linear_attn\.a_proj\.", "attention.f_proj."),
        (r"linear_attn\.norm\.", "attention.o_norm."),
        (r"linear_attn\.([qkv])_conv\.", r"attention.\1_conv1d."),
        (r"linear_attn\.", "attention."),
        (r"self_attn\.o_proj\.", "attention.dense."),
        (r"self_attn\.", "attention."),
        (r"mlp\.gate\.e_score_correction_bias", "mlp.gate.expert_bias"),
        (r"mlp\.shared_expert\.", "mlp.shared_experts."),
    ),
    "deepseek_v4": (  # deepseek-ai/DeepSeek-V4-Flash
        (r"^model\.embed_tokens\.", "embed."),
        (r"^model\.", ""),
        (r"^lm_head\.", "head."),
        (r"merge_mixer\.weight", "hc_head_fn"),
        (r"merge_mixer\.", "hc_head_"),
        (r"attention_mixer\.", "hc_attn_"),
        (r"ffn_mixer\.", "hc_ffn_"),
        (r"(hc_\w+_)weight", r"\1fn"),
        (r"input_layernorm\.", "attn_norm."),
        (r"post_attention_layernorm\.", "ffn_norm."),
        (r"self_attn\.indexer\.(kv|gate)_", r"self_attn.indexer.compressor.\1_"),
        (r"self_attn\.indexer\.position", r"self_attn.indexer.compressor.position"),
        (r"compressor\.(kv|gate)_proj", r"compressor.w\1"),
        (r"compressor\.kv_norm", "compressor.norm"),
        (r"position_bias", "ape"),
        (r"self_attn\.q_([ab])_proj", r"self_attn.wq_\1"),
        (r"self_attn\.kv_proj", "self_attn.wkv"),
        (r"self_attn\.q_a_norm", "self_attn.q_norm"),
        (r"self_attn\.o_a_proj", "self_attn.wo_a"),
        (r"self_attn\.o_proj", "self_attn.wo_b"),
        (r"self_attn\.sinks", "self_attn.attn_sink"),
        (r"self_attn\.", "attn."),
        (r"mlp\.gate\.e_score_correction_bias", "ffn.gate.bias"),
        (r"mlp\.shared_expert\.", "mlp.shared_experts."),
        (r"(experts\.(?:\d+\.)?)gate_proj", r"\1w1"),
        (r"(experts\.(?:\d+\.)?)down_proj", r"\1w2"),
        (r"(experts\.(?:\d+\.)?)up_proj", r"\1w3"),
        (r"mlp\.", "ffn."),
    ),
    "step3p7": (  # stepfun-ai/Step-3.7-Flash, before it had a wrapper Step-3.5-Flash
        (r"mlp\.gate\.e_score_correction_bias", "moe.router_bias"),
        (r"mlp\.gate\.", "moe.gate."),
        (r"mlp\.shared_expert\.", "share_expert."),
        (r"mlp\.experts\.\d+\.", "moe."),
    ),
    "gemma4": (  # google/gemma-4-26B-A4B
        (r"^model\.", "model.language_model."),
        (r"mlp\.shared_expert\.", "mlp."),
        (r"mlp\.shared_result_norm\.", "post_feedforward_layernorm_1."),
        (r"mlp\.experts_input_norm\.", "pre_feedforward_layernorm_2."),
        (r"mlp\.experts_result_norm\.", "post_feedforward_layernorm_2."),
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"attention_result_norm\.", "post_attention_layernorm."),
        (r"ffn_result_norm\.", "post_feedforward_layernorm."),
        (r"mlp\.gate\.weight", "router.proj.weight"),
        (r"mlp\.gate\.input_norm\.weight", "router.scale"),
        (r"mlp\.gate\.expert_scales", "router.per_expert_scale"),
        (r"mlp\.experts\.", "experts."),  # as in nvidia/Gemma-4-26B-A4B-NVFP4
    ),
}


def as_published(family: str) -> tuple[ModelSpec, dict[str, tuple[int, ...]], dict[str, str]]:
    """A tiny model, the tensors of its published checkpoint, and their names by canonical ones."""
    own = [c for c in CONFIGURATIONS if c.family == family]
    fields = next((c for c in own if c.name.endswith(AS_PUBLISHED)), own[0]).fields
    spec = ModelSpec.from_config({**fields, "model_type": family})
    stored, names = {}, {}
    for name, shape in model_weights(spec).items():
        theirs = name
        for ours, replacement in TODAY[family]:
            theirs = re.sub(ours, replacement, theirs)
        is_stacked = ".experts." in name and not re.search(r"experts\.\d", theirs)
        stored[theirs] = (6, *shape) if is_stacked else shape
        names[name] = theirs
    return spec, stored, names


@pytest.mark.parametrize("family", TODAY)
def test_tensors_of_a_published_checkpoint_are_found_and_all_used(family: str) -> None:
    spec, stored, names = as_published(family)
    assert {name: found.name for name, found in locate(spec, stored).items()} == names


# Shapes of the tensors of moonshotai/Kimi-Linear-48B-A3B-Instruct in layers with a state, with full
# attention, with a dense network and with experts.
KIMI_DELTA = {
    **{f"{part}_proj.weight": (4096, 2304) for part in "qkv"},
    **{f"{part}_conv1d.weight": (4096, 1, 4) for part in "qkv"},
    **{f"{part}_a_proj.weight": (128, 2304) for part in "fg"},
    **{f"{part}_b_proj.weight": (4096, 128) for part in "fg"},
    "A_log": (1, 1, 32, 1),
    "b_proj.weight": (32, 2304),
    "dt_bias": (4096,),
    "o_norm.weight": (128,),
    "o_proj.weight": (2304, 4096),
}
KIMI_LATENT = {
    "q_proj.weight": (6144, 2304),
    "kv_a_proj_with_mqa.weight": (576, 2304),
    "kv_a_layernorm.weight": (512,),
    "kv_b_proj.weight": (8192, 512),
    "o_proj.weight": (2304, 4096),
}


def gated(hidden: int, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    shapes = ((hidden, 2304), (2304, hidden), (hidden, 2304))
    return {f"{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def kimi_linear_tensors() -> dict[str, tuple[int, ...]]:
    plain, experts = ("gate_proj", "down_proj", "up_proj"), "block_sparse_moe.experts"
    stored: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight"), (163840, 2304)),
        "model.norm.weight": (2304,),
    }
    for i in range(27):
        attention = KIMI_LATENT if i in (3, 7, 11, 15, 19, 23, 26) else KIMI_DELTA
        layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
        layer |= {f"{name}_layernorm.weight": (2304,) for name in ("input", "post_attention")}
        if i == 0:
            layer |= gated(9216, [f"mlp.{part}" for part in plain])
        else:
            layer |= gated(1024, [f"block_sparse_moe.shared_experts.{part}" for part in plain])
            layer |= {"block_sparse_moe.gate.weight": (256, 2304)}
            layer |= {"block_sparse_moe.gate.e_score_correction_bias": (256,)}
            for expert in range(256):
                layer |= gated(1024, [f"{experts}.{expert}.w{part}" for part in (1, 2, 3)])
        stored |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return stored


def test_all_tensors_of_kimi_linear_are_found_and_used() -> None:
    stored, model = kimi_linear_tensors(), model_preset("kimi-linear-48b-a3b")
    assert len(stored) == 20_493
    assert sum(map(math.prod, stored.values())) == model.num_parameters == 49_122_681_728
    found = locate(model, stored)
    assert {location.name for location in found.values()} == stored.keys()


def stored_by_transformers(family: str) -> tuple[ModelSpec, dict[str, tuple[int, ...]]]:
    """A tiny model, and the tensors that `save_pretrained` writes for it."""
    directory = get_case(f"{family}: plain").directory
    return ModelSpec.from_directory(directory), Checkpoint.open(directory).shapes()


def locate(spec: ModelSpec, stored: dict[str, tuple[int, ...]]) -> dict[str, Location]:
    return locate_weights(spec, stored, dict.fromkeys(stored, "a.safetensors"))


def test_all_tensors_of_hy4_are_found_as_published() -> None:
    spec, stored = stored_by_transformers("hy_v4")
    published = {}
    for name, shape in stored.items():
        theirs = re.sub(r"hc_pre\.(hc_\w+_layer)\.hc_", r"\1.hc_pre.hc_", name)
        theirs = theirs.replace("model.hc_pre.hc_head.", "model.hc_head.")
        published[re.sub(r"(mlp\.(shared_experts\.)?)linear_gate", r"\1gate_proj", theirs)] = shape
    for name in (  # tencent/Hy4-preview
        "model.hc_head.hc_head_fn",
        f"{LAYER}hc_attn_layer.hc_pre.hc_fn",
        f"{LAYER}hc_mlp_layer.hc_pre.hc_scale",
        f"{LAYER}mlp.experts.gate_up_proj",
        f"{LAYER}mlp.shared_experts.gate_proj.weight",
        f"{LAYER}self_attn.learnable_sink_param",
        f"{LAYER}self_attn.linear_gate.weight",
    ):
        assert name in published
    unread = {"model.mtp_layers.0.eh_proj.weight": (48, 96)}
    found = locate(spec, published | unread)
    assert {location.name for location in found.values()} == published.keys()


def test_every_naming_belongs_to_a_family() -> None:
    assert NAMINGS.keys() <= FAMILIES.keys()


@pytest.mark.parametrize("family", PUBLISHED)
def test_weights_lie_where_published_checkpoints_have_them(family: str) -> None:
    locations = locate(*stored_by_transformers(family))
    for name, location in PUBLISHED[family].items():
        assert locations[name] == location


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_transformers_writes_is_used_to_the_last_tensor(family: str) -> None:
    spec, stored = stored_by_transformers(family)
    assert {location.name for location in locate(spec, stored).values()} == stored.keys()


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_stored_tensor_of_another_shape_is_refused(family: str) -> None:
    spec, stored = stored_by_transformers(family)
    for name in {location.name for location in PUBLISHED[family].values()}:
        wrong = stored | {name: (*stored[name][:-1], stored[name][-1] + 1)}
        with pytest.raises(CheckpointError, match=f"{name}.*has shape"):
            locate(spec, wrong)


PREDICTOR = "model.layers.3.eh_proj.weight"


def test_a_layer_that_predicts_a_second_token_is_left_out() -> None:
    spec, stored = stored_by_transformers("glm4_moe")
    extra = {"model.layers.3.input_layernorm.weight": (48,), PREDICTOR: (48, 96)}
    assert locate(spec, stored | extra) == locate(spec, stored)
    del extra[PREDICTOR]
    with pytest.raises(CheckpointError, match="belongs to nothing"):
        locate(spec, stored | extra)
    with pytest.raises(CheckpointError, match="belongs to nothing"):
        locate(spec, stored | {"model.layers.2.eh_proj.weight": (48, 96)})


def test_modules_that_predict_a_second_token_are_left_out() -> None:
    spec, stored = stored_by_transformers("ernie4_5_moe")
    assert locate(spec, stored | {"model.mtp_block.0.mlp.up_proj.weight": (9, 9)})


def test_a_missing_tensor_is_named_as_the_family_names_it() -> None:
    spec, stored = stored_by_transformers("gpt_oss")
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    del stored[name]
    with pytest.raises(CheckpointError, match=f"{name}.*112.* is missing.*experts.0.gate_proj"):
        locate(spec, stored)
