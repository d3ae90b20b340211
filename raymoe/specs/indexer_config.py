"""Derive what selects positions in long contexts from a configuration."""

from dataclasses import replace
from typing import Any

from raymoe.errors import UnsupportedModelError
from raymoe.specs.attention.grouped import AttentionSpec, BlockIndexerSpec, PooledIndexerSpec
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.attention.latent import IndexerSpec, LatentAttentionSpec
from raymoe.specs.config import ConfigFields
from raymoe.specs.families.rules import PooledIndexerRule, SharingRule
from raymoe.specs.rope import RopeSpec

FULL, SHARED = "full", "shared"
KEY_MULTIPLE = 8  # of the elements of an index key


def layer_indexers(
    fields: ConfigFields, attention: LatentAttentionSpec, num_layers: int
) -> tuple[IndexerSpec | None, ...]:
    """The indexer of each layer; None in families that attend to all positions.

    Raises:
        UnsupportedModelError: Something is not implemented, or a layer shares the choice of none.
    """
    rule = fields.family.indexer
    if rule is None:
        return (None,) * num_layers
    head_dim = fields.positive(rule.head_dim)
    if head_dim % KEY_MULTIPLE or head_dim < attention.rope_head_dim:
        raise UnsupportedModelError(
            f"{rule.head_dim} is {head_dim}; supported: multiples of {KEY_MULTIPLE}, at least the "
            f"{attention.rope_head_dim} dimensions that are rotated"
        )
    if attention.q_lora_rank is None:
        raise UnsupportedModelError(
            "q_lora_rank is null; index queries come from the latent of the queries"
        )
    own = IndexerSpec(
        num_heads=fields.positive(rule.num_heads),
        head_dim=head_dim,
        top_k=fields.positive(rule.top_k),
        is_interleaved=rule.is_interleaved,
        pool=None if rule.pool is None else _pool(fields, rule.pool, rule.top_k),
        rotates_end=rule.rotates_end,
        key_norm_eps=fields.number_or(rule.key_norm_eps),
    )
    shared = replace(own, is_shared=True)
    return tuple(
        shared if kind == SHARED else own for kind in _kinds(fields, rule.sharing, num_layers)
    )


def _pool(fields: ConfigFields, name: str, top_k: str) -> int:
    pool = fields.positive(name)
    if KV_BLOCK_TOKENS % pool or fields.positive(top_k) % pool:
        raise UnsupportedModelError(
            f"{name} is {pool}; supported: divisors of {KV_BLOCK_TOKENS} and of {top_k} "
            f"({fields.get(top_k)})"
        )
    return pool


def _kinds(fields: ConfigFields, rule: SharingRule | None, num_layers: int) -> list[str]:
    if rule is None:
        return [FULL] * num_layers
    kinds: Any = fields.get(rule.types)
    if kinds is None:
        kinds = _patterned(fields, rule, num_layers)
    is_list = isinstance(kinds, list | tuple) and len(kinds) == num_layers
    if not is_list or any(kind not in (FULL, SHARED) for kind in kinds) or kinds[0] != FULL:
        raise UnsupportedModelError(
            f"{rule.types} = {kinds!r:.200} is not supported; supported: {FULL} or {SHARED} for "
            f"each of {num_layers} layers, {FULL} for the first"
        )
    return list(kinds)


def _patterned(fields: ConfigFields, rule: SharingRule, num_layers: int) -> Any:
    """What transformers derives where the kinds are not listed."""
    pattern = fields.get(rule.pattern)
    if isinstance(pattern, str):
        letters = {"F": FULL, "S": SHARED}
        return [letters.get(letter, letter) for letter in pattern]
    if pattern is not None:
        return pattern
    step, offset = fields.natural(rule.step), fields.natural(rule.offset)
    return [
        FULL if max(i - offset + 1, 0) % max(step, 1) == 0 else SHARED for i in range(num_layers)
    ]


