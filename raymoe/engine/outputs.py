"""Results of an engine: generations, and statistics of its steps."""

import dataclasses
import reprlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raymoe.errors import ExecutionError, describe

if TYPE_CHECKING:
    from raymoe.chat.tool_calls import ToolCall
    from raymoe.engine.sequence import SchedulerOutput
    from raymoe.output_schema import OutputSchema

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxtuple, _SHORT.maxdict = 8, 12

SLICE_ROWS = 32  # of logits, of which there are float32 copies at once


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token under the model's distribution before any processing.

    Attributes:
        top: The most probable tokens and their log probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Generation:
    """The answer to one prompt.

    Examples:
        >>> generation = raymoe.Generation(text="2024-03-05", num_generated_tokens=8)
        >>> generation.finish_reason, generation.error
        ('stop', '')

    Attributes:
        text: Decoded without special tokens, cut before a stop string.
        token_ids: Generated tokens, the final stop token included.
        finish_reason: "stop" (EOS, stop token or stop string), "length" or "error".
        num_input_tokens: Tokens of the prompt, after truncation.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        logprobs: One entry per token of `token_ids`, if requested.
        prompt_logprobs: One entry per token of the prompt, None for the first.
        error: "" if fine, else "Type: message".
        others: Samples 1 to n - 1; this one is sample 0.
        outputs: All samples, of which this one is the first.
        values: What a task besides generation found, by the name of its column.
        prompt_end: The end of a rendered chat; "" for other prompts.
        reasoning: What `MoEGenerator` has split from the text; None where there is none.
        tool_calls: The same of calls.
        parsed: The value of the text under an `output_schema`: a dict, or an instance of the
            pydantic class that was given; None where there is none.
        parsed_error: Why there is no value, and where in the text; "" if there is one.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str = ""
    others: tuple["Generation", ...] = ()
    values: Mapping[str, Any] | None = None
    prompt_end: str = ""
    reasoning: str | None = None
    tool_calls: tuple["ToolCall", ...] = ()
    parsed: Any = None
    parsed_error: str = ""

    @property
    def outputs(self) -> tuple["Generation", ...]:
        return (self, *self.others)

    @property
    def num_tokens_of_outputs(self) -> int:
        """Generated tokens of all samples."""
        return sum(sample.num_generated_tokens for sample in self.outputs)

    def parsed_as(
        self, schema: "OutputSchema", find_problem: Callable[[str], str] | None = None
    ) -> "Generation":
        """Return the generation and its samples with the values of their texts.

        `find_problem` is that of `OutputSchema.parse`.
        """
        value, error = None, self.error
        if not error:
            error = self._missing_answer()
        if not error:
            value, error = schema.parse(self.text, self.finish_reason, find_problem)
        others = tuple(other.parsed_as(schema, find_problem) for other in self.others)
        return dataclasses.replace(self, parsed=value, parsed_error=error, others=others)

    def after(self, step: Callable[["Generation"], "Generation"]) -> "Generation":
        """Return what a step makes of the answer, or its error row if the step raises.

        Every step between the engine and the caller goes through here, so that what is in one
        row costs no other row anything.

        Raises:
            ExecutionError: The engine was closed, which is no row's fault.
        """
        try:
            return step(self)
        except ExecutionError:
            raise
        except Exception as error:
            return Generation.from_error(error, self.num_input_tokens)

    def _missing_answer(self) -> str:
        if self.reasoning is None or self.text.strip():
            return ""
        if self.finish_reason == "length":
            return "cut by max_tokens within the reasoning, before the answer: raise max_tokens"
        return "there is no answer after the reasoning"

    def __repr__(self) -> str:
        """Fields that differ from their defaults; long values are cut."""
        shown = (
            f"{one.name}={_SHORT.repr(getattr(self, one.name))}"
            for one in dataclasses.fields(self)
            if one.name == "text" or getattr(self, one.name) is not one.default
        )
        return f"Generation({', '.join(shown)})"

    @classmethod
    def from_error(cls, error: Exception, num_input_tokens: int = 0) -> "Generation":
        return cls(
            finish_reason="error",
            num_input_tokens=num_input_tokens,
            error=describe(error),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        num_finished_rows: Rows with a generation, error rows included.
        num_queued_rows: Rows that wait for a slot.
        num_slots: Sequences that can have KV blocks at once.
        num_computed_tokens: Prompt and generated tokens computed, recomputation included.
        num_prompt_tokens: Prompt tokens among `num_computed_tokens`.
        num_cached_tokens: Prompt tokens of finished samples from the prefix cache.
        num_evicted_blocks: KV blocks with prefixes that were lost to others.
        num_preemptions: Sequences that lost their blocks and were recomputed.
        predicted_s: The cost model's prediction for all steps; 0 without a plan.
        link_s: Busy time of the link to the device during steps.
        generated_tokens_per_s: Over the time in and between steps, without idle time.
    """

    num_finished_rows: int
    num_error_rows: int
    num_queued_rows: int
    num_live_sequences: int
    num_slots: int
    num_free_blocks: int
    num_kv_blocks: int
    num_steps: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_evicted_blocks: int
    num_preemptions: int
    busy_s: float
    predicted_s: float
    link_s: float
    generated_tokens_per_s: float

    @property
    def pool_fill(self) -> float:
        return self.num_live_sequences / max(1, self.num_slots)

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks in use, 0..1."""
        return 1.0 - self.num_free_blocks / max(1, self.num_kv_blocks)

    @property
    def link_busy(self) -> float:
        """Share of step time in which the link to the device was busy, 0..1."""
        return self.link_s / self.busy_s if self.busy_s else 0.0


class Counters:
    """Sums over all steps; the engine thread counts, other threads read."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_computed_tokens = self.max_step_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_sampled_tokens = 0
        self.num_generated_tokens = 0
        self.step_s = 0.0
        self.active_s = 0.0

    def record_step(self, done: "SchedulerOutput", step_s: float) -> None:
        self.num_steps += 1
        sequences, num_new = done.batch.sequences, done.num_scheduled_tokens
        num_of_prompts = sequences.prompt_tokens - (sequences.context_tokens - num_new)
        num_tokens = len(done.batch.token_ids)
        self.num_computed_tokens += num_tokens
        self.max_step_tokens = max(self.max_step_tokens, num_tokens)
        self.num_prompt_tokens += int(num_of_prompts.clip(0, num_new).sum())
        self.num_sampled_tokens += int(done.row_is_sample.sum())
        self.step_s += step_s

    def time_step(self, begin_s: float) -> None:
        self.active_s += time.perf_counter() - begin_s


Int32s = npt.NDArray[np.int32]
