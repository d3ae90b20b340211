"""Grouped-query attention, in windows, in chunks, or to chosen blocks of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, Self

from raymoe.specs.attention.kind import (
    INDEXER,
    KV_BLOCK_TOKENS,
    OUTPUT,
    AttentionKind,
    OutputGate,
    Ranks,
    Temperature,
    TokenShapes,
    gate_weights,
    gate_width,
)
from raymoe.specs.attention.work import AttentionWork, Choice, ElementBytes
from raymoe.specs.weight_format import KV_ITEM_BYTES, KV_SCALE_BYTES
from raymoe.specs.weights import Shape, Weight, linear

# Norm of queries and keys: none; RMS per head, per head without a weight, or over the full width;
# or a layer norm per head, each with weights of its own.
QkNorm = Literal["none", "head", "unit", "full", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerSpec:
    """What selects the blocks that a token attends to, once it sees more than `top_k`.

    An index key is cached for each token. Each index head chooses for the query heads of one KV
    head: a block's score is the largest product of its query with a key in it that the token sees.
    The token's own block and those before it, `num_local` in all, come first. Equal scores go to
    the lower block.

    Source: MiniMax-M3 in transformers 5.24 (2026).
    """

    num_heads: int
    head_dim: int
    block_tokens: int
    top_k: int
    num_local: int

    @property
    def num_seen(self) -> int:
        """The longest context all of which a token sees."""
        return self.top_k * self.block_tokens

    @property
    def width(self) -> int:
        """Elements of a token: its index key and its queries."""
        return (1 + self.num_heads) * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of a token in the KV cache."""
        return self.head_dim

    @property
    def pair_flop(self) -> int:
        """Operations to score a pair of a token and an earlier one."""
        return 2 * self.num_heads * self.head_dim

    @property
    def read_width(self) -> int:
        """Elements per earlier token that scores read."""
        return self.head_dim

    def choice(self, kv_element_bytes: int) -> Choice:
        token_bytes = self.read_width * kv_element_bytes
        return Choice(self.num_seen, self.pair_flop, token_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndexerSpec:
    """What selects the blocks that a token attends to, once it sees more than `top_k` whole ones.

    An index key is cached for each block of a few tokens: the mean of their keys, normed, and
    rotated as the first token is. A block's score is the sum over index heads of the products with
    it that are positive. All query heads share the choice, and a token sees those behind the last
    whole block in any case. Equal scores go to the lower block.

    Source: Qwen4-Exp in transformers 5.24 (2026).
    """

    num_heads: int
    head_dim: int
    block_tokens: int
    top_k: int

    @property
    def num_seen(self) -> int:
        """The longest context all of which a token sees."""
        return (self.top_k + 1) * self.block_tokens - 1

    @property
    def width(self) -> int:
        """Elements of a token: its share of an index key, and its queries."""
        return (1 + self.num_heads) * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of a token in the KV cache, whose blocks keep the tokens of an open block."""
        rows = KV_BLOCK_TOKENS // self.block_tokens + self.block_tokens
        return ceil(rows * self.head_dim / KV_BLOCK_TOKENS)

    @property
    def pair_flop(self) -> int:
        """Operations to score a pair of a token and an earlier one, by its share of a block."""
        return 2 * self.num_heads * self.head_dim // self.block_tokens

    @property
    def read_width(self) -> int:
        """Elements per earlier token that scores read, at least 1."""
        return ceil(self.head_dim / self.block_tokens)

    def choice(self, kv_element_bytes: int) -> Choice:
        token_bytes = self.read_width * kv_element_bytes
        return Choice(self.num_seen, self.pair_flop, token_bytes, copies=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(AttentionKind):
    """Grouped-query attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    scale: float
    value_head_dim: int | None = None  # None: as `head_dim`
    value_scale: float = 1.0
    gate: OutputGate | None = None
    # Tokens that a query attends to, itself included; None for all.
    sliding_window: int | None = None
    # Tokens of a chunk: a query attends to those of its chunk; None where there are no chunks.
    chunk_tokens: int | None = None
    temperature: Temperature | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = "none"
    is_norm_after_rope: bool = False  # whether that norm follows the rotation
    norms_values: bool = False  # whether values have an RMS norm per head, without a weight
    values_are_keys: bool = False  # whether values are the keys before their norm and rotation
    clip_qkv: float | None = None  # bound on the absolute value of queries, keys and values
    # Whether each head has a learned score that takes part in the softmax but has no value.
    has_sinks: bool = False
    # None: a token attends to all that it sees.
    blocks: BlockIndexerSpec | PooledIndexerSpec | None = None

    @property
    def rotated_head_dim(self) -> int:
        return self.head_dim

    @property
    def index_heads(self) -> int:
        """Heads of values behind those of attention, which hold index keys and queries."""
        return 0 if self.blocks is None else ceil(self.blocks.width / self.value_dim)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def output_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.num_kv_heads * self.value_dim

    @property
    def projections(self) -> dict[str, int]:
        """Outputs of the projections of queries, keys and values."""
        widths = {"q": self.query_width, "k": self.key_width, "v": self.value_width}
        return {
            part: width for part, width in widths.items() if part != "v" or not self.values_are_keys
        }

    @property
    def gate_width(self) -> int:
        """Outputs of the gate's projection."""
        return gate_width(self.gate, self.num_heads, self.value_dim)

    @property
    def cache_width(self) -> int:
        """Elements of a token in the KV cache, its index key included."""
        index = 0 if self.blocks is None else self.blocks.key_width
        return self.key_width + self.value_width + index

    @property
    def prompt_width(self) -> int:
        """Elements of the queries and the output of a prompt token."""
        return self.query_width + self.output_width

    @property
    def working_width(self) -> int:
        """Elements per token that a host holds during attention: projected and rotated."""
        return 2 * (self.query_width + self.index_heads * self.value_dim + self.cache_width)

    @property
    def token_shapes(self) -> TokenShapes:
        query = (self.num_heads, self.head_dim)
        return TokenShapes(
            query=query,
            absorbed_query=query,
            key=(self.num_kv_heads, self.head_dim),
            value=(self.num_kv_heads + self.index_heads, self.value_dim),
            output=self.output_width,
            absorbed_output=self.output_width,
        )

    @property
    def has_gate(self) -> bool:
        return self.gate is not None

    @property
    def rotates_entries(self) -> bool:
        return isinstance(self.blocks, PooledIndexerSpec)

    @property
    def cache_window(self) -> int | None:
        return self.sliding_window

    @property
    def allows_int8_kv(self) -> bool:
        return self.blocks is None

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        for part, width in self.projections.items():
            name = f"self_attn.{part}_proj"
            yield from linear(name, (width, hidden_size), has_bias=self.qkv_bias)
        head_dim = self.head_dim
        norms: dict[QkNorm, tuple[Shape, Shape]] = {
            "head": ((head_dim,), (head_dim,)),
            "full": ((self.query_width,), (self.key_width,)),
            "layer": ((self.num_heads, head_dim), (self.num_kv_heads, head_dim)),
        }
        for part, shape in zip("qk", norms.get(self.qk_norm, ()), strict=False):
            yield Weight(f"self_attn.{part}_norm.weight", shape)
        if self.has_sinks:
            yield Weight("self_attn.sinks", (self.num_heads,))
        yield from gate_weights(self.gate, self.gate_width, hidden_size)
        if self.blocks is not None:
            dim = self.blocks.head_dim
            yield Weight(f"{INDEXER}k_proj.weight", (dim, hidden_size))
            yield Weight(f"{INDEXER}q_proj.weight", (self.blocks.num_heads * dim, hidden_size))
            yield Weight(f"{INDEXER}q_norm.weight", (dim,))
            yield Weight(f"{INDEXER}k_norm.weight", (dim,))
        output = (hidden_size, self.output_width)
        yield from linear(OUTPUT, output, "post", has_bias=self.output_bias)

    def work(self, elements: ElementBytes) -> AttentionWork:
        scales = 0  # of int8, a factor for each head of keys and values
        if elements.kv == KV_ITEM_BYTES["int8"]:
            scales = 2 * self.num_kv_heads * KV_SCALE_BYTES
        return AttentionWork(
            query_width=self.query_width,
            output_width=self.output_width,
            token_sizes=self.token_shapes.sizes,
            pair_flop=2 * (self.query_width + self.output_width),
            prompt_pair_flop=2 * self.prompt_width,
            kv_token_bytes=self.cache_width * elements.kv + scales,
            window=self.sliding_window or self.chunk_tokens,
            choice=None if self.blocks is None else self.blocks.choice(elements.kv),
        )

    def within(self, length: int) -> Self:
        if self.blocks is None or self.blocks.num_seen < length:
            return self
        return replace(self, blocks=None)

    def shard(self, ranks: Ranks) -> Self:
        num_heads, num_kv_heads = ranks.share("attention heads", self.num_heads), 1
        if ranks.count % self.num_kv_heads:  # otherwise several ranks share one
            num_kv_heads = ranks.share("KV heads", self.num_kv_heads)
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def describe(self) -> str:
        heads = f"{self.num_heads} query heads, {self.num_kv_heads} KV heads"
        notes = [f"{heads}, head dimension {self.head_dim}"]
        if self.sliding_window is not None:
            notes.append(f"window of {self.sliding_window:,}")
        if self.chunk_tokens is not None:
            notes.append(f"chunks of {self.chunk_tokens:,}")
        if self.blocks is not None:
            blocks = self.blocks
            notes.append(f"{blocks.top_k:,} blocks of {blocks.block_tokens:,} tokens chosen")
        if self.has_sinks:
            notes.append("sinks")
        return ", ".join(notes)
