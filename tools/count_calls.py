"""Functions and files of ours that a row of a few tokens runs: `python -m tools.count_calls`.

Counts what the threads of a loaded engine call while it generates for one row, loading apart.
"""

import argparse
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import raymoe
from raymoe.assets import demo_model_path
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine

OURS = str(Path(raymoe.__file__).parent) + os.sep
PLACES = (("cpu", "in_place"), ("emulated", "resident"), ("emulated", "micro_batches"))


class Calls:
    """The code objects of the package that threads call while `is_counting`."""

    def __init__(self) -> None:
        self.is_counting = False
        self.seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.is_counting and event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.seen.add(frame.f_code)


def count(device: str, schedule: str, num_tokens: int) -> set[CodeType]:
    """What generating for one row calls on a device, by a schedule."""
    config = EngineConfig(
        device=device, schedule=schedule, num_threads=1, max_model_len=64, linger_s=0.0
    )
    params = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    calls = Calls()
    threading.setprofile(calls)  # of threads that start from now on, those of the engine
    sys.setprofile(calls)
    try:
        with Engine.from_pretrained(demo_model_path(), config) as engine:
            calls.is_counting = True
            (answer,) = engine.generate(["Once upon a time"], params, use_tqdm=False)
            calls.is_counting = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert answer.num_generated_tokens == num_tokens, answer.error
    return calls.seen


def main() -> None:
    """Print both numbers for each device and schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--list", action="store_true", help="name the functions, too")
    given = parser.parse_args()
    for device, schedule in PLACES:
        seen = count(device, schedule, given.tokens)
        files = {code.co_filename for code in seen}
        print(f"{device}, {schedule}: {len(seen)} functions in {len(files)} files")
        if given.list:
            for name in sorted(f"{c.co_filename[len(OURS) :]}: {c.co_qualname}" for c in seen):
                print(f"  {name}")


if __name__ == "__main__":
    main()
