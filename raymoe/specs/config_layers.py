"""From the fields of a configuration to the layers of a model."""

from dataclasses import replace

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.config_fields import ConfigFields
from raymoe.specs.family import MoeRule, RouterRule
from raymoe.specs.layer_patterns import layer_windows, sparse_layers
from raymoe.specs.layers import (
    AttentionSpec,
    ClampSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoeSpec,
    RouterSpec,
    SharedSpec,
)

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
HEAD_DIM_MULTIPLE = 8
# Ten times what anybody has published: a configuration is not trusted with our memory.
MAX_LAYERS, MAX_EXPERTS = 1024, 4096
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17  # five times what anybody has
# Of the norms of the latents, in every class of transformers with latent attention: the default of
# their RMSNorm, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def parse_layers(
    fields: ConfigFields, attention: AttentionSpec | LatentAttentionSpec
) -> tuple[LayerSpec, ...]:
    """All layers, with the windows and the experts that each of them has.

    Args:
        fields: Of the configuration.
        attention: Of every layer, without a window.
    """
    num_layers = fields.positive("num_hidden_layers", maximum=MAX_LAYERS)
    windows = layer_windows(fields, num_layers)
    variants = {window: _with_window(attention, window) for window in set(windows)}
    dense, moe, rule = _dense(fields), _moe(fields), fields.family.moe
    sparse = [False] * num_layers
    if moe is not None and rule is not None:
        sparse = sparse_layers(fields, rule.sparse_layers, num_layers)
        num_experts = sum(sparse) * moe.num_experts
        if num_experts > MAX_EXPERTS_OF_ALL_LAYERS:
            raise ConfigError(
                f"{sum(sparse)} layers with {moe.num_experts} experts are {num_experts} experts; "
                f"at most {MAX_EXPERTS_OF_ALL_LAYERS} are supported"
            )
    return tuple(
        LayerSpec(
            attention=variants[window],
            ffn=moe if is_sparse and moe is not None else dense,
            has_norm_bias=fields.family.has_norm_bias,
        )
        for window, is_sparse in zip(windows, sparse, strict=True)
    )


def parse_attention(fields: ConfigFields) -> AttentionSpec:
    """Grouped-query attention of a layer without a window."""
    family = fields.family
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive_or_none("num_key_value_heads") or num_heads
    hidden_size = fields.positive("hidden_size")
    head_dim = fields.positive_or_none("head_dim") or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    if head_dim % HEAD_DIM_MULTIPLE or head_dim < HEAD_DIM_MULTIPLE:
        raise UnsupportedModelError(
            f"head_dim is {head_dim}; supported: multiples of {HEAD_DIM_MULTIPLE}"
        )
    if family.needs_full_width and num_heads * head_dim != hidden_size:
        raise UnsupportedModelError(
            f"head_dim {head_dim} x {num_heads} heads is not hidden_size {hidden_size}: "
            "the norm over the full width of this family needs them equal"
        )
    has_norm = family.qk_norm_switch is None or fields.boolean(family.qk_norm_switch)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if family.scale is None else fields.number(family.scale),
        qkv_bias=fields.switch(family.qkv_bias),
        output_bias=fields.switch(family.output_bias),
        qk_norm=family.qk_norm if has_norm else "none",
        is_norm_after_rope=family.is_norm_after_rope,
        clip_qkv=fields.number("clip_qkv") if fields.has("clip_qkv") else None,
        has_sinks=family.has_sinks,
    )


