"""A process that lets rows in as an operator does, and is killed by a row or by chance.

    python -m tests.unit.data.dying DIRECTORY LOG SEED GUILTY|- PASSES

GUILTY is the number of the row that kills; PASSES, if not 0, after how many the process is killed
anyway. Finished rows are appended to LOG; the process ends with 0 once all rows are.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from raymoe.data.quarantine import Admission

NUM_ROWS, ROWS_PER_CALL, STEPS_OF_A_ROW = 512, 16, 3


def key_of(row):
    return row.to_bytes(16, "little")


def read_log(path):
    """Rows that are finished, in their order; a poison one is -1 - row."""
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


class Engine:
    """Rows stay for a few steps; a step with the poison one is the last."""

    def __init__(self, log, poison, last_step):
        self.log, self.poison, self.last_step = log, poison, last_step
        self.lock = threading.Lock()
        self.steps, self.done, self.num_steps = {}, {}, 0

    def submit(self, row):
        with self.lock:
            self.steps[row], self.done[row] = 0, threading.Event()
        return self.done[row]

    def step(self, leave):
        with self.lock:
            rows = list(self.steps)
            for row in rows:
                self.steps[row] += 1
            over = [row for row in rows if self.steps[row] >= STEPS_OF_A_ROW]
            for row in over:
                del self.steps[row]
        self.num_steps += bool(rows)
        if self.poison in rows or (self.last_step and self.num_steps >= self.last_step):
            os.kill(os.getpid(), signal.SIGKILL)
        for row in over:
            os.write(self.log, f"{row}\n".encode())
            leave(row)
            self.done[row].set()


def main(directory, log, seed, poison, last_step):
    finished = {abs(row) for row in read_log(log)}
    rows = [row for row in range(1, NUM_ROWS + 1) if row not in finished]
    random.Random(seed).shuffle(rows)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    engine, admission, levels = Engine(file, poison, last_step), Admission(directory), {}

    def call(rows):
        innocent = []
        for row in rows:
            if admission.verdict(key_of(row)) is None:
                innocent.append(row)
            else:
                os.write(file, f"{-row}\n".encode())
        waiting = []
        for group in admission.admit([key_of(row) for row in innocent]):
            for i in group.positions:
                levels[innocent[i]] = group.num_deaths
                waiting.append(engine.submit(innocent[i]))
        for done in waiting:
            done.wait()
        admission.flush()

    parts = [rows[i : i + ROWS_PER_CALL] for i in range(0, len(rows), ROWS_PER_CALL)]
    threads = [threading.Thread(target=call, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.002)
        engine.step(lambda row: admission.leave(key_of(row), levels[row], is_finished=True))
    admission.close()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        None if sys.argv[4] == "-" else int(sys.argv[4]),
        int(sys.argv[5]),
    )
