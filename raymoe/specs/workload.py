from dataclasses import dataclass, replace
from functools import cached_property

from raymoe.errors import ConfigError
from raymoe.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The rows of a job.

    Attributes:
        num_rows: Rows available at once; more arrive as these end.
        generated_tokens: Mean per row.
        row_lengths: (prompt, generated) tokens of typical rows, repeated as needed; empty if only
            the means are known.
    """

    num_rows: int
    prompt_tokens: int
    generated_tokens: int
    row_lengths: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_rows", "prompt_tokens", "generated_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(f"Workload.{field} is {value!r}; it must be at least 1")
        for lengths in self.row_lengths:
            if min(lengths) < 1:
                raise ConfigError(f"Workload.row_lengths has {lengths!r}; lengths are at least 1")

    @classmethod
    def of_rows(cls, row_lengths: tuple[tuple[int, int], ...]) -> "Workload":
        """A job whose rows are known; raises ConfigError without rows or tokens."""
        if not row_lengths:
            raise ConfigError("Workload.of_rows needs at least one row")
        count = len(row_lengths)
        return cls(
            num_rows=count,
            prompt_tokens=max(1, round(sum(prompt for prompt, _ in row_lengths) / count)),
            generated_tokens=max(1, round(sum(tokens for _, tokens in row_lengths) / count)),
            row_lengths=row_lengths,
        )

    def share(self, count: int) -> "Workload":
        """The rows of one of `count` equal nodes."""
        return replace(self, num_rows=ceil_div(self.num_rows, count))

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    @cached_property
    def longest_prompt_tokens(self) -> int:
        return max((prompt for prompt, _ in self.row_lengths), default=self.prompt_tokens)

    @cached_property
    def total_prompt_tokens(self) -> float:
        return self.num_rows * self._mean(0)

    @cached_property
    def total_generated_tokens(self) -> float:
        return self.num_rows * self._mean(1)

    def prompt_spread(self, max_chunk_tokens: int) -> float:
        """Mean chunk of the prompts over their tokens, relative to that over the rows."""
        chunks = [min(prompt, max_chunk_tokens) for prompt, _ in self.row_lengths] or [1]
        return len(chunks) * sum(chunk * chunk for chunk in chunks) / sum(chunks) ** 2

    def lengths(self, row: int) -> tuple[int, int]:
        if self.row_lengths:
            return self.row_lengths[row % len(self.row_lengths)]
        return self.prompt_tokens, self.generated_tokens

    def _mean(self, which: int) -> float:
        if self.row_lengths:
            return sum(lengths[which] for lengths in self.row_lengths) / len(self.row_lengths)
        return (self.prompt_tokens, self.generated_tokens)[which]
