"""PassLoad: what one pass of a job computes, and how it falls to waves."""

from dataclasses import dataclass
from math import ceil

from raymoe.plan.wave import AttentionShape, WaveShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLoad:
    """Tokens of a pass; means may be fractions.

    Attributes:
        decode_rows: Sequences that decode a token.
        decode_context: Tokens of each of them, its new one included.
        prompt_tokens: Prompt tokens.
        prompt_chunk: Prompt tokens of one sequence in the pass.
    """

    decode_rows: float = 0.0
    decode_context: float = 0.0
    prompt_tokens: float = 0.0
    prompt_chunk: float = 1.0

    @property
    def tokens(self) -> float:
        """All tokens."""
        return self.decode_rows + self.prompt_tokens

    def waves(self, num_waves: int, cpu_attention_fraction: float) -> tuple[WaveShape, ...]:
        """The pass dealt to waves: whole chunks in turn, then decoding rows where there is room.

        As `runtime.waves` deals them (MoE-Lightning, algorithm 2), with means for sequences.
        """
        chunks = _deal_chunks(self.prompt_tokens, self.prompt_chunk, num_waves)
        rows = _fill(chunks, self.decode_rows)
        return tuple(
            WaveShape.decode(decoding, self.decode_context, cpu_attention_fraction)
            + _prompts(tokens, self.prompt_chunk)
            for decoding, tokens in zip(rows, chunks, strict=True)
        )


def _deal_chunks(tokens: float, chunk: float, num_waves: int) -> list[float]:
    """Prompt tokens of each wave; the first ones have the most."""
    if tokens <= 0:
        return [0.0] * num_waves
    num_chunks = max(1, ceil(tokens / chunk))
    mean = tokens / num_chunks
    counts = [
        num_chunks // num_waves + (wave < num_chunks % num_waves) for wave in range(num_waves)
    ]
    return [mean * count for count in counts]


def _fill(loads: list[float], rows: float) -> list[float]:
    """Rows of each wave such that the smallest waves grow to one level."""
    order = sorted(range(len(loads)), key=lambda wave: loads[wave])
    shares = [0.0] * len(loads)
    if not rows:  # rounding would leave a wave with less than nothing, or more
        return shares
    for count in range(len(loads), 0, -1):
        chosen = order[:count]
        level = (rows + sum(loads[wave] for wave in chosen)) / count
        if level >= loads[chosen[-1]]:
            for wave in chosen:
                shares[wave] = level - loads[wave]
            break
    return shares


def _prompts(tokens: float, chunk: float) -> WaveShape:
    chunk = min(chunk, tokens) or 1.0
    return WaveShape(
        device=AttentionShape(
            rows=tokens, prompt_pairs=tokens * (chunk + 1) / 2, context_tokens=tokens
        ),
        logit_rows=tokens / chunk,
    )
