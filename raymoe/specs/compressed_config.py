"""Read layers with attention to compressed entries (DeepSeek-V4) from a configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.attention.compressed import CompressedAttentionSpec, EntryIndexerSpec
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS, AttentionKind
from raymoe.specs.config import ConfigFields
from raymoe.specs.families.published import BY_TOKEN, COMPRESSED, OVERLAPPING, SCORED
from raymoe.specs.families.rules import EntryIndexerRule
from raymoe.specs.files import integer
from raymoe.specs.layers import RouterSpec
from raymoe.specs.rope import SLIDING, RopeSpec

MAX_WINDOW = 4096  # rows that every sequence keeps; 32 times the published value
MAIN_ROPE, COMPRESSED_ROPE = "main", "compress"  # names of parameters


def parse_compressed(
    fields: ConfigFields,
    num_layers: int,
    parse_rope: Callable[[str, AttentionKind], RopeSpec],
) -> Sequence[tuple[CompressedAttentionSpec, RopeSpec]] | None:
    """Attention and rotation of each layer; None in other families."""
    if fields.family.compressed is None:
        return None
    kinds = fields.layer_types
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - _KINDS:
        raise UnsupportedModelError(
            f"layer_types = {kinds!r:.200} is not supported; supported: one of "
            f"{', '.join(sorted(_KINDS))} for each of {num_layers} layers"
        )
    of_kind = {}
    for kind in dict.fromkeys(kinds):
        attention = _attention(fields, kind)
        rope = MAIN_ROPE if kind == SLIDING else COMPRESSED_ROPE
        of_kind[kind] = (attention, parse_rope(rope, attention))
    return [of_kind[kind] for kind in kinds]


_KINDS = {SLIDING, OVERLAPPING, COMPRESSED}


def _attention(fields: ConfigFields, kind: str) -> CompressedAttentionSpec:
    rule = fields.family.compressed
    assert rule is not None, "its family has such layers"
    head_dim, rope_head_dim = fields.positive("head_dim"), fields.positive(rule.rope_head_dim)
    num_heads, num_groups = fields.positive("num_attention_heads"), fields.positive(rule.num_groups)
    if head_dim % 8 or rope_head_dim % 2 or rope_head_dim > head_dim:
        raise UnsupportedModelError(
            f"head_dim is {head_dim} and {rule.rope_head_dim} {rope_head_dim}; supported: a "
            "multiple of 8, and an even part of it"
        )
    if num_heads % num_groups:
        raise ConfigError(
            f"num_attention_heads is {num_heads}, not a multiple of {rule.num_groups} "
            f"({num_groups})"
        )
    return CompressedAttentionSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        rope_head_dim=rope_head_dim,
        q_lora_rank=fields.positive(rule.q_lora_rank),
        scale=head_dim**-0.5,
        norm_eps=fields.number_or(fields.family.norm_eps),
        sliding_window=fields.positive(rule.window, maximum=MAX_WINDOW),
        ratio=None if kind == SLIDING else _ratio(fields, rule.ratios, kind),
        is_overlapping=kind == OVERLAPPING,
        num_groups=num_groups,
        group_rank=fields.positive(rule.group_rank),
        indexer=_indexer(fields, rule.indexer, rope_head_dim) if kind == OVERLAPPING else None,
    )


def _ratio(fields: ConfigFields, name: str, kind: str) -> int:
    ratios = fields.get(name)
    value = ratios.get(kind) if isinstance(ratios, Mapping) else None
    ratio = integer(f"{name} of {kind}", value, minimum=1)
    if ratio % KV_BLOCK_TOKENS and KV_BLOCK_TOKENS % ratio:
        raise UnsupportedModelError(
            f"{name} of {kind} is {ratio}; supported: divisors and multiples of {KV_BLOCK_TOKENS}"
        )
    return ratio


def _indexer(fields: ConfigFields, rule: EntryIndexerRule, rope_head_dim: int) -> EntryIndexerSpec:
    head_dim = fields.positive(rule.head_dim)
    if head_dim % 8 or head_dim < rope_head_dim:
        raise UnsupportedModelError(
            f"{rule.head_dim} is {head_dim}; supported: multiples of 8, at least the "
            f"{rope_head_dim} dimensions that are rotated"
        )
    return EntryIndexerSpec(
        num_heads=fields.positive(rule.num_heads),
        head_dim=head_dim,
        top_k=fields.positive(rule.top_k),
    )


def router_of_layer(fields: ConfigFields, router: RouterSpec, i: int) -> RouterSpec:
    """The router of layer `i`, in which token ids may choose the experts."""
    rule = fields.family.compressed
    if rule is None:
        return router
    kinds = fields.by_layer(rule.networks)
    kind = None if kinds is None else kinds[i]
    if kind not in (BY_TOKEN, SCORED):
        raise UnsupportedModelError(
            f"{rule.networks}[{i}] = {kind!r} is not supported; supported: {BY_TOKEN}, {SCORED}"
        )
    if kind == SCORED:
        return router
    return replace(router, num_token_ids=fields.positive("vocab_size"), has_selection_bias=False)
