"""Multi-head latent attention, to all tokens or to chosen ones."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from raymoe.specs.attention.kind import (
    INDEXER,
    KV_BLOCK_TOKENS,
    OUTPUT,
    AttentionKind,
    OutputGate,
    Ranks,
    TokenShapes,
    gate_weights,
    gate_width,
)
from raymoe.specs.attention.work import AttentionWork, Choice, ElementBytes
from raymoe.specs.weights import Weight, linear

KV_UP = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """What selects the positions that a token attends to, once there are more than `top_k`.

    An index key is cached for each token. A position's score is the sum over index heads of the
    head's weight, from the hidden state, times the product of index query and key where it is
    positive. Equal scores go to the lower position.

    Source: DeepSeek-V3.2-Exp, technical report (2025), equation 1.
    """

    num_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool  # whether neighbouring dimensions are rotated as a pair
    # Tokens of an entry, which has one key: the sum of theirs, weighed in each dimension. Whole
    # entries are chosen, `top_k` counts their tokens, and a token sees those behind them in any
    # case. None: tokens have keys of their own.
    pool: int | None = None
    rotates_end: bool = False  # whether the last dimensions are rotated, instead of the first
    key_norm_eps: float = 1e-6
    # Whether the layer has no such queries and keys, and takes the choice of the layer before it.
    is_shared: bool = False

    @property
    def entry_tokens(self) -> int:
        """Tokens that a key stands for."""
        return self.pool or 1

    @property
    def num_seen(self) -> int:
        """The longest context all of which a token sees."""
        return self.top_k + self.entry_tokens - 1

    @property
    def key_width(self) -> int:
        """Elements of a token in the KV cache, of which blocks keep an open entry's as well."""
        if self.is_shared:
            return 0
        if self.pool is None:
            return self.head_dim
        rows = KV_BLOCK_TOKENS // self.pool + 2 * self.pool
        return ceil(rows * self.head_dim / KV_BLOCK_TOKENS)

    @property
    def width(self) -> int:
        """Elements of a token: its index key, its queries, and the weights of their heads.

        What decides its share of an entry's key comes on top.
        """
        if self.is_shared:
            return 0
        key = self.head_dim if self.pool is None else 2 * self.head_dim
        return key + self.num_heads * (self.head_dim + 1)

    @property
    def pair_flop(self) -> int:
        """Operations to score a pair of a token and an earlier one, by its share of an entry."""
        return 0 if self.is_shared else 2 * self.num_heads * self.head_dim // self.entry_tokens

    @property
    def read_width(self) -> int:
        """Elements per earlier token that scores read, at least 1."""
        return 0 if self.is_shared else ceil(self.head_dim / self.entry_tokens)

    def choice(self, kv_element_bytes: int) -> Choice:
        token_bytes = self.read_width * kv_element_bytes
        return Choice(self.num_seen, self.pair_flop, token_bytes, copies=True)

    def weights(self, query_inputs: int, hidden_size: int) -> Iterator[Weight]:
        if self.is_shared:
            return
        yield Weight(f"{INDEXER}wq_b.weight", (self.num_heads * self.head_dim, query_inputs))
        yield Weight(f"{INDEXER}wk.weight", (self.head_dim, hidden_size))
        yield from linear(f"{INDEXER}k_norm", (self.head_dim,), has_bias=True)
        yield Weight(f"{INDEXER}weights_proj.weight", (self.num_heads, hidden_size))
        if self.pool is not None:
            yield Weight(f"{INDEXER}pool_gate.weight", (self.head_dim, hidden_size))
            yield Weight(f"{INDEXER}pool_bias", (self.pool, self.head_dim), "added")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(AttentionKind):
    """Multi-head latent attention (MLA) of one layer.

    Keys and values of all heads come from one latent, which is cached with one rotated key that all
    heads share; queries come from a latent of their own or directly. In the *absorbed* form queries
    are projected into the latent space and results out of it, so decoding reads only the cache; in
    the plain form keys and values are up-projected per head.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    num_heads: int
    q_lora_rank: int | None  # width of the query latent; None if queries are projected directly
    kv_lora_rank: int  # width of the latent of keys and values
    nope_head_dim: int  # unrotated dimensions of a query and a key
    rope_head_dim: int
    value_head_dim: int
    scale: float  # factor of the scores, including that of a scaled rope
    norm_eps: float  # epsilon of both latents' RMS norms, not of the layer's norms
    # Biases of the projections into the latents and of the output projection.
    has_bias: bool = False
    gate: OutputGate | None = None
    has_sinks: bool = False  # as in `AttentionSpec`
    indexer: IndexerSpec | None = None

    @property
    def rotated_head_dim(self) -> int:
        return self.rope_head_dim

    @property
    def query_head_dim(self) -> int:
        """Dimensions of a query and a key in the plain form."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def query_width(self) -> int:
        """Elements of the absorbed queries of a token."""
        return self.num_heads * self.row_width

    @property
    def output_width(self) -> int:
        """Elements of the output of a token, still in the latent space."""
        return self.num_heads * self.kv_lora_rank

    @property
    def gate_width(self) -> int:
        """Outputs of the gate's projection."""
        return gate_width(self.gate, self.num_heads, self.value_head_dim)

    @property
    def row_width(self) -> int:
        """Elements of a token that its attention reads: its latent and its rotated key."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def cache_width(self) -> int:
        """Elements of a token in the KV cache: its row, and its index key where it has one."""
        return self.row_width + (0 if self.indexer is None else self.indexer.key_width)

    @property
    def index_width(self) -> int:
        """Elements of a token's index key, queries and weights; they travel as its values."""
        return 0 if self.indexer is None else self.indexer.width

    @property
    def prompt_width(self) -> int:
        """Elements of the queries and the output of a prompt token, in the plain form."""
        return self.num_heads * (self.query_head_dim + self.value_head_dim)

    @property
    def working_width(self) -> int:
        """Elements per token that a host holds during attention, in both forms."""
        rows = self.prompt_width + self.row_width + self.index_width
        return 2 * rows + self.query_width + self.output_width

    @property
    def token_shapes(self) -> TokenShapes:
        return TokenShapes(
            query=(self.num_heads, self.query_head_dim),
            absorbed_query=(self.num_heads, self.row_width),
            key=(1, self.row_width),
            value=(1, self.index_width),
            output=self.num_heads * self.value_head_dim,
            absorbed_output=self.output_width,
        )

    @property
    def has_gate(self) -> bool:
        return self.gate is not None

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        rank, heads, has_bias = self.q_lora_rank, self.num_heads, self.has_bias
        query_width = heads * self.query_head_dim
        if rank is None:
            yield Weight("self_attn.q_proj.weight", (query_width, hidden_size))
        else:
            yield from linear("self_attn.q_a_proj", (rank, hidden_size), has_bias=has_bias)
            yield Weight("self_attn.q_a_layernorm.weight", (rank,))
            yield Weight("self_attn.q_b_proj.weight", (query_width, rank))
        cached = (self.row_width, hidden_size)
        yield from linear("self_attn.kv_a_proj_with_mqa", cached, has_bias=has_bias)
        yield Weight("self_attn.kv_a_layernorm.weight", (self.kv_lora_rank,))
        # Absorbed queries come from its rows of keys, results from those of values.
        keys, values = heads * self.nope_head_dim, heads * self.value_head_dim
        yield Weight(f"{KV_UP}.weight", (keys + values, self.kv_lora_rank), "post", keys)
        yield from gate_weights(self.gate, self.gate_width, hidden_size)
        if self.has_sinks:
            yield Weight("self_attn.sinks", (heads,))
        if self.indexer is not None:
            yield from self.indexer.weights(rank or hidden_size, hidden_size)
        value_width = heads * self.value_head_dim
        yield from linear(OUTPUT, (hidden_size, value_width), "post", has_bias=has_bias)

    def work(self, elements: ElementBytes) -> AttentionWork:
        return AttentionWork(
            query_width=self.query_width,
            output_width=self.output_width,
            token_sizes=self.token_shapes.sizes,
            pair_flop=2 * (self.query_width + self.output_width),
            prompt_pair_flop=2 * self.prompt_width,
            kv_token_bytes=self.cache_width * elements.kv,
            choice=None if self.indexer is None else self.indexer.choice(elements.kv),
        )

    def within(self, length: int) -> Self:
        if self.indexer is None or self.indexer.num_seen < length:
            return self
        return replace(self, indexer=None)

    def shard(self, ranks: Ranks) -> Self:
        return replace(self, num_heads=ranks.share("attention heads", self.num_heads))

    def describe(self) -> str:
        heads = f"latent, {self.num_heads} heads, rank {self.kv_lora_rank} + {self.rope_head_dim}"
        indexer = self.indexer
        return heads if indexer is None else f"{heads}, {indexer.top_k:,} positions chosen"
