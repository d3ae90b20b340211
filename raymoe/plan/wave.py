"""WaveShape: what one wave of a pass holds, in the numbers that costs depend on."""

from dataclasses import dataclass, field, replace
from typing import Self

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention of one side, host or device; means may be fractions.

    Attributes:
        rows: New tokens: their KV is appended, they attend.
        decode_rows: Those of them that decode.
        pairs: Pairs of a token that decodes and a token that it sees.
        prompt_pairs: The same of tokens that come several of a sequence at once.
        context_tokens: Tokens whose KV is read, summed over sequences; new ones included.
    """

    rows: float = 0.0
    decode_rows: float = 0.0
    pairs: float = 0.0
    prompt_pairs: float = 0.0
    context_tokens: float = 0.0

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
        """Tokens whose KV was there before."""
        return self.context_tokens - self.rows

    def within(self, window: int | None) -> "AttentionShape":
        """The same in a layer whose tokens see so many tokens at most; prompts begin here."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveShape:
    """Tokens of a wave, by who attends for them.

    Attributes:
        host: For whom the CPU attends.
        device: For whom the device attends.
        logit_rows: Tokens whose logits are computed.
    """

    host: AttentionShape = field(default_factory=AttentionShape)
    device: AttentionShape = field(default_factory=AttentionShape)
    logit_rows: float = 0.0

    def __post_init__(self) -> None:
        if self.logit_rows < 0:
            raise ConfigError(
                f"WaveShape.logit_rows is {self.logit_rows!r}; it must not be negative"
            )

    @classmethod
    def decode(cls, rows: float, context: float, cpu_attention_fraction: float = 1.0) -> Self:
        """One token for each of `rows` sequences that are `context` tokens long with it.

        Args:
            rows: Sequences.
            context: Tokens of each.
            cpu_attention_fraction: Share for which the CPU attends, 0..1 (omega of MoE-Gen,
                equation 1).
        """
        if not 0.0 <= cpu_attention_fraction <= 1.0:
            raise ConfigError(
                f"cpu_attention_fraction is {cpu_attention_fraction!r}; it must be between 0 and 1"
            )
        host_rows = cpu_attention_fraction * rows
        return cls(
            host=_decoding(host_rows, context),
            device=_decoding(rows - host_rows, context),
            logit_rows=rows,
        )

    @classmethod
    def prefill(cls, rows: float, prompt: float) -> Self:
        """The whole prompt of `rows` sequences; the device attends."""
        device = AttentionShape(
            rows=rows * prompt,
            prompt_pairs=rows * prompt * (prompt + 1) / 2,
            context_tokens=rows * prompt,
        )
        return cls(device=device, logit_rows=rows)

    @property
    def tokens(self) -> float:
        """All tokens."""
        return self.host.rows + self.device.rows

    def __add__(self, other: "WaveShape") -> "WaveShape":
        return WaveShape(
            host=self.host + other.host,
            device=self.device + other.device,
            logit_rows=self.logit_rows + other.logit_rows,
        )


def _decoding(rows: float, context: float) -> AttentionShape:
    pairs = rows * context
    return AttentionShape(rows=rows, decode_rows=rows, pairs=pairs, context_tokens=pairs)
