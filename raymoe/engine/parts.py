"""What an engine is put together from; loaded from a model, or made by a test."""

from collections.abc import Callable
from dataclasses import dataclass

from raymoe.engine.core import Runner
from raymoe.engine.tokenizer import Tokenizer
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy


def nothing() -> None:
    """There is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A loaded model and its sizes.

    Attributes:
        runner: Computes passes.
        policy: Sizes of passes and of the KV cache.
        tokenizer: Of the model.
        vocab_size: Of the model.
        max_context_tokens: Prompt and generated tokens of a row.
        eos_token_ids: Tokens that end a row.
        num_threads: Of the native kernels.
        num_torch_threads: Of torch; None takes as many.
        plan: What was planned, if it was.
        shares_across_lengths: Whether prompts of different lengths that begin alike have the same
            KV there; not where rotary embeddings depend on the length.
        release: Called once when the engine has ended: gives memory back.
        interrupt: Called when a pass is stuck: ends what it may be waiting for, so that it fails.
    """

    runner: Runner
    policy: Policy
    tokenizer: Tokenizer
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    num_threads: int
    num_torch_threads: int | None = None
    plan: Plan | None = None
    shares_across_lengths: bool = True
    release: Callable[[], None] = nothing
    interrupt: Callable[[], None] = nothing

    def close(self) -> None:
        """Give back what the parts hold."""
        self.tokenizer.close()
        self.release()
