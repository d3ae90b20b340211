"""Operators of tests, most of which break; a module of its own, because workers import it."""

import contextlib
import os
import time
from pathlib import Path

import numpy as np

from raymoe.data.generator import MoEGenerator

PLACE = "RAYMOE_TEST_PLACE"  # a variable with a directory


class Marked(MoEGenerator):
    """Has an argument of its own, and says which process has answered."""

    def __init__(self, *args, num_marks, **kwargs):
        super().__init__(*args, **kwargs)

    def __call__(self, batch):
        return {**super().__call__(batch), "process": np.full(len(batch["prompt"]), os.getpid())}


class WaitsForOthers(MoEGenerator):
    """Answers nothing before each of four actors has been called."""

    def __call__(self, batch):
        place = Path(os.environ[PLACE])
        (place / str(os.getpid())).touch()
        while len(list(place.iterdir())) < 4:
            time.sleep(0.1)
        return super().__call__(batch)


class BreaksOnce(MoEGenerator):
    """The engine of one process breaks at its third call."""

    def __init__(self, *args, mark, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_calls, self.mark = 0, Path(mark)

    def __call__(self, batch):
        self.num_calls += 1
        if self.num_calls == 3 and not self.mark.exists():
            self.mark.touch()
            self._engine.close()
        return super().__call__(batch)


class NeverLoads(MoEGenerator):
    """Its weights are nowhere."""

    def __init__(self, *args, mark, **kwargs):
        with Path(mark).open("a") as file:
            file.write("loads\n")
        raise OSError("no such weights here")


class LoadsLate(MoEGenerator):
    """The first loads fail, whichever actors have them."""

    def __init__(self, *args, mark, num_failures, **kwargs):
        for number in range(num_failures):
            with contextlib.suppress(FileExistsError):
                Path(f"{mark}-{number}").touch(exist_ok=False)
                raise OSError("not yet")
        super().__init__(*args, **kwargs)


class BreaksAlways(MoEGenerator):
    """The engine breaks before it has finished anything."""

    def __init__(self, *args, mark, **kwargs):
        super().__init__(*args, **kwargs)
        with Path(mark).open("a") as file:
            file.write("started\n")
        self._engine.close()