def parse_latent_attention(fields: ConfigFields) -> LatentAttentionSpec:
    """Latent attention; the rope may stretch the scale (`RopeSpec.scale_factor`)."""
    num_heads = fields.positive("num_attention_heads")
    nope, rope = fields.positive("qk_nope_head_dim"), fields.positive("qk_rope_head_dim")
    # What transformers derives from the other fields, and writes.
    derived = {"num_key_value_heads": num_heads, "head_dim": rope, "qk_head_dim": nope + rope}
    for name, value in derived.items():
        if name in fields.family.ignored:
            continue
        if fields.has(name) and fields.positive(name) != value:
            raise ConfigError(
                f"{name} is {fields.get(name)!r}; with latent attention of this configuration it "
                f"must be {value}"
            )
    return LatentAttentionSpec(
        num_heads=num_heads,
        q_lora_rank=fields.positive_or_none("q_lora_rank"),
        kv_lora_rank=fields.positive("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=fields.positive("v_head_dim"),
        scale=(nope + rope) ** -0.5,
        norm_eps=LATENT_NORM_EPS,
        has_bias=fields.switch(fields.family.qkv_bias),
    )


def _with_window(
    attention: AttentionSpec | LatentAttentionSpec, window: int | None
) -> AttentionSpec | LatentAttentionSpec:
    if isinstance(attention, LatentAttentionSpec):
        assert window is None, "no family with latent attention has windows"
        return attention
    return replace(attention, sliding_window=window)


def _dense(fields: ConfigFields) -> DenseSpec:
    return DenseSpec(
        hidden=fields.positive("intermediate_size"),
        activation=_activation(fields),
        has_bias=fields.switch(fields.family.mlp_bias),
    )


def _moe(fields: ConfigFields) -> MoeSpec | None:
    rule = fields.family.moe
    if rule is None:
        return None
    num_experts = fields.natural(rule.num_experts, maximum=MAX_EXPERTS)
    if num_experts == 0:
        return None
    top_k = fields.uniform(rule.top_k)
    router = _router(fields, rule.router, num_experts)
    choice = num_experts // router.num_groups * router.top_groups
    if top_k > choice:
        raise ConfigError(f"{rule.top_k} is {top_k}, but there are {choice} experts to choose from")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        expert_hidden=fields.positive(rule.expert_hidden),
        activation=_activation(fields),
        router=router,
        has_bias=rule.has_bias,
        clamp=_clamp(fields, rule),
        shared=_shared(fields, rule),
    )


def _router(fields: ConfigFields, rule: RouterRule, num_experts: int) -> RouterSpec:
    router = RouterSpec(
        scoring=rule.scoring,
        renormalize=fields.switch(rule.renormalize),
        min_weight_sum=fields.number_or(rule.min_weight_sum),
        scale=fields.number_or(rule.scale),
        has_bias=rule.has_bias,
        has_selection_bias=rule.has_selection_bias,
        jitter=fields.number_or(rule.jitter),
    )
    if rule.group_score is None or not _has_groups(fields, rule):
        return router
    num_groups, top_groups = fields.positive("n_group"), fields.positive("topk_group")
    smallest = 2 if rule.group_score == "top2_sum" else 1
    if num_experts % num_groups or num_experts // num_groups < smallest or top_groups > num_groups:
        raise ConfigError(
            f"n_group is {num_groups} and topk_group {top_groups}; {num_experts} experts cannot be "
            f"divided in groups of at least {smallest} like that"
        )
    if num_groups == 1:
        return router
    return replace(
        router, num_groups=num_groups, top_groups=top_groups, group_score=rule.group_score
    )


def _has_groups(fields: ConfigFields, rule: RouterRule) -> bool:
    if rule.groups_switch is None:
        return True
    name, on, off = rule.groups_switch
    value = fields.get(name)
    if value not in (on, off):
        raise UnsupportedModelError(f"{name} = {value!r} is not supported; supported: {on}, {off}")
    return value == on


def _shared(fields: ConfigFields, rule: MoeRule) -> SharedSpec | None:
    if rule.shared is None:
        return None
    count = 1 if rule.shared.count is None else fields.natural(rule.shared.count)
    if count == 0:
        return None
    return SharedSpec(
        hidden=count * fields.positive(rule.shared.hidden),
        is_gated=rule.shared.is_gated,
        has_bias=fields.switch(fields.family.mlp_bias),
    )


def _clamp(fields: ConfigFields, rule: MoeRule) -> ClampSpec | None:
    if rule.clamp is None:
        return None
    if _activation(fields) != "silu":
        raise UnsupportedModelError(
            f"hidden_act = {fields.get('hidden_act')!r} is not supported for clamped experts; "
            "supported: silu"
        )
    gain, limit = rule.clamp
    return ClampSpec(gain=fields.number(gain), limit=fields.number(limit))


def _activation(fields: ConfigFields) -> str:
    name = fields.get("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act = {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
