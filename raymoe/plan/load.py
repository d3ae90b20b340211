"""PassLoad: what one pass of a job computes, and how it falls to waves; passes that are alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

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
        deals = list(zip(_fill(chunks, self.decode_rows), chunks, strict=True))
        shapes = {
            deal: WaveShape.decode(deal[0], self.decode_context, cpu_attention_fraction)
            + _prompts(deal[1], self.prompt_chunk)
            for deal in set(deals)
        }
        return tuple(shapes[deal] for deal in deals)  # equal waves are one object


class Passes(NamedTuple):
    """Passes of one load, and how many they are; a mean may be a fraction."""

    load: PassLoad
    number: float


# Of the largest load, in each of its numbers. With three, a job takes 8 passes to simulate and is
# as long as with every pass of its own: to 0.1 % in the mean over random jobs, and 3 % at most.
CELLS = 3


def alike(passes: Sequence[Passes]) -> list[Passes]:
    """The same passes with one mean load for all whose loads are alike."""
    most = PassLoad(
        decode_rows=max(load.decode_rows for load, _ in passes),
        decode_context=max(load.decode_context for load, _ in passes),
        prompt_tokens=max(load.prompt_tokens for load, _ in passes),
    )
    cells: dict[tuple[int, int, int], _Sum] = {}
    for load, count in passes:
        cell = (
            _cell(load.decode_rows, most.decode_rows),
            _cell(load.decode_context, most.decode_context),
            _cell(load.prompt_tokens, most.prompt_tokens),
        )
        cells.setdefault(cell, _Sum()).add(load, count)
    return [total.mean() for total in cells.values()]


def _cell(value: float, most: float) -> int:
    """Nothing is a cell of its own: weights travel for a single token, too."""
    return ceil(CELLS * value / most) if value else 0


@dataclass(slots=True)
class _Sum:
    """Passes and what they hold together."""

    count: float = 0.0
    rows: float = 0.0
    pairs: float = 0.0
    prompt_tokens: float = 0.0
    chunks: float = 0.0

    def add(self, load: PassLoad, count: float) -> None:
        rows = count * load.decode_rows
        self.count += count
        self.rows += rows
        self.pairs += rows * load.decode_context
        self.prompt_tokens += count * load.prompt_tokens
        self.chunks += count * load.prompt_tokens / load.prompt_chunk

    def mean(self) -> Passes:
        load = PassLoad(
            decode_rows=self.rows / self.count,
            decode_context=self.pairs / self.rows if self.rows else 0.0,
            prompt_tokens=self.prompt_tokens / self.count,
            prompt_chunk=self.prompt_tokens / self.chunks if self.chunks else 1.0,
        )
        return Passes(load, self.count)


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
