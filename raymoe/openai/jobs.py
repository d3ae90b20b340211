"""Runs the batches of a store: checks their lines, generates in a process, splits the responses.

One batch at a time is a process of `raymoe generate`, whose journal keeps what is finished. A
server that starts again finds the process of the server before it, or resumes its output.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from raymoe.data.json_lines import Line, parse_line, read_lines
from raymoe.data.rows import RowError, check_encodes, shown
from raymoe.data.status import (
    PARTS_SUFFIX,
    ActorStatus,
    JobStatus,
    rate_unit,
    read_status,
    status_beside,
)
from raymoe.errors import EXIT_BAD_USAGE
from raymoe.openai.batch import ID_COLUMN
from raymoe.openai.direct import DirectRequests
from raymoe.openai.store import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT,
    VALIDATING,
    ApiError,
    BatchRecord,
    LineError,
    Store,
)
from raymoe.processes import arguments_of, identity_of
from raymoe.safe_text import harmless
from raymoe.specs.files import new_file, open_regular
from raymoe.units import MIB

if TYPE_CHECKING:
    from concurrent.futures import Future

MAX_ERRORS = 100
MAX_ID_CHARACTERS = 512
MAX_LINE_BYTES = 16 * MIB
MAX_RUNS = 3  # of a process that fails for another reason than its arguments
LOOK_EVERY_S, STOP_S = 0.5, 60.0
LOG_TAIL_BYTES = 64 << 10
# str.splitlines, with which clients cut a file into lines, takes these for ends of lines too.
NOT_LINE_ENDS = str.maketrans({one: f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of an input file found."""

    num_lines: int
    model: str | None
    errors: tuple[LineError, ...]


def check_input(path: Path, endpoint: str, models: Collection[str], max_requests: int) -> Checked:
    """Check the envelope of each line; bodies are checked when they are generated."""
    errors: list[LineError] = []
    ids: set[str] = set()
    found_model = None
    number = 0
    with os.fdopen(open_regular(path), "rb") as file:
        for line_number, line in enumerate(read_lines(file, MAX_LINE_BYTES), 1):
            if line.problem:
                errors.append(
                    LineError(code="line_too_long", message=line.problem, line=line_number)
                )
                return Checked(num_lines=number, model=None, errors=tuple(errors))
            if not line.has_content:
                continue
            number += 1
            if number > max_requests:
                message = f"the file has more than {max_requests:,} requests"
                errors.append(LineError(code="too_many_requests", message=message))
                break
            try:
                custom_id, found_model = _check_line(line, endpoint, models)
                if custom_id in ids:
                    raise _LineError("duplicate_custom_id", f"{shown(custom_id)} occurs twice",
                                     ID_COLUMN)  # fmt: skip
                ids.add(custom_id)
            except _LineError as error:
                errors.append(error.as_record(line_number))
                if len(errors) == MAX_ERRORS:
                    break
    if not number:
        errors.append(LineError(code="empty_file", message="the file has no requests"))
    return Checked(num_lines=number, model=found_model, errors=tuple(errors))


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self._code, self._param = code, param

    def as_record(self, line: int) -> LineError:
        return LineError(code=self._code, message=str(self), param=self._param, line=line)


def _check_line(line: Line, endpoint: str, models: Collection[str]) -> tuple[str, str]:
    record, problem = parse_line(line)
    if record is None or problem:
        raise _LineError("invalid_json_line", problem)
    custom_id = record.get(ID_COLUMN)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        raise _LineError("invalid_custom_id", f"custom_id is {shown(custom_id)}; it takes text of "
                         f"1 to {MAX_ID_CHARACTERS} characters", ID_COLUMN)  # fmt: skip
    try:
        check_encodes(custom_id, ID_COLUMN)
    except RowError as error:
        raise _LineError("invalid_custom_id", str(error), ID_COLUMN) from error
    if record.get("method") != "POST":
        raise _LineError("invalid_method", f"method is {shown(record.get('method'))}; it takes "
                         "'POST'", "method")  # fmt: skip
    if record.get("url") != endpoint:
        raise _LineError("invalid_url", f"url is {shown(record.get('url'))}; the batch is for "
                         f"{endpoint!r}", "url")  # fmt: skip
    body = record.get("body")
    if not isinstance(body, dict):
        raise _LineError("invalid_body", f"body is {shown(body)}; it takes an object", "body")
    check_model_name(body, models)
    return custom_id, body["model"]


