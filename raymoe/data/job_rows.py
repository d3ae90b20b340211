"""Rows of the operator against the journal and the quarantine of its job."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

from raymoe.data.journal import ROW_KEY_BYTES, Journal
from raymoe.data.journal_place import place_of
from raymoe.data.manifest import Manifest, plain_params
from raymoe.data.quarantine import Admission
from raymoe.data.rows import RowRequest, without_nulls
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import Chat

# Errors that a row causes itself and that are final. Others may be transient, such as those of a
# process killed from outside or of a broken engine.
FINAL_ERRORS = frozenset({"ConfigError", "UnknownOptionError", "DecodeError"})

logger = logging.getLogger(__name__)


class Leave(Protocol):
    """Callback for a row that has left the engine."""

    def __call__(self, *, is_finished: bool) -> None:
        """`is_finished` says whether there is an answer."""


def _stay(*, is_finished: bool) -> None:
    """Ignore the row."""


class FinishedRows:
    """The finished rows of a job, from any of its processes and runs.

    A row's key covers everything that its tokens depend on: model, tokenizer, template and options
    (the manifest), the row key of its random numbers, its prompt, its sampling parameters and, of
    sampled rows without an id, how many equal ones came before. So an edited row is generated anew,
    and k equal rows find the k answers of an earlier run, in whatever order they come.
    """

    def __init__(self, journal: Journal, manifest: Manifest) -> None:
        self._journal, self._digest = journal, manifest.digest

    @classmethod
    def open(
        cls, directory: str | Path, manifest: Manifest, *, sync_every_s: float
    ) -> "FinishedRows":
        place = place_of(directory)
        place.claim(manifest)
        return cls(place.open(sync_every_s=sync_every_s), manifest)

    def keys(self, requests: Sequence[RowRequest]) -> list[bytes]:
        return [occurrence_key(self.row(request), request.occurrence) for request in requests]

    def row(self, request: RowRequest) -> bytes:
        """Return what equal rows have in common."""
        return content_key(request, self._digest)

    def look_up(self, keys: Sequence[bytes]) -> list[Generation | None]:
        """Return the generations of finished rows, None for the others."""
        return self._journal.find(keys)

    def watch(
        self, key: bytes, future: Future[Generation], leave: Leave = _stay
    ) -> Future[Generation]:
        """Record a row as soon as it is finished.

        Returns a future that completes after the row is in the journal and `leave` was called;
        `future` itself may complete before its callbacks run.
        """
        recorded: Future[Generation] = Future()
        record = functools.partial(self._record, key, recorded, leave)
        future.add_done_callback(record)
        return recorded

    def flush(self) -> None:
        self._journal.flush()

    def save(self, timeout_s: float) -> None:
        self._journal.save(timeout_s)

    def close(self) -> None:
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
        try:
            if is_final(generation):
                self._journal.append(key, generation)
            leave(is_finished=True)
        except Exception:  # the row has its answer; at worst it is generated again
            logger.exception(
                "a finished row could not be recorded in the journal; a resumed job "
                "generates it again"
            )
        recorded.set_result(generation)


def content_key(request: RowRequest, digest: str = "") -> bytes:
    """Return a key that equal rows have in common; `digest` is that of their job."""
    text = json.dumps([digest, request.row_key, *_content(request)], default=repr)
    return hashlib.blake2b(text.encode(), digest_size=ROW_KEY_BYTES).digest()


def occurrence_key(row: bytes, occurrence: int) -> bytes:
    """Return the key of one of equal rows; the first has the key that they have in common."""
    if not occurrence:
        return row
    return hashlib.blake2b(row + str(occurrence).encode(), digest_size=ROW_KEY_BYTES).digest()


def is_final(generation: Generation) -> bool:
    return not generation.error or generation.error.split(":", 1)[0] in FINAL_ERRORS


def _content(request: RowRequest) -> list[object]:
    prompt: object = request.prompt
    if isinstance(prompt, Chat):
        kwargs = [prompt.template_kwargs] if prompt.template_kwargs else []
        prompt = [prompt.messages, prompt.tools, *kwargs]
    if request.cells is not None:  # whatever the order of columns
        prompt = without_nulls(dict(sorted(request.cells.items())))
    content = [prompt, plain_params(request.sampling_params)]
    return content if request.continuations is None else [*content, request.continuations]


Submit = Callable[[Sequence[RowRequest]], list[Future[Generation]]]


def check_job(directory: str | Path, manifest: Manifest) -> None:
    """Refuse, before opening it, a directory that is unusable or belongs to another job."""
    place_of(directory).check(manifest)


class Found(NamedTuple):
    """A row, and its answer if there is one.

    Attributes:
        key: Of its record.
        row: What equal rows have in common: if one of them ends processes, all of them do.
    """

    key: bytes
    row: bytes
    answer: Generation | None


class JobRows:
    """Looks finished rows up, refuses poison ones, submits and records the others."""

    def __init__(self, finished: FinishedRows, admission: Admission) -> None:
        self._finished, self._admission = finished, admission

    @classmethod
    def open(cls, directory: str | Path, manifest: Manifest, *, sync_every_s: float) -> "JobRows":
        finished = FinishedRows.open(directory, manifest, sync_every_s=sync_every_s)
        return cls(finished, Admission(place_of(directory).crash_directory))

    def find(self, requests: Sequence[RowRequest]) -> list[Found]:
        """Look up each row.

        Raises:
            ExecutionError: So many rows are poison that the engine must be broken; fails the job.
        """
        rows = [self._finished.row(request) for request in requests]
        numbers = [request.occurrence for request in requests]
        keys = list(map(occurrence_key, rows, numbers))
        answers = self._finished.look_up(keys)
        return [
            Found(key, row, self._admission.verdict(row) if answer is None else answer)
            for key, row, answer in zip(keys, rows, answers, strict=True)
        ]

    def submit(
        self, requests: Sequence[RowRequest], found: Sequence[Found], submit: Submit
    ) -> list[Future[Generation]]:
        """Submit rows as the quarantine admits them, which may wait until others have left.

        Returns their answers, each of which completes once it is in the journal.
        """
        futures: dict[int, Future[Generation]] = {}
        rows = [one.row for one in found]
        for group in self._admission.admit(rows):
            leaves = [
                functools.partial(self._admission.leave, rows[i], group.num_deaths)
                for i in group.positions
            ]
            try:
                submitted = submit([requests[i] for i in group.positions])
            except BaseException:
                for leave in leaves:
                    leave(is_finished=False)
                raise
            for i, future, leave in zip(group.positions, submitted, leaves, strict=True):
                futures[i] = self._finished.watch(found[i].key, future, leave)
        return [futures[i] for i in range(len(requests))]

    def flush(self) -> None:
        """Record what has finished, as a process that is killed must have left it."""
        self._finished.flush()
        self._admission.flush()

    def save(self, timeout_s: float) -> None:
        """Record what has finished, as this process ends itself."""
        self._finished.save(timeout_s)
        self._admission.flush()

    def close(self) -> None:
        self._admission.close()
        self._finished.close()
