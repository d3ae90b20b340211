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
        path = log or os.environ[LOG_VARIABLE]
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._submit, self._engine.submit = self._engine.submit, self._submit_and_log

    def _submit_and_log(self, prompts, sampling_params, *, row_keys, **options):
        futures = self._submit(prompts, sampling_params, row_keys=row_keys, **options)
        for key, future in zip(row_keys, futures, strict=True):
            future.add_done_callback(functools.partial(self._write, key))
        return futures

    def _write(self, key, future):
        if future.exception() is None:
            os.write(self._log, f"{key}\n".encode())


def read_log(path, ids):
    """The ids of the rows in a log, in the order in which they were finished."""
    id_of = {row_key(one): one for one in ids}
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [id_of[int(line)] for line in lines]


def main():
    """`raymoe`, with few rows in flight and an output that is written often."""
    pipeline.MoEGenerator = LoggedGenerator
    pipeline.FLUSH_EVERY_S = 0.5
    generate.Job = functools.partial(pipeline.Job, rows_in_flight=ROWS_IN_FLIGHT)
    sys.exit(run(sys.argv[1:]))
