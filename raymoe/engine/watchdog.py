"""Notices that the engine thread is stuck: a native kernel that never returns raises nothing."""

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable

from raymoe.plan.device_pass import KV_BLOCK_TOKENS
from raymoe.plan.plan import Plan
from raymoe.plan.work import PassLoad

# A node that does other work too, a first pass that compiles, a predicted length that is wrong:
# none of them makes a pass this much longer, and a restart for nothing costs a load of the model.
STUCK_AFTER_PREDICTIONS, STUCK_AFTER_S = 20, 600.0


class Watchdog:
    """A thread that calls `on_stuck` once when a step takes longer than `limit_s`.

    Args:
        limit_s: Longest step.
        on_stuck: Called from the watchdog's thread with the seconds waited.
    """

    def __init__(self, limit_s: float, on_stuck: Callable[[float], None]) -> None:
        self._limit_s, self._on_stuck = limit_s, on_stuck
        self._changed = threading.Condition()
        self._begin_s: float | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="raymoe-watchdog", daemon=True)
        self._thread.start()

    def step_begins(self) -> None:
        """Start the clock."""
        with self._changed:
            is_asleep = self._begin_s is None
            self._begin_s = time.monotonic()
            if is_asleep:
                self._changed.notify()

    def step_ends(self) -> None:
        """Stop the clock."""
        with self._changed:
            self._begin_s = None

    def close(self) -> None:
        """End and join the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closing:
                if self._begin_s is None:
                    self._changed.wait()
                    continue
                late_s = time.monotonic() - self._begin_s - self._limit_s
                if late_s >= 0:
                    break
                self._changed.wait(-late_s)
            else:
                return
        self._on_stuck(self._limit_s + late_s)


def longest_pass_s(plan: Plan | None) -> float:
    """Seconds after which a pass counts as stuck: many times the longest that the plan predicts.

    That is a pass with every sequence decoding over a full cache, and full of prompts besides.

    Args:
        plan: Of the engine; None where nothing was predicted.
    """
    if plan is None:
        return STUCK_AFTER_S
    policy = plan.policy
    largest = PassLoad(
        decode_rows=policy.batch_size,
        decode_context=max(1.0, policy.num_kv_blocks * KV_BLOCK_TOKENS / policy.batch_size),
        prompt_tokens=policy.pass_tokens,
        prompt_chunk=policy.prefill_chunk_tokens,
    )
    return max(STUCK_AFTER_S, STUCK_AFTER_PREDICTIONS * plan.passes.seconds(largest))


def stacks_of_all_threads() -> str:
    """Where every thread is; a thread in native code shows the call that led there."""
    with tempfile.TemporaryFile() as file:  # faulthandler writes to descriptors only
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
