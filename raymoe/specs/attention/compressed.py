"""Attention to the last tokens, and to entries that stand for earlier ones."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from raymoe.specs.attention.kind import (
    INDEXER,
    KV_BLOCK_TOKENS,
    OUTPUT,
    AttentionKind,
    TokenShapes,
)
from raymoe.specs.attention.recurrent import STATE_BYTES
from raymoe.specs.attention.work import AttentionWork, Choice, ElementBytes, RecentRows, StateWork
from raymoe.specs.weights import Weight

GROUPED_OUTPUT = "self_attn.o_a_proj"
COMPRESSOR = "self_attn.compressor."
POSITION_BIAS = f"{COMPRESSOR}position_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexerSpec:
    """What selects the entries that a token attends to, once it sees more than `top_k` of them.

    An index key is cached for each entry, and made of its tokens as the entry is. Scores are those
    of `IndexerSpec`; queries come from the latent of the queries. Equal scores go to the lower
    entry.

    Source: DeepSeek-V4 report (2026), section 2.3.1.
    """

    num_heads: int
    head_dim: int
    top_k: int

    @property
    def query_width(self) -> int:
        """Elements of a token's index queries and of the weights of their heads."""
        return self.num_heads * (self.head_dim + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec(AttentionKind):
    """Attention of one layer to the last tokens, and to entries that stand for earlier ones.

    All heads share one row per token, which is key and value at once and whose last dimensions are
    rotated; results are rotated back. An entry pools the tokens of a window of `ratio` tokens by
    weights of its own in each dimension, and the token that completes a window sees its entry
    already. With overlap, the window before takes part by a second projection. Groups of heads are
    projected to a latent before the output projection.

    Source: DeepSeek-V4 report (2026), section 2.3.
    """

    num_heads: int
    head_dim: int  # of queries, rows and entries
    rope_head_dim: int
    q_lora_rank: int  # width of the query latent
    scale: float
    norm_eps: float
    sliding_window: int  # tokens that a query sees as they are, itself included
    ratio: int | None  # tokens of an entry; None if there are no entries
    is_overlapping: bool  # whether the window before takes part in an entry
    num_groups: int  # of heads, each projected to a latent
    group_rank: int
    indexer: EntryIndexerSpec | None = None  # None: a token attends to every entry that it sees

    @property
    def rotated_head_dim(self) -> int:
        return self.rope_head_dim

    @property
    def index_head_dim(self) -> int:
        """Elements of an entry's index key."""
        return 0 if self.indexer is None else self.indexer.head_dim

    @property
    def index_width(self) -> int:
        """Elements of a token that scores are made of: pooled ones, queries, and weights."""
        if self.indexer is None:
            return 0
        return 2 * self.num_sums * self.index_head_dim + self.indexer.query_width

    @property
    def num_seen(self) -> int | None:
        """The longest context all of whose entries a token sees; None for any."""
        if self.indexer is None or self.ratio is None:
            return None
        return (self.indexer.top_k + 1) * self.ratio - 1

    @property
    def num_sums(self) -> int:
        """Entries that a token takes part in: none, that of its window, that of the next too."""
        return 0 if self.ratio is None else 1 + self.is_overlapping

    @property
    def pooled_width(self) -> int:
        """Values of a token that are pooled; as many numbers decide their weights."""
        return self.num_sums * self.head_dim

    @property
    def summed_width(self) -> int:
        """Values of a token that are pooled, those of index keys included."""
        return self.pooled_width + self.num_sums * self.index_head_dim

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def output_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def cache_width(self) -> int:
        """Elements of a token in blocks, of which an entry larger than a block fills one row."""
        if self.ratio is None:
            return 0
        return ceil((self.head_dim + self.index_head_dim) / min(self.ratio, KV_BLOCK_TOKENS))

    @property
    def prompt_width(self) -> int:
        """Elements of the queries and the output of a prompt token."""
        return self.query_width + self.output_width

    @property
    def working_width(self) -> int:
        """Elements per token that a host holds, those of pooled float32 values counted twice."""
        rows = self.prompt_width + self.head_dim + self.index_width
        return 2 * rows + 8 * self.summed_width

    @property
    def sum_bytes(self) -> int:
        """Bytes of the float32 sums of open windows."""
        return STATE_BYTES["float32"] * 3 * self.summed_width

    def state_bytes(self, bytes_per_element: int) -> int:
        """Bytes that a sequence keeps: its last rows, and sums of open windows."""
        return bytes_per_element * self.sliding_window * self.head_dim + self.sum_bytes

    @property
    def token_shapes(self) -> TokenShapes:
        query = (self.num_heads, self.head_dim)
        return TokenShapes(
            query=query,
            absorbed_query=query,
            key=(1, self.head_dim),
            value=(1, 2 * self.pooled_width + self.index_width),
            output=self.output_width,
            absorbed_output=self.output_width,
        )

    @property
    def rotates_entries(self) -> bool:
        return True

    @property
    def has_state(self) -> bool:
        return True

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        width, rank = self.head_dim, self.q_lora_rank
        yield Weight("self_attn.q_a_proj.weight", (rank, hidden_size))
        yield Weight("self_attn.kv_proj.weight", (width, hidden_size))
        yield Weight("self_attn.q_a_norm.weight", (rank,))
        yield Weight("self_attn.kv_norm.weight", (width,))
        yield Weight("self_attn.q_b_proj.weight", (self.query_width, rank))
        yield Weight("self_attn.sinks", (self.num_heads,))
        if self.ratio is not None:
            for part in ("kv_proj", "gate_proj"):
                yield Weight(f"{COMPRESSOR}{part}.weight", (self.pooled_width, hidden_size))
            yield Weight(POSITION_BIAS, (self.ratio, self.pooled_width), "added")
            yield Weight(f"{COMPRESSOR}kv_norm.weight", (width,))
        if self.indexer is not None and self.ratio is not None:
            num_heads, dim = self.indexer.num_heads, self.indexer.head_dim
            width = self.num_sums * dim
            yield Weight(f"{INDEXER}wq_b.weight", (num_heads * dim, rank))
            yield Weight(f"{INDEXER}weights_proj.weight", (num_heads, hidden_size))
            for part in ("kv_proj", "gate_proj"):
                yield Weight(f"{INDEXER}{part}.weight", (width, hidden_size))
            yield Weight(f"{INDEXER}position_bias", (self.ratio, width), "added")
            yield Weight(f"{INDEXER}kv_norm.weight", (dim,))
        latent = self.num_groups * self.group_rank
        grouped = (latent, self.output_width // self.num_groups)
        yield Weight(f"{GROUPED_OUTPUT}.weight", grouped, "post")
        yield Weight(f"{OUTPUT}.weight", (hidden_size, latent), "post")

    def work(self, elements: ElementBytes) -> AttentionWork:
        row_flop = 2 * self.prompt_width
        pair_flop = 0 if self.ratio is None else row_flop // self.ratio
        recent = RecentRows(
            window=self.sliding_window,
            pair_flop=row_flop,
            row_bytes=elements.activation * self.head_dim,
            pooled_bytes=elements.activation * 2 * self.summed_width,
            sum_bytes=self.sum_bytes,
        )
        return AttentionWork(
            query_width=self.query_width,
            output_width=self.output_width,
            token_sizes=self.token_shapes.sizes,
            pair_flop=pair_flop,
            prompt_pair_flop=pair_flop,
            kv_token_bytes=self.cache_width * elements.kv,
            choice=self._choice(elements.kv),
            state=StateWork(self.state_bytes(elements.activation), 8 * self.summed_width, recent),
        )

    def _choice(self, kv_element_bytes: int) -> Choice | None:
        seen, indexer, ratio = self.num_seen, self.indexer, self.ratio
        if seen is None or indexer is None or ratio is None:
            return None
        token_bytes = ceil(indexer.head_dim / ratio) * kv_element_bytes
        return Choice(seen, 2 * indexer.num_heads * indexer.head_dim // ratio, token_bytes)

    def within(self, length: int) -> Self:
        if self.num_seen is None or self.num_seen < length:
            return self
        return replace(self, indexer=None)

    def describe(self) -> str:
        entries = f", entries of {self.ratio} tokens" if self.ratio else ""
        return (
            f"{self.num_heads} query heads on one row of {self.head_dim}, window of "
            f"{self.sliding_window:,}{entries}, sinks"
        )
