"""Layers of a model as pure data: attention, router, experts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from raymoe.specs.rope import RopeSpec

KV_BLOCK_TOKENS = 32  # of a block of the KV cache
# Norm of queries and keys: none; RMS per head, per head without a weight, or over the full width;
# or a layer norm per head, each with weights of its own.
QkNorm = Literal["none", "head", "unit", "full", "layer"]
GateActivation = Literal["sigmoid", "softplus"]
# Kinds of norms. All but "layer" are RMS norms: "rms" rounds the normed value to its type before it
# is multiplied by the weight, "rms_float32" after it, and "rms_plus_one" multiplies by 1 + weight.
NormKind = Literal["rms", "rms_float32", "rms_plus_one", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShapes:
    """Shapes of attention's inputs and outputs per token.

    Latent attention has a plain form, used with the weights at hand, and an *absorbed* form, which
    reads only the cache. For grouped-query attention both are the same.
    """

    query: tuple[int, int]  # heads and dimensions per head
    absorbed_query: tuple[int, int]
    key: tuple[int, int]  # cached heads and dimensions per head
    # Zero dimensions if values are part of the keys; in latent attention what an indexer reads,
    # which is behind the values of other attention.
    value: tuple[int, int]
    output: int
    absorbed_output: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Elements of queries, keys, values and output of a token, in the larger form."""
        query = max(prod(self.query), prod(self.absorbed_query))
        return query, prod(self.key), prod(self.value), max(self.output, self.absorbed_output)


