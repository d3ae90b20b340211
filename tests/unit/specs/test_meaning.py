"""What the fields of a spec mean: plain formulas over them against the modules of transformers."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.gpt_oss import modeling_gpt_oss

from raymoe.specs.layers import ClampSpec, MoeSpec, RouterSpec
from raymoe.specs.model import ModelSpec
from tests.reference import SCORES
from tests.unit.specs.config_classes import NEEDED, config_of, written

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24}
ROUTED = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
ROUTED |= {"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 0}
ROUTED |= {"routed_scaling_factor": 1.7}
LATENT = SIZES | ROUTED | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 50}
DBRX |= {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 2}}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 greedy": ("deepseek_v2", LATENT),
    "v2 groups": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
    "v3": ("deepseek_v3", LATENT),
    "v3 as they are": ("deepseek_v3", LATENT | {"norm_topk_prob": False}),
    "kimi": ("deepseek_v3", LATENT | {"n_group": 1, "topk_group": 1}),
    "glm lite": ("glm4_moe_lite", LATENT | {"first_k_dense_replace": 1}),
    "glm": ("glm4_moe", GROUPED | ROUTED),
    "dots": ("dots1", GROUPED | ROUTED),
    "minimax": ("minimax_m2", GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "ernie": (
        "ernie4_5_moe",
        GROUPED | {"moe_intermediate_size": 16, "moe_num_experts": 8, "moe_layer_start_index": 0},
    ),
    "ernie floor": (
        "ernie4_5_moe",
        GROUPED
        | {"moe_intermediate_size": 16, "moe_num_experts": 8, "moe_layer_start_index": 0}
        | {"moe_k": 2, "moe_norm_min": 0.9},
    ),
    "hunyuan": ("hunyuan_v1_moe", GROUPED | {"num_experts": 6, "moe_topk": 2}),
    "granite": ("granitemoe", GROUPED | {"num_local_experts": 6}),
    "gpt-oss": ("gpt_oss", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "dbrx": ("dbrx", DBRX),
    "kolibri": (
        "kolibri1",
        GROUPED
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16, "norm_topk_prob": True},
    ),
}


def route(moe: MoeSpec, logits_TE: Tensor, selection_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, as `RouterSpec` says."""
    router: RouterSpec = moe.router
    scores_TE = SCORES[router.scoring](logits_TE)
    choice_TE = logits_TE if router.chooses_by_logits else scores_TE
    choice_TE = choice_TE if selection_E is None else choice_TE + selection_E
    if router.num_groups > 1:
        grouped_TGX = choice_TE.unflatten(-1, (router.num_groups, -1))
        best = 1 if router.group_score == "max" else 2
        group_TG = grouped_TGX.topk(best).values.sum(-1)
        chosen_TG = torch.zeros_like(group_TG).scatter(-1, group_TG.topk(router.top_groups)[1], 1)
        choice_TE = grouped_TGX.masked_fill(chosen_TG[..., None] == 0, -torch.inf).flatten(1)
    ids_TK = choice_TE.topk(moe.top_k).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if router.renormalize:
        sums_T1 = weights_TK.sum(-1, keepdim=True).clamp_min(router.min_weight_sum)
        sums_T1 += router.added_weight_sum
        weights_TK = weights_TK / sums_T1
    return ids_TK, weights_TK * router.scale


def theirs(family: str, model: nn.Module, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, ids and weights of the last layer's router in transformers."""
    if family == "dbrx":
        block = model.transformer.blocks[-1].ffn
        logits = block.router(hidden_TH)
        weights, ids = block.route_tokens_to_experts(logits)
        return logits, ids, weights
    layer = model.model.layers[-1]
    block = layer.block_sparse_moe if family == "granitemoe" else layer.mlp
    router = block.router if hasattr(block, "router") else block.gate
    extra = (block.e_score_correction_bias,) if family == "minimax_m2" else ()
    logits, weights, ids = router(hidden_TH, *extra)
    return logits, ids, weights


def randomise(model: nn.Module) -> Tensor | None:
    """Wide weights everywhere, and the selection bias of the last layer."""
    for tensor in model.parameters():
        tensor.data.normal_(std=0.5)
    last = None
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            last = tensor.data.normal_(std=0.3)
    return None if last is None else last.flatten()


@pytest.mark.parametrize("name", CONFIGS)
def test_routers_choose_and_weigh_as_in_transformers(name: str) -> None:
    family, fields = CONFIGS[name]
    config = config_of(family, **fields)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config)
        selection_E = randomise(model)
        logits_TE, ids_TK, weights_TK = theirs(family, model, torch.randn(64, 32))
    moe = ModelSpec.from_config(written(config)).layers[-1].ffn
    assert isinstance(moe, MoeSpec)
    assert moe.router.has_selection_bias == (selection_E is not None)
    ours = torch.zeros_like(logits_TE).scatter(1, *route(moe, logits_TE, selection_E))
    assert torch.allclose(ours, torch.zeros_like(ours).scatter(1, ids_TK, weights_TK), atol=1e-6)


