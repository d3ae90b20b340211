"""WaveShape: what one wave of a pass holds, in the numbers that costs depend on."""

from dataclasses import dataclass
from typing import Self

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveShape:
    """Tokens of a wave: decode rows, whose attention is on the CPU or split, and prompt tokens.

    Attributes:
        decode_rows: Sequences that decode one token.
        decode_context_tokens: Context tokens that their attention reads, summed over the rows.
        prefill_tokens: Prompt tokens; their attention is on the device.
        prefill_pairs: Pairs of a prompt token and a context token that it sees.
        logit_rows: Tokens whose logits are computed.
        cpu_attention_fraction: Share of the decode attention on the CPU, 0..1; the device has the
            rest (omega of MoE-Gen, equation 1).
    """

    decode_rows: int = 0
    decode_context_tokens: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    logit_rows: int = 0
    cpu_attention_fraction: float = 1.0

    def __post_init__(self) -> None:
        counts = ("decode_rows", "decode_context_tokens", "prefill_tokens", "prefill_pairs")
        for field in (*counts, "logit_rows"):
            value = getattr(self, field)
            if value < 0:
                raise ConfigError(f"WaveShape.{field} is {value!r}; it must not be negative")
        if not 0.0 <= self.cpu_attention_fraction <= 1.0:
            raise ConfigError(
                f"WaveShape.cpu_attention_fraction is {self.cpu_attention_fraction!r}; "
                "it must be between 0 and 1"
            )

    @classmethod
    def decode(cls, rows: int, context: int, cpu_attention_fraction: float = 1.0) -> Self:
        """One token for each of `rows` sequences that are `context` tokens long."""
        return cls(
            decode_rows=rows,
            decode_context_tokens=rows * context,
            logit_rows=rows,
            cpu_attention_fraction=cpu_attention_fraction,
        )

    @classmethod
    def prefill(cls, rows: int, prompt: int) -> Self:
        """The whole prompt of `rows` sequences."""
        return cls(
            prefill_tokens=rows * prompt,
            prefill_pairs=rows * prompt * (prompt + 1) // 2,
            logit_rows=rows,
        )

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.decode_rows + self.prefill_tokens

    @property
    def cpu_rows(self) -> float:
        """Decode rows whose attention is on the CPU."""
        return self.cpu_attention_fraction * self.decode_rows

    @property
    def cpu_context_tokens(self) -> float:
        """Context tokens that the CPU's share reads."""
        return self.cpu_attention_fraction * self.decode_context_tokens

    @property
    def device_rows(self) -> float:
        """Decode rows whose attention is on the device."""
        return self.decode_rows - self.cpu_rows

    @property
    def device_context_tokens(self) -> float:
        """Context tokens that the device's share reads."""
        return self.decode_context_tokens - self.cpu_context_tokens
