"""Operations and bytes of attention, per pair of tokens, token and sequence."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention on one side, host or device; means may be fractions."""

    rows: float = 0.0  # new tokens, whose KV is appended and which attend
    decode_rows: float = 0.0  # decoding tokens among `rows`
    pairs: float = 0.0  # pairs of a decoding token and a token it attends to
    prompt_pairs: float = 0.0  # pairs of a prompt token and a token it attends to
    context_tokens: float = 0.0  # tokens whose KV is read, summed over sequences, new ones included

    def __post_init__(self) -> None:
        for name in ("rows", "decode_rows", "pairs", "prompt_pairs", "context_tokens"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"AttentionShape.{name} is {value!r}; it must not be negative")
        if self.context_tokens < self.rows:
            raise ConfigError(
                f"AttentionShape.context_tokens is {self.context_tokens!r}, fewer than the "
                f"{self.rows!r} new tokens that it includes"
            )

    @property
    def past_tokens(self) -> float:
        return self.context_tokens - self.rows

    @property
    def of_decoding(self) -> "AttentionShape":
        """The decoding tokens alone, each of which attends to all of its context."""
        return AttentionShape(
            rows=self.decode_rows,
            decode_rows=self.decode_rows,
            pairs=self.pairs,
            context_tokens=self.pairs,
        )

    def within(self, window: int | None) -> "AttentionShape":
        """The same attention with a sliding window; prompts are taken from their start."""
        if window is None:
            return self
        unseen = max(0.0, self.pairs - window * self.decode_rows)
        prompt_pairs, prompt_rows = self.prompt_pairs, self.rows - self.decode_rows
        if prompt_rows:
            length = 2 * prompt_pairs / prompt_rows - 1  # a token sees half of its prompt
            if length > window:
                prompt_pairs = prompt_rows * (window - window * (window - 1) / (2 * length))
        return replace(
            self,
            pairs=self.pairs - unseen,
            prompt_pairs=prompt_pairs,
            context_tokens=self.context_tokens - unseen,
        )

    def __add__(self, other: "AttentionShape") -> "AttentionShape":
        return AttentionShape(
            rows=self.rows + other.rows,
            decode_rows=self.decode_rows + other.decode_rows,
            pairs=self.pairs + other.pairs,
            prompt_pairs=self.prompt_pairs + other.prompt_pairs,
            context_tokens=self.context_tokens + other.context_tokens,
        )


class RecentRows(NamedTuple):
    """Last rows of a sequence, which a layer's state has and attention reads besides KV.

    Attributes:
        window: How many there are at most.
        pair_flop: Operations per pair of a token and a row that it sees.
        row_bytes: Bytes of a row.
        pooled_bytes: What entries are made of: bytes of a new token.
        sum_bytes: Bytes of open windows in the state, which a decoding token reads and writes.
    """

    window: int
    pair_flop: int
    row_bytes: int
    pooled_bytes: int
    sum_bytes: int


class ElementBytes(NamedTuple):
    """Bytes of an element."""

    activation: int
    kv: int


class StateWork(NamedTuple):
    """A state of fixed size that each sequence keeps.

    Attributes:
        num_bytes: Of a sequence.
        token_flop: Operations per token.
        recent: What of it attention reads; None: every token reads and writes all of it, and there
            is no other attention.
    """

    num_bytes: int
    token_flop: int
    recent: RecentRows | None = None


class Choice(NamedTuple):
    """How a layer chooses the tokens that it attends to.

    Attributes:
        num_chosen: Tokens that a token attends to at most.
        pair_flop: Operations to score a pair of a token and one of its context; 0 where the layer
            takes the choice of another.
        token_bytes: Of an index key, which is a part of the token's KV.
        copies: Whether cores copy what a decoding token chose before they attend.
    """

    num_chosen: int
    pair_flop: int
    token_bytes: int
    copies: bool = False


class AttentionAmounts(NamedTuple):
    """Operations of decoding and of prompt tokens, and bytes read and appended."""

    decode_flop: float
    prompt_flop: float
    read_bytes: float
    appended_bytes: float  # read and written

    @property
    def flop(self) -> float:
        return self.decode_flop + self.prompt_flop


class AttentionWork(NamedTuple):
    """Operations and bytes of a layer's attention.

    Attributes:
        query_width: Elements of a decoding token's queries.
        output_width: Elements of a token's result.
        token_sizes: Elements of the buffers of a token (`TokenShapes.sizes`).
        pair_flop: Operations per pair of a decoding token and a context token, all heads.
        prompt_pair_flop: The same for a prompt token.
        window: Tokens that a token attends to at most; None for all.
        choice: None where a token attends to all that it sees.
        state: None where there is only KV.
    """

    query_width: int
    output_width: int
    token_sizes: tuple[int, ...]
    pair_flop: int = 0
    prompt_pair_flop: int = 0
    kv_token_bytes: int = 0
    window: int | None = None
    choice: Choice | None = None
    state: StateWork | None = None

    @property
    def recent(self) -> RecentRows | None:
        return None if self.state is None else self.state.recent

    @property
    def is_scan(self) -> bool:
        """Whether all that a layer does is to read and write the state of each sequence."""
        return self.state is not None and self.state.recent is None

    @property
    def state_bytes(self) -> int:
        return 0 if self.state is None else self.state.num_bytes

    @property
    def token_flop(self) -> int:
        """Operations per token on a state."""
        return 0 if self.state is None else self.state.token_flop

    @property
    def updated_bytes(self) -> int:
        """Bytes of a sequence's state that a decoding token reads and writes."""
        recent = self.recent
        return self.state_bytes if recent is None else recent.sum_bytes

    @property
    def num_chosen(self) -> int | None:
        return None if self.choice is None else self.choice.num_chosen

    @property
    def when_choosing(self) -> "AttentionWork":
        """The work in long contexts: prompts use the absorbed form as well."""
        return self._replace(prompt_pair_flop=self.pair_flop)

    def of(self, share: AttentionShape) -> AttentionAmounts:
        """What to attend to KV, and to recent rows, takes; `share` is within the window."""
        decode_flop = float(self.pair_flop * share.pairs)
        prompt_flop = float(self.prompt_pair_flop * share.prompt_pairs)
        read = self.kv_token_bytes * share.context_tokens
        appended = 2 * self.kv_token_bytes * share.rows
        if (recent := self.recent) is not None:
            near = share.within(recent.window)
            decode_flop += recent.pair_flop * near.pairs
            prompt_flop += recent.pair_flop * near.prompt_pairs
            read += recent.row_bytes * near.context_tokens
            appended += (2 * recent.row_bytes + recent.pooled_bytes) * share.rows
            appended += 2 * recent.sum_bytes * share.decode_rows
        return AttentionAmounts(decode_flop, prompt_flop, read, appended)
