"""Families with attention to a window and to compressed entries, by `model_type`."""

from collections.abc import Mapping

from raymoe.specs.families.rules import (
    SHARED,
    TRAINING_FIELDS,
    ClampRule,
    CompressedRule,
    Family,
    MoeRule,
    RouterRule,
    StreamsRule,
)
from raymoe.specs.rope import RopeRule

_LIMIT = ClampRule(limit="swiglu_limit", offset=0.0)

COMPRESSED_FAMILIES: Mapping[str, Family] = {
    "deepseek_v4": Family(
        architecture="DeepseekV4ForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS,
        fixed={
            "n_shared_experts": (1,),
            "norm_topk_prob": (True,),
            "num_key_value_heads": (1,),
            "scoring_func": ("sqrtsoftplus",),
            "topk_method": ("noaux_tc", None),
        },
        rope=RopeRule(is_by_layer_type=True, is_interleaved=True),
        norm="rms_float32",
        compressed=CompressedRule(),
        streams=StreamsRule(merge="weighted"),
        clamp=_LIMIT,
        moe=MoeRule(
            num_experts="n_routed_experts",
            expert_hidden="moe_intermediate_size",
            clamp=_LIMIT,
            router=RouterRule(
                scoring="sqrtsoftplus",
                added_weight_sum=1e-20,
                scale="routed_scaling_factor",
                has_selection_bias=True,
            ),
            shared=SHARED,
        ),
    ),
}
