"""An operator that writes down the rows which its engine finished, and a command that uses it.

A module of its own, because workers import it.
"""

import functools
import os
import sys
from pathlib import Path

from raymoe.cli import generate, pipeline, run
from raymoe.data.generator import MoEGenerator
from raymoe.data.rows import row_key

LOG_VARIABLE = "RAYMOE_TEST_LOG"
ROWS_IN_FLIGHT = 128


class LoggedGenerator(MoEGenerator):
    """Appends the row key of each row to a file before the journal or a caller hears of it."""

    def __init__(self, *args, log=None, **kwargs):
        super().__init__(*args, **kwargs)
        log_rows(self._engine, log or os.environ[LOG_VARIABLE])


class LoggedGeneratorOfCommand(MoEGenerator):
    """The same with the arguments of a `MoEGenerator`, so that the driver prepares it as one."""

    def _open_engine(self, *args):
        engine = super()._open_engine(*args)
        log_rows(engine, os.environ[LOG_VARIABLE])
        return engine


def log_rows(engine, path):
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    submit = engine.submit

    def write(key, future):
        if future.exception() is None:
            os.write(log, f"{key}\n".encode())

    def submit_and_log(prompts, sampling_params, *, row_keys, **options):
        futures = submit(prompts, sampling_params, row_keys=row_keys, **options)
        for key, future in zip(row_keys, futures, strict=True):
            future.add_done_callback(functools.partial(write, key))
        return futures

    engine.submit = submit_and_log


def read_log(path, ids):
    """The ids of the rows in a log, in the order in which they were finished."""
    id_of = {row_key(one): one for one in ids}
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [id_of[int(line)] for line in lines]


def main():
    """`raymoe`, with few rows in flight and an output that is written often."""
    pipeline.MoEGenerator = LoggedGeneratorOfCommand
    pipeline.FLUSH_EVERY_S = 0.5
    generate.Job = functools.partial(pipeline.Job, rows_in_flight=ROWS_IN_FLIGHT)
    sys.exit(run(sys.argv[1:]))
