"""Footprint: bytes by purpose, and the table that a refusal shows."""

from dataclasses import dataclass

from raymoe.errors import InfeasiblePlanError
from raymoe.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Host memory of a plan, in bytes.

    Attributes:
        weights: The weights in the form the kernels read, mapped or packed.
        kv_cache: The KV cache.
        activations: Buffers of the largest pass, logits included.
        runtime: Interpreter, libraries, tokenizer, request state.
    """

    weights: int
    kv_cache: int
    activations: int
    runtime: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.activations + self.runtime

    def table(self) -> str:
        """A line for each purpose and one for the sum."""
        rows = [
            ("weights", self.weights),
            ("KV cache", self.kv_cache),
            ("activations", self.activations),
            ("runtime", self.runtime),
            ("total", self.total),
        ]
        return "\n".join(f"  {name:<12}{format_bytes(size):>12}" for name, size in rows)

    def check_fits(self, budget_bytes: int, *, what: str) -> None:
        """Refuse a plan that is larger than the budget, before anything is allocated.

        Raises:
            InfeasiblePlanError: With the table and the bytes missing.
        """
        if self.total <= budget_bytes:
            return
        raise InfeasiblePlanError(
            f"{what} needs {format_bytes(self.total)} of host memory, "
            f"{format_bytes(budget_bytes)} may be used "
            f"({format_bytes(self.total - budget_bytes)} short):\n{self.table()}\n"
            "Reduce batch_size, num_kv_blocks or max_context_tokens, raise host_memory_bytes, or "
            "choose a node with more memory."
        )