def largest_sizes(shapes: Iterable[TokenShapes]) -> tuple[int, ...]:
    """Elements per token of buffers that fit every layer, in the order of `TokenShapes.sizes`."""
    return tuple(map(max, zip(*(each.sizes for each in shapes), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate:
    """A factor of attention's output, from a projection of the same input."""

    activation: GateActivation
    is_per_head: bool  # one factor for each head, instead of one for each element
    has_bias: bool = False  # a bias of the projection


def _gate_width(gate: OutputGate | None, num_heads: int, value_dim: int) -> int:
    if gate is None:
        return 0
    return num_heads if gate.is_per_head else num_heads * value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries are scaled by 1 + `beta` * log(1 + floor((position + 1) / `period`)).

    Source: Scalable-Softmax (arXiv 2501.19399), as in Llama 4's reference code.
    """

    beta: float
    period: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
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
        return _gate_width(self.gate, self.num_heads, self.value_dim)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
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
        return _gate_width(self.gate, self.num_heads, self.value_head_dim)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpec:
    """Embeddings of n-grams of token ids, which the host reads from a table.

    An n-gram that ends at a token has its own token and the `n - 1` before it. The products of its
    ids and `multipliers`, combined by exclusive or, become a row in each part of the table that is
    for n-grams of this length, modulo the rows of the part. Those of pairs come first. Tokens
    before the last `separator`, and before the beginning, count as separators.

    Source: Engram (arXiv 2601.07372), section 2.2.
    """

    multipliers: tuple[int, ...]  # of a token's own id, of that before it, and so on
    sizes: tuple[int, ...]  # rows of the part of each hash
    num_rows: int  # of the table, with some at its end that nothing reads
    row_width: int
    num_tensors: int  # in which a checkpoint holds the table
    separator: int
    dtype: str  # of the table in a checkpoint and in memory; one of TABLE_BYTES

    @property
    def num_past(self) -> int:
        """Tokens before a token that decide its rows."""
        return len(self.multipliers) - 1

    @property
    def width(self) -> int:
        """Elements of all rows of a token."""
        return len(self.sizes) * self.row_width

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the part of each hash begins."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    @property
    def tensor_rows(self) -> tuple[int, ...]:
        """Rows of each tensor of the table."""
        rows = ceil(self.num_rows / self.num_tensors)
        begins = range(0, self.num_rows, rows)
        return tuple(min(rows, self.num_rows - begin) for begin in begins)

    @property
    def table_bytes(self) -> int:
        return self.num_rows * self.row_width * TABLE_BYTES[self.dtype]


TABLE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
RecurrentKind = Literal["gated_delta", "kimi_delta", "mamba2", "short_conv", "ngrams"]
STATE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}  # of an element, by type


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """A layer that keeps a state of fixed size per sequence in place of KV (linear attention).

    A causal convolution over the last `conv_width` tokens follows the projections of queries, keys
    and values. Each head then updates a matrix of `key_dim` x `value_dim` by its keys and values,
    after a decay, and multiplies it by its query. A short convolution has no such matrix, so that
    `key_dim` is zero, and convolves the product of two projections.

    Mamba-2 writes its x as values by the keys B and reads by the queries C, each scaled by a step
    of time that decides the decay as well. It adds `D` times its values to what it reads, and norms
    the gated result over groups of heads, one for each head of keys.

    Kimi Delta Attention has a decay for each dimension of a key, where the others have one for each
    head. Its decay and its gate come from latents of their own, or from the hidden state.

    Embeddings of n-grams are gated by the streams of the hidden state, convolved, and added to
    these: values are as wide as all streams.

    Sources: Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692), Mamba-2 (arXiv
    2405.21060).
    """

    kind: RecurrentKind
    num_key_heads: int  # heads of queries and keys; each serves as many heads of values
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    has_conv_bias: bool = False
    has_bias: bool = False  # biases of the projections
    # Width of the latents that decay and gate are projected from; None: from the hidden state.
    latent_width: int | None = None
    # Lower bound of the logarithm of a decay, whose share of it a sigmoid gives; None: no bound,
    # by a softplus.
    decay_bound: float | None = None
    state_dtype: str = "float32"  # of the matrices in memory; one of STATE_BYTES
    has_sigmoid_gate: bool = False  # whether the gate of gated delta is a sigmoid, not a silu
    conv_dilation: int = 1  # the convolution reads every so many tokens of its width
    ngrams: NgramSpec | None = None

    @property
    def has_matrices(self) -> bool:
        """Whether there is a state besides the last inputs of the convolution."""
        return self.key_dim > 0

    @property
    def projections(self) -> dict[str, int]:
        """Outputs of the projections that the convolution mixes."""
        key = self.num_key_heads * self.key_dim
        widths = {"q": key, "k": key, "v": self.output_width}
        return {part: width for part, width in widths.items() if width}

    @property
    def inputs(self) -> dict[str, int]:
        """Outputs of all projections of the hidden state before the convolution."""
        decay = {"a": self.decay_width}
        if self.latent_width is not None:
            decay = {"f_a": self.latent_width}
        widths = self.projections | decay | {"b": self.gain_width}
        return {part: width for part, width in widths.items() if width}

    @property
    def latent_outputs(self) -> dict[str, int]:
        """Outputs of the projections from the latents of decay and gate."""
        if self.latent_width is None:
            return {}
        return {"f_b": self.decay_width, "g_b": self.gate_width}

    @property
    def conv_channels(self) -> int:
        return sum(self.projections.values())

    @property
    def decay_width(self) -> int:
        """Outputs of the projection that the decay of a token comes from."""
        if self.kind == "kimi_delta":
            return self.num_heads * self.key_dim
        return self.num_heads if self.has_matrices else 0

    @property
    def gain_width(self) -> int:
        """Outputs of the projection that says how much of a token is written to the state."""
        if self.kind == "mamba2":
            return 0
        return self.num_heads if self.has_matrices else self.output_width

    @property
    def gate_width(self) -> int:
        return self.output_width

    @property
    def norm_width(self) -> int:
        """Elements of the weight of the norm of what is read."""
        return self.output_width if self.kind == "mamba2" else self.value_dim

    @property
    def rotated_head_dim(self) -> int:
        return 0

    @property
    def query_width(self) -> int:
        """Elements of a token that the host reads: inputs of convolution, decay and gain."""
        query, key, value, _ = self.token_shapes.sizes
        return query + key + value

    @property
    def output_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def cache_width(self) -> int:
        """Elements of a token in the KV cache: none."""
        return 0

    @property
    def prompt_width(self) -> int:
        return self.query_width + self.output_width

    @property
    def working_width(self) -> int:
        """Elements per token that a host holds, those of two float32 decays counted twice."""
        return 3 * self.conv_channels + 2 * self.output_width + 5 * self.decay_width

    def state_bytes(self, bytes_per_element: int) -> int:
        """Bytes that a sequence keeps: matrices, and inputs of the convolution."""
        matrices = self.num_heads * self.key_dim * self.value_dim
        past = (self.conv_width - 1) * self.conv_channels
        return STATE_BYTES[self.state_dtype] * matrices + bytes_per_element * past

    @property
    def token_flop(self) -> int:
        """Operations of a token on the state: decay, two products with it, and the update."""
        matrices = self.num_heads * self.key_dim * self.value_dim
        return 7 * matrices + 2 * self.conv_width * self.conv_channels

    @property
    def token_shapes(self) -> TokenShapes:
        query = (1, self.conv_channels)
        return TokenShapes(
            query=query,
            absorbed_query=query,
            key=(1, self.decay_width),
            value=(1, self.gain_width if self.has_matrices else 0),
            output=self.output_width,
            absorbed_output=self.output_width,
        )


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
class CompressedAttentionSpec:
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
    def token_flop(self) -> int:
        """Operations of a token on the sums of its windows."""
        return 8 * self.summed_width

    @property
    def row_flop(self) -> int:
        """Operations per pair of a token and one of the last rows, or an entry."""
        return 2 * self.prompt_width

    @property
    def pair_flop(self) -> int:
        """Operations per pair of a token and an earlier one, by its share of an entry."""
        return 0 if self.ratio is None else self.row_flop // self.ratio

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


# Layers that keep a state per sequence.
StatefulSpec = RecurrentSpec | CompressedAttentionSpec
AnyAttentionSpec = AttentionSpec | LatentAttentionSpec | StatefulSpec

__all__ = [
    "AnyAttentionSpec",
    "AnyStreamsSpec",
    "AttentionSpec",
    "BlockIndexerSpec",
    "ClampSpec",
    "CompressedAttentionSpec",
    "DenseSpec",
    "EntryIndexerSpec",
    "GatedStreamsSpec",
    "GroupScore",
    "LatentAttentionSpec",
    "LayerSpec",
    "MoeSpec",
    "NgramSpec",
    "NormKind",
    "NormLayout",
    "OutputGate",
    "PooledIndexerSpec",
    "QkNorm",
    "RecurrentKind",
    "RecurrentSpec",
    "RouterSpec",
    "Scoring",
    "SharedSpec",
    "StatefulSpec",
    "StreamMerge",
    "StreamsSpec",
    "TokenShapes",
    "largest_sizes",
    "projections_of",
]

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token chooses its experts and weights them.

    Logits become scores, and the selection bias is added; only the best groups remain; the best
    `top_k` of `MoeSpec` are chosen, and weighted by their scores without that bias. A softmax over
    the chosen logits alone equals a renormalised softmax over all.

    A table may name the experts of each token id instead: scores then only weigh them.

    The sparse mixer has no scores: it takes the largest logit, weights it by a softmax over the
    logits near it, and repeats this with the rest. Only `jitter` applies to it.
    """

    scoring: Scoring = "softmax"
    # Token ids whose experts a table names; 0: they are chosen by scores.
    num_token_ids: int = 0
    logit_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    renormalize: bool = True  # whether the chosen weights are scaled to sum to 1
    min_weight_sum: float = 0.0  # lower bound of the divisor when renormalising
    added_weight_sum: float = 0.0  # added to that divisor
    scale: float = 1.0  # final factor of the weights
    has_bias: bool = False  # a bias of the logits
    has_selection_bias: bool = False  # a bias of the scores that affects only the choice
    chooses_by_logits: bool = False  # whether that bias is added to the logits instead
    num_groups: int = 1
    top_groups: int = 1  # groups that remain
    # Score of a group: its best expert, or the sum of its two best; None with one group.
    group_score: GroupScore | None = None
    # Sparse mixer: logits are near if they differ by at most twice this fraction.
    jitter: float = 0.0
    # Whether it reads the hidden state by an RMS norm of its own, times hidden size ** -0.5,
    # instead of the input of the experts.
    has_input_norm: bool = False
    has_expert_scales: bool = False  # learned factors of the final weights, one for each expert
    # Whether the weight of the one chosen expert multiplies its input instead of its output.
    scales_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampSpec:
    """A gated product with limits, in place of `activation(gate) * up`.

    `gate` is clamped from above at `gate_limit`, `up` to +-`limit`; the product is (up + offset) *
    gate * sigmoid(gain * gate). Source: OpenAI, gpt-oss-120b & gpt-oss-20b model card (2025),
    section 2.2.
    """

    gain: float
    limit: float
    gate_limit: float
    offset: float


def projections_of(activation: str) -> tuple[str, str, str]:
    """The projections that stand for gate, up and down.

    The square of a relu is relu(x) * x: a product whose gate is the up projection.
    """
    return ("up" if activation == "relu2" else "gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    hidden: int  # 0: the layer has no network
    activation: str
    has_bias: bool = False
    clamp: ClampSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """The expert that every token uses; `is_gated` scales it by its own sigmoid.

    Several shared experts that are summed equal one of their total width.
    """

    hidden: int
    is_gated: bool
    has_bias: bool = False
    scale: float = 1.0  # factor of its output
    clamp: ClampSpec | None = None

    def network(self, activation: str) -> DenseSpec:
        return DenseSpec(
            hidden=self.hidden,
            activation=activation,
            has_bias=self.has_bias,
            clamp=self.clamp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A router with top-k choice and gated feed-forward experts."""

    num_experts: int
    top_k: int
    expert_hidden: int
    activation: str
    router: RouterSpec
    has_bias: bool = False  # biases of the three projections of every expert
    clamp: ClampSpec | None = None  # limits of the gated product of the experts
    shared: SharedSpec | None = None
    # Whether experts and shared expert each norm their result before it is added to the other's;
    # the experts then norm their own input, and the layer's norm is that of the shared expert.
    has_branch_norms: bool = False
    # Width of the latent that the experts read and write, between a projection of their input and
    # one of the sum of their results (NVIDIA's LatentMoE); None: they read the hidden state.
    latent_size: int | None = None

    def input_size(self, hidden_size: int) -> int:
        """Width of what an expert reads and writes."""
        return self.latent_size or hidden_size


MAX_TILE_ROWS = 128  # of a tile of our GPU kernels; rows computed at once are a multiple of it
GROUP_UNEVENNESS = 2


def rows_at_once(num_rows: int, share: float) -> int:
    """Rows of a group of experts, of `num_rows` of all, whose intermediates a GPU keeps at once.

    Tokens choose experts unevenly, so that a group may have any number of rows. Room for all is
    much memory and for its share too little: there is room for twice that, and what is beyond it is
    computed afterwards.

    Args:
        share: Of the layer's experts, those in the group.
    """
    expected = GROUP_UNEVENNESS * share * num_rows
    return min(num_rows, MAX_TILE_ROWS * max(1, ceil(expected / MAX_TILE_ROWS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayout:
    """Whether a layer norms the inputs of attention and feed-forward network, and their results.

    Results are normed before they are added to the hidden state.
    """

    before_attention: bool = True
    after_attention: bool = False
    before_ffn: bool = True
    after_ffn: bool = False


StreamMerge = Literal["mean", "weighted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """A hidden state of several streams, all as wide as the input of a block (mHC).

    A matrix turns the streams of a token into logits, one for each factor: `pre` weighs the streams
    that a block reads, `post` its result in each stream, and a matrix mixes the streams before that
    is added. The sums of its rows and columns are brought near 1 in turns. At first the streams are
    copies of the embedding.

    Independent streams (iHC) have no matrix: what a block adds is `post` times its result, in
    float32.

    Source: Manifold-Constrained Hyper-Connections (arXiv 2512.24880), section 4.2.
    """

    count: int
    # Added to `pre`, to the matrix and to the sums that divide it; without a matrix to `post`.
    eps: float
    norm_eps: float  # of the RMS norm of all streams, without a weight, that the logits read
    # How often columns are divided by their sums, rows once less; None: there is no matrix.
    sinkhorn_iterations: int | None
    magnitude: float = 2.0  # of `post`: factor of a sigmoid
    # What the streams become after the last layer: their mean, or a sum weighed as `pre` weighs.
    merge: StreamMerge = "mean"

    @property
    def num_factors(self) -> int:
        """Logits of a block: `pre`, `post`, then the matrix."""
        return (2 + self.count * self.is_mixed) * self.count

    @property
    def num_scales(self) -> int:
        """Factors of the logits of `pre`, `post` and the matrix."""
        return 2 + self.is_mixed

    @property
    def is_mixed(self) -> bool:
        return self.sinkhorn_iterations is not None

    @property
    def working_width(self) -> int:
        """Elements of a token that mixing allocates."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreamsSpec:
    """A hidden state of several streams that are read by gates of each channel.

    Each stream has an RMS norm with its own weight. A block reads the mean of the normed streams,
    each times a sigmoid from a latent of all of them, and needs no other norm. Its result is added
    to each stream, times a factor of that stream; the streams are not mixed. What is read after the
    last layer goes to the head as it is.
    """

    count: int
    latent_width: int
    norm_eps: float

    @property
    def num_factors(self) -> int:
        """Logits of the streams that a block's result is added to, then the latent."""
        return self.count + self.latent_width

    @property
    def working_width(self) -> int:
        """Elements of a token that mixing allocates: normed streams and gates, in hidden sizes."""
        return 2 * self.count


AnyStreamsSpec = StreamsSpec | GatedStreamsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: attention, residual, feed-forward network, residual, and norms."""

    attention: AnyAttentionSpec
    ffn: DenseSpec | MoeSpec
    rope: RopeSpec | None  # None: attention does not depend on positions
    norms: NormLayout = NormLayout()
    # Whether the feed-forward network reads the norm that attention reads.
    is_parallel: bool = False
    has_norm_bias: bool = False
    has_scalar: bool = False  # whether a learned number multiplies the hidden state at the end
    streams: AnyStreamsSpec | None = None  # None: the hidden state is one stream

    @property
    def mixed_streams(self) -> AnyStreamsSpec | None:
        """The streams that blocks of the layer read mixed; None where there is one, or all."""
        return None if self.ngrams is not None else self.streams

    @property
    def ngrams(self) -> NgramSpec | None:
        return self.attention.ngrams if isinstance(self.attention, RecurrentSpec) else None

    @property
    def sliding_window(self) -> int | None:
        """Last tokens outside of which the layer needs nothing in the KV cache; None for all."""
        attention = self.attention
        return attention.sliding_window if isinstance(attention, AttentionSpec) else None

    @property
    def has_network(self) -> bool:
        return not isinstance(self.ffn, DenseSpec) or self.ffn.hidden > 0
