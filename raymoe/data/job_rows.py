"""The rows of a job that has a directory: what is known of them, and how they enter the engine."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from raymoe.data.admission import Admission
from raymoe.data.finished_rows import FinishedRows
from raymoe.data.journal import make_journal_directory
from raymoe.data.manifest import FILE_NAME, Manifest, check
from raymoe.data.rows import RowRequest
from raymoe.engine.generation import Generation

Submit = Callable[[Sequence[RowRequest]], list[Future[Generation]]]


def check_job(directory: str | Path, manifest: Manifest) -> None:
    """Refuse a directory that cannot be used, or that belongs to another job, before it is opened.

    Raises:
        ConfigError: With each difference.
    """
    path = make_journal_directory(directory) / FILE_NAME
    if path.exists():
        check(path, manifest)


class Found(NamedTuple):
    """A row as the job knows it: its key, and its answer if there is one."""

    key: bytes
    answer: Generation | None


class JobRows:
    """Finished rows are found, guilty ones refused; the others are let in and recorded."""

    def __init__(self, finished: FinishedRows, admission: Admission) -> None:
        self._finished, self._admission = finished, admission

    @classmethod
    def open(cls, directory: str | Path, manifest: Manifest, *, sync_every_s: float) -> "JobRows":
        """Open the directory of a job.

        Raises:
            ConfigError: It cannot be used, or belongs to another job.
        """
        finished = FinishedRows.open(directory, manifest, sync_every_s=sync_every_s)
        return cls(finished, Admission(finished.directory))

    def find(self, requests: Sequence[RowRequest]) -> list[Found]:
        """Return what is known of each row.

        Raises:
            ExecutionError: So many rows are guilty that the engine must be; fails the job.
        """
        keys = self._finished.keys(requests)
        answers = self._finished.look_up(keys)
        return [
            Found(key, self._admission.verdict(key) if answer is None else answer)
            for key, answer in zip(keys, answers, strict=True)
        ]

    def submit(
        self, requests: Sequence[RowRequest], keys: Sequence[bytes], submit: Submit
    ) -> list[Future[Generation]]:
        """Let rows in as they may enter, which can take until others have left.

        Args:
            requests: Rows without an answer.
            keys: Of the rows.
            submit: Gives rows to the engine.

        Returns:
            Their answers, each once it is with the journal.
        """
        futures: dict[int, Future[Generation]] = {}
        for group in self._admission.admit(keys):
            leaves = [
                functools.partial(self._admission.leave, keys[i], group.num_deaths)
                for i in group.positions
            ]
            try:
                submitted = submit([requests[i] for i in group.positions])
            except BaseException:
                for leave in leaves:
                    leave(is_finished=False)
                raise
            for i, future, leave in zip(group.positions, submitted, leaves, strict=True):
                futures[i] = self._finished.watch(keys[i], future, leave)
        return [futures[i] for i in range(len(requests))]

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all finished rows outlive this process; see `JournalWriter.flush`."""
        self._finished.flush(timeout_s)
        self._admission.flush()

    def close(self) -> None:
        """Write what is left; more than once is fine."""
        self._admission.close()
        self._finished.close()