def block_indexers(
    fields: ConfigFields, attention: AttentionSpec | LatentAttentionSpec, num_layers: int
) -> tuple[BlockIndexerSpec | PooledIndexerSpec | None, ...]:
    """What chooses blocks of positions in each layer; None where all positions are attended to.

    Raises:
        UnsupportedModelError: Something is not implemented.
    """
    rule = fields.family.blocks
    if rule is None:
        return (None,) * num_layers
    assert isinstance(attention, AttentionSpec), "no family with latent attention chooses blocks"
    if isinstance(rule, PooledIndexerRule):
        return (_pooled_indexer(fields, rule),) * num_layers
    kinds = fields.layer_types
    chooses = fields.by_layer(rule.marks) if kinds is None else None
    if isinstance(kinds, list | tuple):
        chooses = [kind == rule.layer_type for kind in kinds]
    if chooses is None or not any(chooses):
        return (None,) * num_layers
    spec = BlockIndexerSpec(
        num_heads=fields.positive(rule.num_heads),
        head_dim=fields.positive(rule.head_dim),
        block_tokens=fields.positive(rule.block_tokens),
        top_k=fields.positive(rule.top_k),
        num_local=fields.natural(rule.num_local),
    )
    if spec.head_dim % KEY_MULTIPLE:
        raise UnsupportedModelError(
            f"{rule.head_dim} is {spec.head_dim}; supported: multiples of {KEY_MULTIPLE}"
        )
    if spec.num_heads != attention.num_kv_heads:
        raise UnsupportedModelError(
            f"{rule.num_heads} is {spec.num_heads}; supported: as many as KV heads "
            f"({attention.num_kv_heads})"
        )
    if spec.block_tokens % KV_BLOCK_TOKENS:
        raise UnsupportedModelError(
            f"{rule.block_tokens} is {spec.block_tokens}; supported: multiples of {KV_BLOCK_TOKENS}"
        )
    if not 1 <= spec.num_local <= spec.top_k:
        raise UnsupportedModelError(
            f"{rule.num_local} is {spec.num_local}; supported: 1 to {rule.top_k} ({spec.top_k}), "
            "so that a token sees its own block"
        )
    return tuple(spec if is_sparse else None for is_sparse in chooses)


def _pooled_indexer(fields: ConfigFields, rule: PooledIndexerRule) -> PooledIndexerSpec:
    block_tokens = fields.positive(rule.block_tokens)
    if block_tokens == 1 or KV_BLOCK_TOKENS % block_tokens:
        raise UnsupportedModelError(
            f"{rule.block_tokens} is {block_tokens}; supported: divisors of {KV_BLOCK_TOKENS} from "
            "2 on"
        )
    chosen_tokens = fields.positive(rule.chosen_tokens)
    if chosen_tokens % block_tokens:
        raise UnsupportedModelError(
            f"{rule.chosen_tokens} is {chosen_tokens}, which must be a multiple of "
            f"{rule.block_tokens} ({block_tokens})"
        )
    head_dim = fields.positive(rule.head_dim)
    if head_dim % KEY_MULTIPLE:
        raise UnsupportedModelError(
            f"{rule.head_dim} is {head_dim}; supported: multiples of {KEY_MULTIPLE}"
        )
    num_key_heads = fields.positive(rule.num_key_heads)
    if num_key_heads != 1:
        raise UnsupportedModelError(f"{rule.num_key_heads} is {num_key_heads}; supported: 1")
    return PooledIndexerSpec(
        num_heads=fields.positive(rule.num_heads),
        head_dim=head_dim,
        block_tokens=block_tokens,
        top_k=chosen_tokens // block_tokens,
    )


def check_pooled_rope(indexer: PooledIndexerSpec, rope: RopeSpec | None) -> None:
    """Check that a rope can rotate index keys.

    Raises:
        UnsupportedModelError: It cannot.
    """
    if rope is None:
        return
    if rope.rotary_dim > indexer.head_dim:
        raise UnsupportedModelError(
            f"{rope.rotary_dim} dimensions of queries are rotated; index keys have "
            f"{indexer.head_dim}"
        )
    if rope.depends_on_length:
        raise UnsupportedModelError(
            f"rope {rope.kind!r} depends on the length of a sequence; keys of blocks of tokens are "
            "rotated once"
        )
