"""Footprint: bytes by purpose, and the table that a refusal shows."""

from dataclasses import dataclass

from raymoe.errors import InfeasiblePlanError
from raymoe.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One memory of a plan.

    Attributes:
        memory: Which, such as "host memory".
        parts: Purpose and bytes.
    """

    memory: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(size for _, size in self.parts)

    def bytes_of(self, purpose: str) -> int:
        """Bytes of one purpose."""
        return dict(self.parts)[purpose]

    def table(self) -> str:
        """A line for each purpose and one for the sum."""
        rows = [*self.parts, ("total", self.total)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}{format_bytes(size):>12}" for name, size in rows)

    def check_fits(self, budget_bytes: int, *, what: str, advice: str) -> None:
        """Refuse a plan that is larger than the budget, before anything is allocated.

        Args:
            budget_bytes: How much there is.
            what: What needs the memory, for the message.
            advice: What to do, for the message.

        Raises:
            InfeasiblePlanError: With the table and the bytes missing.
        """
        if self.total <= budget_bytes:
            return
        raise InfeasiblePlanError(
            f"{what} needs {format_bytes(self.total)} of {self.memory}, "
            f"{format_bytes(budget_bytes)} may be used "
            f"({format_bytes(self.total - budget_bytes)} short):\n{self.table()}\n{advice}"
        )
