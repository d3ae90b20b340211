"""Embeddings of n-grams of token ids, in a layer of their own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from raymoe.specs.attention.kind import AttentionKind, TokenShapes
from raymoe.specs.attention.work import AttentionWork, ElementBytes, StateWork
from raymoe.specs.weights import Weight
from raymoe.units import format_bytes

NGRAMS = "ngrams."
NGRAM_TABLE = "ngrams.table."  # its tensors, by their number
MAX_TABLE_TENSORS = 512  # the default of transformers' class
NGRAM_SCALE = "ngrams.table_scale"  # of all that the table holds
# Integers of the hashes, which `NgramSpec` says as well.
NGRAM_MULTIPLIERS, NGRAM_SIZES, NGRAM_OFFSETS = (
    f"{NGRAMS}{name}" for name in ("multipliers", "sizes", "offsets")
)
TABLE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramLayerSpec(AttentionKind):
    """Embeddings of n-grams, gated by the streams of the hidden state, convolved, and added to it.

    The convolution reads every `dilation` tokens of the last `conv_width`, whose inputs a sequence
    keeps.
    """

    ngrams: NgramSpec
    width: int  # of all streams of the hidden state
    conv_width: int
    dilation: int
    norm_eps: float

    @property
    def has_state(self) -> bool:
        return True

    @property
    def cache_width(self) -> int:
        return 0

    @property
    def working_width(self) -> int:
        return 5 * self.width

    @property
    def token_shapes(self) -> TokenShapes:
        query = (1, self.width)
        return TokenShapes(
            query=query,
            absorbed_query=query,
            key=(1, 0),
            value=(1, 0),
            output=self.width,
            absorbed_output=self.width,
        )

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        inputs = self.ngrams.width
        yield Weight(f"{NGRAMS}k_proj.weight", (self.width, inputs))
        yield Weight(f"{NGRAMS}v_proj.weight", (hidden_size, inputs))
        for name in ("k_norm", "q_norm", "conv_norm"):
            yield Weight(f"{NGRAMS}{name}.weight", (self.width,))
        taps = (self.conv_width - 1) // self.dilation + 1
        yield Weight(f"{NGRAMS}conv.weight", (self.width, 1, taps))

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes that a sequence keeps: inputs of the convolution."""
        return element_bytes * (self.conv_width - 1) * self.width

    def work(self, elements: ElementBytes) -> AttentionWork:
        return AttentionWork(
            query_width=self.width,
            output_width=self.width,
            token_sizes=self.token_shapes.sizes,
            state=StateWork(
                self.state_bytes(elements.activation), 2 * self.conv_width * self.width
            ),
        )

    def with_table_dtype(self, dtype: str) -> Self:
        return replace(self, ngrams=replace(self.ngrams, dtype=dtype))

    def describe(self) -> str:
        ngrams = self.ngrams
        return (
            f"n-grams of up to {len(ngrams.multipliers)} tokens, {len(ngrams.sizes)} rows of "
            f"{ngrams.num_rows:,}, table of {format_bytes(ngrams.table_bytes)} ({ngrams.dtype}), "
            f"convolution of {self.conv_width}"
        )
