"""What an engine did so far, for logs, progress and reports."""

import time
from dataclasses import dataclass

import numpy as np

from raymoe.engine.sequence import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        num_finished_rows: Rows with a generation, error rows included.
        num_error_rows: Rows that could not be generated.
        num_queued_rows: Rows that wait for a slot.
        num_live_sequences: Sequences with KV blocks.
        num_free_blocks: KV blocks without an owner.
        num_passes: Passes run.
        num_computed_tokens: Prompt and generated tokens computed, recomputation included.
        num_generated_tokens: Tokens of finished samples.
        num_preemptions: Sequences that gave up their blocks and were computed again.
        busy_s: Time in passes.
        generated_tokens_per_s: Over the time in passes and between them, idle time left out.
    """

    num_finished_rows: int
    num_error_rows: int
    num_queued_rows: int
    num_live_sequences: int
    num_free_blocks: int
    num_passes: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    busy_s: float
    generated_tokens_per_s: float


class Counters:
    """Sums over all passes; the engine thread counts, others read."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.num_computed_tokens = 0
        self.num_sampled_tokens = 0
        self.num_generated_tokens = 0
        self.pass_s = 0.0
        self.active_s = 0.0

    def record_pass(self, done: Pass, pass_s: float) -> None:
        """Count a pass."""
        self.num_passes += 1
        self.num_computed_tokens += done.num_tokens
        self.num_sampled_tokens += int(np.count_nonzero(done.row_is_sample))
        self.pass_s += pass_s

    def time_step(self, begin_s: float) -> None:
        """Count the time since `begin_s`, scheduling and sampling included."""
        self.active_s += time.perf_counter() - begin_s