def check_model_name(body: Mapping[str, Any], models: Collection[str]) -> None:
    model = body.get("model")
    if not isinstance(model, str) or model not in models:
        known = ", ".join(map(repr, sorted(models)))
        raise _LineError("model_not_found", f"model is {shown(model)}; this server has {known} "
                         "(--served-model-name adds names)", "body.model")  # fmt: skip


class BatchWorker:
    """Two threads: one checks new batches, one runs them, the oldest first, or answers directly."""

    def __init__(
        self,
        store: Store,
        command: Sequence[str],
        models: Collection[str],
        *,
        max_requests: int,
        direct: DirectRequests,
        direct_status: Path | None = None,
    ) -> None:
        """Make the worker; `start` starts it.

        Args:
            command: ``raymoe generate`` with model and options, without input and output.
            models: Names that bodies may give.
            max_requests: Lines of a file.
            direct: Requests that come before the next batch.
            direct_status: Where their engine writes its status, if it does.
        """
        self._direct_status = direct_status
        self._store, self._command, self._direct = store, tuple(command), direct
        self._models, self._max_requests = models, max_requests
        self._is_stopping, self._waiting = False, threading.Event()
        self._running: str | None = None
        self._threads = [
            threading.Thread(target=loop, name=loop.__name__)
            for loop in (self._check_batches, self._run_batches)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def problem(self) -> str:
        """Why batches do not go on; empty while they do."""
        is_stopping, ended = self._is_stopping, [one for one in self._threads if not one.is_alive()]
        if ended and not is_stopping:
            return (
                "the thread that checks or runs batches has ended; the log of the server says why"
            )
        return ""

    def actors(self) -> tuple[ActorStatus, ...]:
        """Return the engines of the batch that runs, and the one of direct requests."""
        running = self._running
        found = [] if running is None else [status_beside(self._output_of(running))]
        if self._direct_status is not None:
            found.append(self._direct_status)
        return tuple(actor for one in found for actor in read_status(one).actors)

    def _output_of(self, batch_id: str) -> Path:
        return self._store.work_dir(batch_id) / "responses.jsonl"

    def stop(self) -> None:
        """Interrupt what runs, and wait; the next server goes on with it."""
        with self._store.changed:
            self._is_stopping = True
            self._store.changed.notify_all()
        for thread in self._threads:
            thread.join()

    def cancel(self, batch_id: str) -> BatchRecord:
        """Cancel a batch that has not ended: at once if it waits, else its process first."""
        with self._store.changed:
            waits = (VALIDATING, IN_PROGRESS) if self._running != batch_id else ()
            if not self._store.advance(batch_id, waits, CANCELLED):
                self._store.advance(batch_id, (IN_PROGRESS,), CANCELLING)
            batch = self._store.batch(batch_id)
            if batch.status not in (CANCELLED, CANCELLING):
                raise ApiError(400, f"{batch_id} is {batch.status} and cannot be cancelled")
            return batch

    def answer(self, row: pa.Table) -> "Future[pa.Table]":
        """Return the future answer of a row.

        Raises:
            ApiError: A batch runs, or the server stops.
        """
        with self._store.changed:
            if self._running is not None or self._is_stopping:
                what = f"{self._running} runs" if self._running else "the server is shutting down"
                raise ApiError(
                    503, f"{what}; requests without a batch are answered while no batch runs"
                )
            future = self._direct.submit(row)
            self._store.changed.notify_all()
        return future

    def _check_batches(self) -> None:
        while (batch := self._next((VALIDATING,))) is not None:
            self._try(self._check, batch)

    def _run_batches(self) -> None:
        runs = (IN_PROGRESS, FINALIZING, CANCELLING)
        while not self._is_stopping:
            batch = self._next(runs, self._direct)
            if batch is not None:
                self._try(self._run, batch)
            elif self._direct.is_waiting:
                self._direct.run(
                    is_stopping=lambda: self._is_stopping,
                    has_batch=lambda: any(b.status in runs for b in self._store.batches()),
                )
        self._direct.stop()

    def _try(self, handle: Callable[[BatchRecord], None], batch: BatchRecord) -> None:
        try:
            handle(batch)
        except Exception as error:
            logger.exception("batch %s failed", batch.id)
            self._give_up(batch, f"{type(error).__name__}: {error}")

    def _next(
        self, statuses: Collection[str], direct: DirectRequests | None = None
    ) -> BatchRecord | None:
        """Wait for a batch to handle; None if direct requests come first, or the server stops."""
        with self._store.changed:
            if direct is not None:
                self._running = None
            while not self._is_stopping and not (direct and direct.is_waiting):
                found = next((b for b in self._store.batches() if b.status in statuses), None)
                if found is not None:
                    if direct is not None:
                        self._running = found.id
                    return found
                self._store.changed.wait()
        return None

    def _give_up(self, batch: BatchRecord, reason: str) -> None:
        try:
            self._fail(batch, reason)
        except Exception:  # such as a full disk: the batch is tried again
            logger.exception("the record of %s cannot be written; trying again", batch.id)
            self._waiting.wait(LOOK_EVERY_S)

    def _check(self, batch: BatchRecord) -> None:
        checked = check_input(self._store.content(batch.input_file_id), batch.endpoint,
                              self._models, self._max_requests)  # fmt: skip
        if checked.errors:
            first = checked.errors[0]
            where = "" if first.line is None else f"line {first.line}: "
            logger.warning(
                "%s: refused, %d lines are wrong; the first error: %s%s",
                batch.id, len(checked.errors), where, harmless(first.message),
            )  # fmt: skip
        else:
            logger.info("%s: received, %s requests", batch.id, f"{checked.num_lines:,}")
        self._store.advance(
            batch.id,
            (VALIDATING,),
            FAILED if checked.errors else IN_PROGRESS,
            model=checked.model,
            num_total=0 if checked.errors else checked.num_lines,
            errors=checked.errors,
        )

    def _run(self, batch: BatchRecord) -> None:
        output, begin_s = self._output_of(batch.id), time.monotonic()
        output.parent.mkdir(0o700, exist_ok=True)
        logger.info("%s: started, %s requests", batch.id, f"{batch.num_total:,}")
        for _ in range(MAX_RUNS):
            if self._store.batch(batch.id).status != IN_PROGRESS:
                break
            code = self._generate(batch, output)
            if self._is_stopping:
                return
            if code == 0:
                self._store.advance(batch.id, (IN_PROGRESS,), FINALIZING)
            if code == EXIT_BAD_USAGE:
                break
        self._finish(batch, output, begin_s)

    def _generate(self, batch: BatchRecord, output: Path) -> int | None:
        """Run the process of a batch to its end; None for one that an earlier server started."""
        process = Process.find(output) or Process.start(
            [
                *self._command, "--format", "openai-batch", "--resume", "--no-report",
                "--input", str(self._store.content(batch.input_file_id)), "--output", str(output),
            ],
            output.with_suffix(".log"),
        )  # fmt: skip
        while process.is_alive():
            with self._store.changed:
                if self._is_stopping or self._store.batch(batch.id).status == CANCELLING:
                    return process.stop()
                self._store.changed.wait(LOOK_EVERY_S)
            self._count(batch, output)
        return process.code

    def _count(self, batch: BatchRecord, output: Path) -> None:
        job = _job_of(output)
        if job is not None:
            num_failed = job.former.num_error_rows + job.num_error_rows
            num_done = job.former.num_rows + job.num_rows - num_failed
            self._store.count(batch.id, num_completed=num_done, num_failed=num_failed)

    def _finish(self, batch: BatchRecord, output: Path, begin_s: float) -> None:
        """Make files of the responses, and end the batch; once more after a crash."""
        files = Responses(self._store, batch, output).split()
        status = self._store.batch(batch.id).status
        count = files["num_completed"] + files["num_failed"]
        seconds = time.monotonic() - begin_s
        figures = (
            f"{files['num_completed']:,} answers and {files['num_failed']:,} errors in "
            f"{seconds:,.0f} s{_rate(_job_of(output))}"
        )
        if status == CANCELLING:
            self._store.advance(batch.id, (CANCELLING,), CANCELLED, **files)
            logger.info("%s: cancelled, %s", batch.id, figures)
        elif status == FINALIZING and count == batch.num_total:
            self._store.advance(batch.id, (FINALIZING,), COMPLETED, **files)
            logger.info("%s: finished, %s", batch.id, figures)
        else:
            log = output.with_suffix(".log")
            ended = "the job ended before all requests were answered"
            reason = ended if status == FINALIZING else last_error(log)
            found = f"{count:,} of {batch.num_total:,} requests have a response"
            reason = f"{reason}; {found} (log: {log})"
            self._fail(batch, reason, **files)
            logger.error("%s: failed, %s: %s", batch.id, figures, harmless(reason))
            return
        self._store.remove_work(batch.id)

    def _fail(self, batch: BatchRecord, reason: str, **files: Any) -> None:
        errors = (LineError(code="job_failed", message=harmless(reason)),)
        unfinished = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
        self._store.advance(batch.id, unfinished, FAILED, errors=errors, **files)


def _job_of(output: Path) -> JobStatus | None:
    return read_status(status_beside(output)).job


def _rate(job: JobStatus | None) -> str:
    if job is None or not job.elapsed_s:
        return ""
    return f", {job.num_generated_tokens / job.elapsed_s:,.0f} {rate_unit(job.task)}"


class Process:
    """A process of `raymoe generate`, of this server or of an earlier one.

    Attributes:
        code: Its exit code once it has ended; None of another server's.
    """

    def __init__(self, pid: int, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid, self._child = pid, child
        self._identity = identity_of(pid)
        self.code: int | None = None

    @classmethod
    def find(cls, output: Path) -> "Process | None":
        """Return the process of this user that writes an output."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                process = cls(int(entry.name))
                arguments = arguments_of(process.pid)
                is_it = "generate" in arguments and arguments[-2:] == ["--output", str(output)]
                # Others may start processes of any name, which are not ours to wait for or end.
                if is_it and process.is_alive() and process.uid == os.geteuid():
                    return process
        return None

    @property
    def uid(self) -> int:
        return -1 if self._identity is None else self._identity.uid

    @classmethod
    def start(cls, command: Sequence[str], log: Path) -> "Process":
        with os.fdopen(open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            # In a session of its own: the server tells it to stop, the terminal does not.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        return cls(child.pid, child)

    def is_alive(self) -> bool:
        if self._child is not None:
            self.code = self._child.poll()
            return self.code is None
        return self._identity is not None and identity_of(self.pid) == self._identity

    def stop(self) -> int | None:
        """Interrupt the process, which writes what it has; kill it if that takes too long."""
        self._signal(os.kill, signal.SIGINT)
        waiting = threading.Event()
        for _ in range(int(STOP_S / LOOK_EVERY_S)):
            if not self.is_alive():
                return self.code
            waiting.wait(LOOK_EVERY_S)
        self._signal(os.killpg, signal.SIGKILL)
        while self.is_alive():
            waiting.wait(LOOK_EVERY_S)
        return self.code

    def _signal(self, send: Callable[[int, int], None], number: int) -> None:
        if self.is_alive():  # else the id may be another's by now
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)


def last_error(log: Path) -> str:
    """Return the last line of a log that says why the command failed."""
    if not log.exists():
        return "the job did not start"
    with os.fdopen(open_regular(log), "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    found = [line for line in lines if line.startswith("error: ")] or lines or ["its log is empty"]
    return found[-1].removeprefix("error: ")[:2000]


class Responses:
    """The responses of a job, written or in parts, as the two files of a batch."""

    def __init__(self, store: Store, batch: BatchRecord, output: Path) -> None:
        self._store, self._batch, self._output = store, batch, output

    def split(self) -> dict[str, Any]:
        """Write the files; return what the record of the batch says of them."""
        counts = {"output": 0, "error": 0}
        paths = {kind: self._output.with_name(f"{kind}.jsonl") for kind in counts}
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[str]] = {
                kind: stack.enter_context(os.fdopen(new_file(path), "w", encoding="utf-8"))
                for kind, path in paths.items()
            }
            for line, is_good in self._lines():
                kind = "output" if is_good else "error"
                counts[kind] += 1
                files[kind].write(line.rstrip("\n").translate(NOT_LINE_ENDS) + "\n")
        ids = {kind: self._adopt(kind, paths[kind]) for kind in counts if counts[kind]}
        return {
            "output_file_id": ids.get("output"), "error_file_id": ids.get("error"),
            "num_completed": counts["output"], "num_failed": counts["error"],
        }  # fmt: skip

    def _adopt(self, kind: str, path: Path) -> str:
        # The same id again if the server was killed in between.
        digest = hashlib.blake2b(f"{self._batch.id} {kind}".encode(), digest_size=16).hexdigest()
        name = f"{self._batch.id}_{kind}.jsonl"
        return self._store.adopt_file(f"file-{digest}", path, name, OUTPUT).id

    def _lines(self) -> Iterator[tuple[str, bool]]:
        """Yield each response once, and whether it is an answer."""
        seen: set[str] = set()
        directory = self._output.with_name(self._output.name + PARTS_SUFFIX)
        paths = sorted(directory.glob("part-*.jsonl"))
        if not paths or not paths[0].name.startswith("part-000000"):  # being deleted: all is joined
            paths = [self._output] * self._output.exists()
        for path in paths:
            with os.fdopen(open_regular(path), encoding="utf-8", newline="\n") as file:
                for line in file:
                    record = json.loads(line)
                    if record[ID_COLUMN] not in seen:
                        seen.add(record[ID_COLUMN])
                        yield line, record["response"]["status_code"] == 200
