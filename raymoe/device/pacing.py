"""Hold a task back: until a deadline, or for a random moment."""

import random
import select
import time

from raymoe.schedule.graph import Task

SPIN_S = 150e-6  # Linux wakes a sleeper 70 to 90 us late, of which 50 us are its timer slack


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s`, in seconds of `time.perf_counter`; at once if it has passed.

    Sleeps, then spins for the last part; the interpreter is free all the while.
    """
    rest_s = deadline_s - time.perf_counter()
    if rest_s > SPIN_S:
        time.sleep(rest_s - SPIN_S)
    while time.perf_counter() < deadline_s:
        # Lets other threads run and returns at once; `time.sleep(0)` may take 50 us.
        select.select((), (), (), 0)


class RandomStalls:
    """Some tasks wait before they work, so that a missing dependency shows.

    The choice depends on the seed and the task alone, not on the order of the threads.
    """

    def __init__(self, *, probability: float, longest_s: float, seed: int = 0) -> None:
        """Choose the stalls.

        Args:
            probability: Share of the tasks that stall, 0..1.
            longest_s: They stall for 0..`longest_s` seconds, uniformly.
            seed: Another seed stalls other tasks.
        """
        self._probability = probability
        self._longest_s = longest_s
        self._seed = seed

    def __call__(self, task: Task) -> float:
        """Seconds by which the task is late."""
        dice = random.Random(f"{self._seed} {task}")
        return dice.random() * self._longest_s if dice.random() < self._probability else 0.0
