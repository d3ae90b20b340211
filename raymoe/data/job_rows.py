"""Has this row been generated before? Requests of the operator against the journal of its job."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

from raymoe.data.journal import KEY_BYTES, RowJournal, make_journal_directory
from raymoe.data.manifest import FILE_NAME, Manifest, check, claim, plain_params
from raymoe.data.quarantine import Admission
from raymoe.data.rows import RowRequest
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import Chat

# What is wrong with a row stays wrong. Anything else may go better the next time: what is
# said of a process that was killed from outside, or by a broken engine.
FINAL_ERRORS = frozenset({"ConfigError", "UnknownOptionError", "DecodeError"})


class Leave(Protocol):
    """Hears that a row has left the engine."""

    def __call__(self, *, is_finished: bool) -> None:
        """Whether there is an answer."""


def _stay(*, is_finished: bool) -> None:
    """Tell nobody."""


class FinishedRows:
    """The rows of a job that are finished, from any of its processes and runs.

    A row is known by everything that its tokens depend on: model, tokenizer, template and options
    (the manifest), the row key of its random numbers, its prompt and its sampling parameters. So an
    edited row is generated anew, and rows without an id that are equal have the same tokens anyway.
    """

    def __init__(self, journal: RowJournal, manifest: Manifest) -> None:
        self._journal, self._digest = journal, manifest.digest

    @classmethod
    def open(
        cls, directory: str | Path, manifest: Manifest, *, sync_every_s: float
    ) -> "FinishedRows":
        """Open the journal of a job.

        Raises:
            ConfigError: The directory cannot be used, or holds the journal of another job.
        """
        path = make_journal_directory(directory)
        claim(path / FILE_NAME, manifest)
        return cls(RowJournal(path, sync_every_s=sync_every_s), manifest)

    @property
    def directory(self) -> Path:
        return self._journal.directory

    def keys(self, requests: Sequence[RowRequest]) -> list[bytes]:
        """Return by what each row is known in the journal."""
        return [self._key(request) for request in requests]

    def look_up(self, keys: Sequence[bytes]) -> list[Generation | None]:
        """Return the generations of rows that are finished, None for the others."""
        return self._journal.find(keys)

    def watch(
        self, key: bytes, future: Future[Generation], leave: Leave = _stay
    ) -> Future[Generation]:
        """Record a row as soon as it is finished.

        Args:
            future: Its answer from the engine.
            leave: Called once it is recorded, with `is_finished`: whether there is an answer.

        Returns:
            The same answer, but not before it is with the journal: whoever waits for `future`
            itself may be faster than its callbacks.
        """
        recorded: Future[Generation] = Future()
        record = functools.partial(self._record, key, recorded, leave)
        future.add_done_callback(record)
        return recorded

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all finished rows outlive this process; see `JournalWriter.flush`."""
        self._journal.flush(timeout_s)

    def close(self) -> None:
        """Write what is left; more than once is fine."""
        self._journal.close()

    def _record(
        self,
        key: bytes,
        recorded: Future[Generation],
        leave: Leave,
        future: Future[Generation],
    ) -> None:
        error = future.exception()
        if error is not None:  # the engine broke: the row itself may be fine
            leave(is_finished=False)
            recorded.set_exception(error)
            return
        generation = future.result()
        if is_final(generation):
            self._journal.append(key, generation)
        leave(is_finished=True)
        recorded.set_result(generation)

    def _key(self, request: RowRequest) -> bytes:
        content = [self._digest, request.row_key, *_content(request)]
        text = json.dumps(content, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def is_final(generation: Generation) -> bool:
    """Whether generating the row again would give the same."""
    return not generation.error or generation.error.split(":", 1)[0] in FINAL_ERRORS


def _content(request: RowRequest) -> list[object]:
    """Return what the tokens of a row depend on besides its key, as JSON can hold it."""
    prompt: object = request.prompt
    if isinstance(prompt, Chat):
        prompt = [prompt.messages, prompt.tools]
    return [prompt, plain_params(request.sampling_params)]


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
    """Finished rows are found, poison ones refused; the others are let in and recorded."""

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
            ExecutionError: So many rows are poison that the engine must be; fails the job.
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
