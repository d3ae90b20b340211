"""What a job is predicted to take from its start to its end, in the words of its task."""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from raymoe.plan.plan import Plan
from raymoe.units import format_money, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

START_S = 10.0  # processes, imports, tokenizer
# A local disk or a good network disk; pages that memory still holds come sooner.
READ_BYTES_PER_S = 1e9
# Rows are written while others are computed; this is what the last part and joining take.
WRITE_BYTES_PER_S, WRITE_S = 50e6, 0.5
ROWS_OF_A_PART, BYTES_PER_TOKEN = 8192, 5  # text of a token, and its id


def roughly(seconds: float) -> str:
    """Format a guess, in whole seconds."""
    whole = ceil(seconds)
    return f"{whole} s" if whole < 60 else format_seconds(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of the parts of a job, and its rate.

    Attributes:
        loading_s: From the start of the command to the first step; a guess, as no disk is measured.
        running_s: All steps, by the plan.
        writing_s: What is left to write after the last step.
        tokens_per_s: Of all nodes while they run: generated, or read where nothing is generated.
        generates: Whether tokens are generated.
    """

    loading_s: float
    running_s: float
    writing_s: float
    tokens_per_s: float
    generates: bool = True

    @classmethod
    def of(cls, plan: Plan, num_engines: int = 1) -> "Prediction":
        """The prediction of a job whose rows so many engines share, each by this plan."""
        workload = plan.workload
        tokens = workload.context_tokens * BYTES_PER_TOKEN
        last_rows = min(num_engines * workload.num_rows, ROWS_OF_A_PART)
        return cls(
            loading_s=START_S + plan.num_ranks * plan.weight_bytes / READ_BYTES_PER_S,
            running_s=plan.job.seconds,
            writing_s=WRITE_S + last_rows * tokens / WRITE_BYTES_PER_S,
            tokens_per_s=num_engines * plan.rate,
            generates=workload.generates,
        )

    @classmethod
    def together(cls, parts: "Sequence[Prediction]") -> "Prediction":
        """The prediction of a job whose rows engines of several kinds share, from that of each."""
        return cls(
            loading_s=max(part.loading_s for part in parts),
            running_s=max(part.running_s for part in parts),
            writing_s=max(part.writing_s for part in parts),
            tokens_per_s=sum(part.tokens_per_s for part in parts),
            generates=parts[0].generates,
        )

    @property
    def seconds(self) -> float:
        """From the start of the command to its end."""
        return self.loading_s + self.running_s + self.writing_s

    @property
    def verb(self) -> str:
        return "generate" if self.generates else "read"

    @property
    def unit(self) -> str:
        """Of `tokens_per_s`."""
        return "generated tokens/s" if self.generates else "prompt tokens/s"

    @property
    def parts(self) -> str:
        """Seconds of each part as text."""
        return (
            f"about {roughly(self.loading_s)} to load, {format_seconds(self.running_s)} to "
            f"{self.verb}, {roughly(self.writing_s)} to write"
        )

    @property
    def speed(self) -> str:
        """Tokens per second as text."""
        return f"{self.tokens_per_s:,.0f} {self.unit}"

    def cost(self, price_per_hour: float, num_nodes: int = 1) -> float:
        """Cost of the nodes while they run, with the price of one."""
        return price_per_hour * num_nodes * self.running_s / 3600

    def rent(self, price_per_hour: float, num_nodes: int = 1) -> float:
        """The same with the time in which they load the model."""
        return price_per_hour * num_nodes * (self.loading_s + self.running_s) / 3600

    def cost_per_million(self, price_per_hour: float, num_nodes: int = 1) -> float:
        """Cost while they run, for a million of the tokens that `tokens_per_s` counts."""
        tokens = self.running_s * self.tokens_per_s
        return 1e6 * self.cost(price_per_hour, num_nodes) / tokens

    def cost_text(self, price_per_hour: float, currency: str, num_nodes: int = 1) -> str:
        """Both costs as text."""
        cost = format_money(self.cost(price_per_hour, num_nodes), currency)
        million = format_money(self.cost_per_million(price_per_hour, num_nodes), currency)
        return f"{cost} in all, {million} per million {self.unit.removesuffix('/s')}"
