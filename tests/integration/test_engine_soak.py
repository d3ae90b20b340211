"""An engine for a day at small size: stalls in every lane, nothing left behind, tokens right."""

import gc
import itertools
import random
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from raymoe.device.emulated import EmulatedDevice
from raymoe.device.lane import TaskMark
from raymoe.engine import rank_model
from raymoe.schedule.graph import Resource, Task
from tests.integration import test_schedules as schedules

NUM_TASKS = 200_000
POLICY = schedules.DEVICES["staged"]  # every lane has work


class Stalls:
    """One task of a hundred waits for up to a millisecond, in every lane; counts the tasks."""

    def __init__(self, seed: int) -> None:
        self.count = dict.fromkeys(Resource, 0)
        self._dice = {lane: random.Random(f"{seed} {lane}") for lane in Resource}

    def __call__(self, task: Task) -> float:
        self.count[task.resource] += 1  # one thread for each resource
        dice = self._dice[task.resource]
        return dice.random() * 1e-3 if dice.random() < 0.01 else 0.0

    @property
    def num_tasks(self) -> int:
        return sum(self.count.values())


def num_things() -> dict[str, int]:
    """What a leak would add to; memory that a step leaves to the next counts from the start."""
    gc.collect()
    things = gc.get_objects()
    return {
        "threads": threading.active_count(),
        "handles": len(list(Path("/proc/self/fd").iterdir())),
        "marks": sum(type(thing) is TaskMark for thing in things),
        "tensors": sum(type(thing) is torch.Tensor for thing in things),
    }


def assert_nothing_left(before: dict[str, int], after: dict[str, int]) -> None:
    """A few tensors of the last step hang on frames; a leak of each would be thousands."""
    assert after["tensors"] <= before["tensors"] + 16
    assert {**after, "tensors": 0} == {**before, "tensors": 0}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cgopipe", "module_batching", "flexgen_s4"])
def test_many_passes_with_stalls_leave_nothing_behind(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = schedules.plain_configuration("mixtral")
    want = schedules.on_cpu(name, "mixed lengths")
    before = num_things()
    stalls = Stalls(seed=1)
    monkeypatch.setattr(rank_model, "EmulatedDevice", partial(EmulatedDevice, stall=stalls))
    with schedules.make_engine(
        name, {}, device="emulated", schedule=schedule, device_policy=POLICY
    ) as engine:
        assert schedules.run(engine, name, {}) == want
        begun = num_things()
        for number in itertools.count():
            assert schedules.run(engine, name, {}) == want, f"round {number}"
            if stalls.num_tasks >= NUM_TASKS:
                break
        ended = num_things()
        assert all(stalls.count[lane] for lane in Resource)
    assert_nothing_left(begun, ended)
    del engine
    assert_nothing_left(before, num_things())
