from dataclasses import dataclass, replace
from functools import cached_property

from raymoe.errors import ConfigError
from raymoe.units import ceil_div

TASKS = ("generate", "score", "classify", "embed")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The rows of a job.

    Examples:
        >>> job = raymoe.Workload(num_rows=10_000, prompt_tokens=418, generated_tokens=128)
        >>> job.share(4).num_rows  # of one of four nodes
        2500

    Attributes:
        num_rows: Rows available at once; more arrive as these end.
        generated_tokens: Mean per row.
        row_lengths: (prompt, generated) tokens of typical rows, repeated as needed; empty if only
            the means are known.
        shared_prompt_tokens: Mean per row of those at the begin of its prompt that an earlier row
            has too, so that they are found in the KV cache.
        generates: False if rows are only read, as by the tasks score, classify and embed;
            generated_tokens is then 1, the position whose output is used.
    """

    num_rows: int
    prompt_tokens: int
    generated_tokens: int
    row_lengths: tuple[tuple[int, int], ...] = ()
    shared_prompt_tokens: int = 0
    generates: bool = True

    def __post_init__(self) -> None:
        for field in ("num_rows", "prompt_tokens", "generated_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(f"Workload.{field} is {value!r}; it must be at least 1")
        if not 0 <= self.shared_prompt_tokens < self.prompt_tokens:
            raise ConfigError(
                f"Workload.shared_prompt_tokens is {self.shared_prompt_tokens!r}; it must be at "
                f"least 0 and less than prompt_tokens, which is {self.prompt_tokens}"
            )
        for lengths in self.row_lengths:
            if min(lengths) < 1:
                raise ConfigError(f"Workload.row_lengths has {lengths!r}; lengths are at least 1")

    @classmethod
    def of_rows(
        cls, row_lengths: tuple[tuple[int, int], ...], shared_prompt_tokens: float = 0.0
    ) -> "Workload":
        """A job whose rows are known; raises ConfigError without rows or tokens."""
        if not row_lengths:
            raise ConfigError("Workload.of_rows needs at least one row")
        count = len(row_lengths)
        prompt_tokens = max(1, round(sum(prompt for prompt, _ in row_lengths) / count))
        return cls(
            num_rows=count,
            prompt_tokens=prompt_tokens,
            generated_tokens=max(1, round(sum(tokens for _, tokens in row_lengths) / count)),
            row_lengths=row_lengths,
            shared_prompt_tokens=min(round(shared_prompt_tokens), prompt_tokens - 1),
        )

    def without_generation(self) -> "Workload":
        """The same rows, only read."""
        rows = tuple((prompt, 1) for prompt, _ in self.row_lengths)
        return replace(self, generated_tokens=1, row_lengths=rows, generates=False)

    def share(self, count: int) -> "Workload":
        """The rows of one of `count` equal nodes."""
        return replace(self, num_rows=ceil_div(self.num_rows, count))

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    @property
    def held_tokens(self) -> int:
        """Mean tokens that a row holds alone in the KV cache at its end."""
        return self.computed_prompt_tokens + self.generated_tokens

    @property
    def computed_prompt_tokens(self) -> int:
        """Mean prompt tokens that a row computes, and holds alone in the KV cache."""
        return self.computed(self.prompt_tokens)

    def computed(self, prompt_tokens: int) -> int:
        """Those of a prompt of this length; the last token is always computed."""
        return max(1, prompt_tokens - self.shared_prompt_tokens)

    @cached_property
    def longest_prompt_tokens(self) -> int:
        return max((prompt for prompt, _ in self.row_lengths), default=self.prompt_tokens)

    @cached_property
    def total_prompt_tokens(self) -> float:
        return self.num_rows * self._mean(0)

    @cached_property
    def total_computed_prompt_tokens(self) -> float:
        prompts = [prompt for prompt, _ in self.row_lengths] or [self.prompt_tokens]
        return self.num_rows * sum(map(self.computed, prompts)) / len(prompts)

    @cached_property
    def total_generated_tokens(self) -> float:
        return self.num_rows * self._mean(1)

    def prompt_spread(self, max_chunk_tokens: int) -> float:
        """`StepLoad.prompt_spread` of chunks of these prompts."""
        prompts = [prompt for prompt, _ in self.row_lengths] or [self.prompt_tokens]
        chunks = [min(self.computed(prompt), max_chunk_tokens) for prompt in prompts]
        pairs = sum(chunk * (chunk + 2 * self.shared_prompt_tokens) for chunk in chunks)
        return len(chunks) * pairs / sum(chunks) ** 2

    def lengths(self, row: int) -> tuple[int, int]:
        if self.row_lengths:
            return self.row_lengths[row % len(self.row_lengths)]
        return self.prompt_tokens, self.generated_tokens

    def _mean(self, which: int) -> float:
        if self.row_lengths:
            return sum(lengths[which] for lengths in self.row_lengths) / len(self.row_lengths)
        return (self.prompt_tokens, self.generated_tokens)[which]
