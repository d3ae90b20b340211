"""Lengths of the rows of the GPU suite: those with which offloading systems are published.

MTBench: prompts of 77 tokens in the mean, 418 at most, and 32 to 256 generated tokens
(MoE-Lightning, ASPLOS 2025, section 5 and the results of its artifact). 512 + 256: MoE-Gen (2025),
table 6.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raymoe.specs.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """Lengths of rows; the same for any number of them.

    Attributes:
        least_prompt: Tokens of the shortest prompt.
        mean_prompt: Mean tokens of a prompt.
        most_prompt: Tokens of the longest one.
        generated_tokens: Of each row.
    """

    least_prompt: int
    mean_prompt: int
    most_prompt: int
    generated_tokens: int

    def prompt_lengths(self, num_rows: int) -> list[int]:
        """Tokens of each prompt, in a fixed shuffled order.

        Quantiles of the power law that has the least, the mean and the largest length: the
        published statistics say no more.
        """
        span = self.most_prompt - self.least_prompt
        if not span:
            return [self.least_prompt] * num_rows
        power = span / (self.mean_prompt - self.least_prompt) - 1
        quantiles = (np.arange(num_rows) + 0.5) / num_rows
        lengths = np.rint(self.least_prompt + span * quantiles**power).astype(int)
        return [int(length) for length in np.random.default_rng(7).permutation(lengths)]

    def job(self, num_rows: int) -> Workload:
        """So many rows."""
        lengths = self.prompt_lengths(num_rows)
        return Workload.of_rows(tuple((length, self.generated_tokens) for length in lengths))


def _mtbench(generated_tokens: int) -> RowStatistics:
    return RowStatistics(
        least_prompt=8, mean_prompt=77, most_prompt=418, generated_tokens=generated_tokens
    )


GPU_WORKLOADS: Mapping[str, RowStatistics] = {
    **{f"mtbench-{count}": _mtbench(count) for count in (32, 64, 128, 256)},
    "512-256": RowStatistics(
        least_prompt=512, mean_prompt=512, most_prompt=512, generated_tokens=256
    ),
    # For trying the suite itself.
    "smoke": RowStatistics(least_prompt=4, mean_prompt=12, most_prompt=40, generated_tokens=6),
}
DEFAULT_WORKLOADS = ("mtbench-64", "512-256")
