"""What an engine did so far, for logs, progress and reports."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # readers of snapshots need no numba
    from raymoe.engine.sequence import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        num_finished_rows: Rows with a generation, error rows included.
        num_error_rows: Rows that could not be generated.
        num_queued_rows: Rows that wait for a slot.
        num_live_sequences: Sequences with KV blocks.
        num_slots: Sequences that can have KV blocks at once.
        num_free_blocks: KV blocks without an owner.
        num_kv_blocks: All KV blocks.
        num_passes: Passes run.
        num_computed_tokens: Prompt and generated tokens computed, recomputation included.
        num_prompt_tokens: Those of them that belong to prompts.
        num_cached_tokens: Prompt tokens of finished samples that were not computed but found.
        num_generated_tokens: Tokens sampled.
        num_preemptions: Sequences that gave up their blocks and were computed again.
        busy_s: Time in passes.
        predicted_s: What the plan's cost model predicted for them; 0 without a plan.
        link_s: Time in them that the link to the device was busy.
        generated_tokens_per_s: Over the time in passes and between them, idle time left out.
    """

    num_finished_rows: int
    num_error_rows: int
    num_queued_rows: int
    num_live_sequences: int
    num_slots: int
    num_free_blocks: int
    num_kv_blocks: int
    num_passes: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    busy_s: float
    predicted_s: float
    link_s: float
    generated_tokens_per_s: float

    @property
    def pool_fill(self) -> float:
        """Share of the slots in use, 0..1."""
        return self.num_live_sequences / max(1, self.num_slots)

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks in use, 0..1."""
        return 1.0 - self.num_free_blocks / max(1, self.num_kv_blocks)

    @property
    def link_busy(self) -> float:
        """Share of the time in passes that the link to the device was busy, 0..1."""
        return self.link_s / self.busy_s if self.busy_s else 0.0


class Counters:
    """Sums over all passes; the engine thread counts, others read."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.num_computed_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_sampled_tokens = 0
        self.num_generated_tokens = 0
        self.pass_s = 0.0
        self.active_s = 0.0

    def record_pass(self, done: "Pass", pass_s: float) -> None:
        """Count a pass."""
        self.num_passes += 1
        self.num_computed_tokens += done.num_tokens
        self.num_prompt_tokens += int((done.positions < done.prompt_tokens).sum())
        self.num_sampled_tokens += int(done.row_is_sample.sum())
        self.pass_s += pass_s

    def time_step(self, begin_s: float) -> None:
        """Count the time since `begin_s`, scheduling and sampling included."""
        self.active_s += time.perf_counter() - begin_s
