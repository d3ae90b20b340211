"""Workload: how many rows of which lengths. Pure data."""

from dataclasses import dataclass

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The rows of a job.

    Attributes:
        num_rows: Rows that are there at once; more arrive as these end.
        prompt_tokens: Mean prompt length.
        generated_tokens: Mean number of generated tokens.
    """

    num_rows: int
    prompt_tokens: int
    generated_tokens: int

    def __post_init__(self) -> None:
        for field in ("num_rows", "prompt_tokens", "generated_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(f"Workload.{field} is {value!r}; it must be at least 1")

    @property
    def context_tokens(self) -> int:
        """Tokens of a row at its end."""
        return self.prompt_tokens + self.generated_tokens
