"""What every kind of attention answers, and parts that several have."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol, Self

from raymoe.specs.attention.work import AttentionWork, ElementBytes
from raymoe.specs.weights import Weight, linear

KV_BLOCK_TOKENS = 32  # of a block of the KV cache
OUTPUT = "self_attn.o_proj"
OUTPUT_GATE = "self_attn.g_proj"
INDEXER = "self_attn.indexer."
GateActivation = Literal["sigmoid", "softplus"]


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


def gate_width(gate: OutputGate | None, num_heads: int, value_dim: int) -> int:
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


def gate_weights(gate: OutputGate | None, width: int, hidden_size: int) -> Iterator[Weight]:
    if gate is not None:
        yield from linear(OUTPUT_GATE, (width, hidden_size), "post", has_bias=gate.has_bias)


class Ranks(Protocol):
    """Ranks that divide a layer."""

    @property
    def count(self) -> int: ...

    def share(self, what: str, number: int) -> int:
        """A rank's share of a number; `ConfigError` names `what` if it cannot be divided."""


class AttentionKind(ABC):
    """Attention of one layer, or what a layer has in its place, as pure data.

    Each kind of layer is a class that answers this, so that nobody else has to ask for its type.
    """

    __slots__ = ()

    @abstractmethod
    def weights(self, hidden_size: int) -> Iterator[Weight]:
        """Weights that the step reads, without norms of the hidden state."""

    @abstractmethod
    def work(self, elements: ElementBytes) -> AttentionWork:
        """Operations and bytes."""

    @abstractmethod
    def describe(self) -> str:
        """Sizes in a few words, for `raymoe models`."""

    @property
    @abstractmethod
    def token_shapes(self) -> TokenShapes:
        """Shapes of the buffers between projections and attention."""

    @property
    @abstractmethod
    def cache_width(self) -> int:
        """Elements of a token in the KV cache."""

    @property
    @abstractmethod
    def working_width(self) -> int:
        """Elements per token that a host holds during attention."""

    @property
    def rotated_head_dim(self) -> int:
        """Dimensions of a head that a rope may rotate."""
        return 0

    @property
    def has_gate(self) -> bool:
        """Whether a factor of the result comes from the input of the layer."""
        return False

    @property
    def rotates_entries(self) -> bool:
        """Whether rows that attention itself makes of several tokens are rotated, at their home."""
        return False

    @property
    def has_state(self) -> bool:
        """Whether sequences keep a state of fixed size, instead of KV or beside it."""
        return False

    @property
    def cache_window(self) -> int | None:
        """Last tokens outside of which nothing is needed in the KV cache; None for all."""
        return None

    @property
    def allows_int8_kv(self) -> bool:
        return not self.cache_width

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes that a sequence of any length keeps."""
        del element_bytes
        return 0

    def within(self, length: int) -> Self:
        """The same for sequences of at most so many tokens: without an indexer that chooses all."""
        del length
        return self

    def with_state_dtype(self, dtype: str) -> Self:
        """The same with the matrices of states in another type."""
        del dtype
        return self

    def with_table_dtype(self, dtype: str) -> Self:
        """The same with tables of n-grams in another type."""
        del dtype
        return self

    def shard(self, ranks: Ranks) -> Self:
        """The part of one of several ranks."""
        raise NotImplementedError(f"{type(self).__name__} is not divided between ranks")