def test_clamped_experts_compute_as_in_transformers() -> None:
    config = config_of("gpt_oss", **CONFIGS["gpt-oss"][1], swiglu_limit=1.5, swiglu_alpha=0.9)
    moe = ModelSpec.from_config(written(config)).layers[0].ffn
    assert isinstance(moe, MoeSpec)
    assert moe.clamp == ClampSpec(gain=0.9, limit=1.5, gate_limit=1.5, offset=1.0)
    gate, up = torch.randn(2, 40, 24) * 2
    interleaved = torch.stack([gate, up], dim=-1).flatten(-2)
    experts = modeling_gpt_oss.GptOssExperts(config)
    cut, limited = gate.clamp_max(moe.clamp.limit), up.clamp(-moe.clamp.limit, moe.clamp.limit)
    ours = (limited + 1) * cut * (moe.clamp.gain * cut).sigmoid()
    assert torch.allclose(ours, experts._apply_gate(interleaved), atol=1e-6)


def _rotated_scores(q_TD: Tensor, k_TD: Tensor, angles_TR: Tensor, *, pairs: bool) -> Tensor:
    """Scores of rotated queries and keys; pairs are neighbours, or half a head apart."""

    def rotate(x_TD: Tensor) -> Tensor:
        first, second = (x_TD[:, ::2], x_TD[:, 1::2]) if pairs else x_TD.chunk(2, -1)
        complex_TR = torch.complex(first, second) * torch.polar(
            torch.ones_like(angles_TR), angles_TR
        )
        return torch.cat([complex_TR.real, complex_TR.imag], -1)

    return rotate(q_TD) @ rotate(k_TD).T


@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "ernie4_5_moe", "glm4_moe", "gpt_oss"]
)
def test_pairs_of_the_rotation_are_those_of_transformers(family: str) -> None:
    q_TD, k_TD = torch.randn(2, 5, 8)
    angles_TR = torch.rand(5, 4) * 6
    cos, sin = angles_TR.cos().repeat(1, 2)[None], angles_TR.sin().repeat(1, 2)[None]
    q, k = q_TD[None, None], k_TD[None, None]
    if family == "deepseek_v2":
        turns = torch.polar(torch.ones_like(angles_TR), angles_TR)[None]
        q, k = modeling_deepseek_v2.apply_rotary_emb(q, k, turns)
    elif family == "gpt_oss":
        q, k = modeling_gpt_oss.apply_rotary_pos_emb(q, k, cos[..., :4], sin[..., :4])
    else:
        rotate = {
            "deepseek_v3": modeling_deepseek_v3.apply_rotary_pos_emb_interleave,
            "glm4_moe_lite": modeling_glm4_moe_lite.apply_rotary_pos_emb_interleave,
            "ernie4_5_moe": modeling_ernie4_5_moe.apply_rotary_pos_emb,
            "glm4_moe": modeling_glm4_moe.apply_rotary_pos_emb,
        }[family]
        q, k = rotate(q, k, cos, sin)
    spec = ModelSpec.from_config({"model_type": family} | NEEDED.get(family, {}))
    ours = _rotated_scores(q_TD, k_TD, angles_TR, pairs=spec.ropes[0].is_interleaved)
    assert torch.allclose(ours, q[0, 0] @ k[0, 0].T, atol=1e-5)


def test_interleaving_can_be_switched_off() -> None:
    spec = ModelSpec.from_config({"model_type": "deepseek_v3", "rope_interleave": False})
    assert not spec.ropes[0].is_interleaved
