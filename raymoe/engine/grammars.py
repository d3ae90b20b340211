"""Structured outputs in the engine: the client of `grammar_worker`, and token bitmasks of rows.

A worker may end because of its input (its limits, a crash), which fails a row, or from outside (the
OOM killer, an operator), which is retried: the exit code distinguishes them.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.engine.grammar_errors import in_our_words
from raymoe.engine.outputs import Int32s
from raymoe.errors import ConfigError, ExecutionError, RaymoeError, WorkerProcessError
from raymoe.processes import is_runnable, usage_of
from raymoe.structured import StructuredOutputs
from raymoe.units import MIB, ceil_div

WORKER = Path(__file__).parent / "workers" / "grammar_worker.py"
START_LIMIT_S = 300.0  # importing transformers takes long on a busy machine
STALL_S = 60.0  # longer than most pauses from outside
CHECK_S = 1.0
MAX_STARTS, FIRST_PAUSE_S = 5, 0.1  # of a server that is ended while it starts; pauses double
ENDED = b"\0ended "  # as in `grammar_worker`; JSON never begins so
# The kernel sends these for limits and faults of the process; all others come from outside.
OWN_SIGNALS = frozenset(
    {
        signal.SIGPROF,
        signal.SIGABRT,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
    }
)


def check_present() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise ConfigError("structured_outputs needs llguidance: pip install 'llguidance>=1.7,<2'")


class LimitError(Exception):
    """The worker ended because of its input: CPU time, memory, or a crash."""


class ForkedProcess:
    """A worker that the server forked; one thread uses it. `pid` is 0 until it is known."""

    def __init__(self, pipe: socket.socket, server: "subprocess.Popen[bytes]") -> None:
        self._socket, self._server = pipe, server
        self._pipe = Connection(os.dup(pipe.fileno()))
        self.pid = 0
        self._cpu_s = -1.0
        self._moved_s = self._checked_s = time.monotonic()

    def send(self, message: object) -> None:
        """Send a message. If the worker has ended, only `receive` says so.

        The text is in a memory file: a pipe would block while the worker does not read.
        """
        self._moved_s = time.monotonic()
        with os.fdopen(os.memfd_create("raymoe-grammars"), "wb") as file:
            file.write(json.dumps(message).encode())
            file.flush()
            try:
                socket.send_fds(self._socket, [b"m"], [file.fileno()])
            except BlockingIOError:  # the worker has not read for `STALL_S`
                _kill(self._server)
            except OSError:
                pass

    def has_answer(self, timeout_s: float | None) -> bool:
        """Wait for an answer or an end for at most `timeout_s`; None waits without limit.

        Raises:
            LimitError: The process ended by its input before it sent its id.
            WorkerProcessError: It was ended from outside, or stalled, and is killed.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = CHECK_S if deadline_s is None else deadline_s - time.monotonic()
            if self._pipe.poll(min(max(0.0, left_s), CHECK_S)):
                if self.pid:
                    return True
                self.pid = int(self.receive())
            else:
                self._check_moves()
                if left_s <= 0.0:
                    return False

    def receive(self) -> bytes:
        """Return the answer that `has_answer` has seen.

        Raises:
            LimitError: The process ended by its input.
            WorkerProcessError: It was ended from outside, or stopped in the middle of an answer.
        """
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            # No exit code: the server has ended too, or a message stopped in its middle.
            _kill(self._server)
            raise WorkerProcessError(_ended("was ended")) from error
        if not message.startswith(ENDED):
            return message
        code = int(message.removeprefix(ENDED))
        if code >= 0 or -code in OWN_SIGNALS:
            raise LimitError
        raise WorkerProcessError(_ended(f"was ended by signal {-code}"))

    def close(self) -> None:
        self._pipe.close()
        self._socket.close()

    def _check_moves(self) -> None:
        now_s = time.monotonic()
        if now_s < self._checked_s + CHECK_S:
            return
        self._checked_s = now_s
        pid = self.pid or self._server.pid
        usage = usage_of(pid)
        cpu_s = -1.0 if usage is None else usage.cpu_s
        if cpu_s != self._cpu_s or is_runnable(pid):
            self._cpu_s, self._moved_s = cpu_s, now_s
        elif now_s > self._moved_s + STALL_S:
            _kill(self._server)  # it may be stalled; all that it forked ends with it
            raise WorkerProcessError(_ended(f"used no CPU time for {STALL_S:g} s and was ended"))


class _Started(NamedTuple):
    process: "subprocess.Popen[bytes]"
    control: socket.socket


class GrammarServer:
    """Forks workers that already have the vocabulary. Thread-safe."""

    def __init__(self, directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._vocabulary = {
            "directory": str(directory),
            "vocab_size": vocab_size,
            "stop_token_ids": list(stop_token_ids),
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._started: Future[_Started] | None = None
        self._closed = threading.Event()

    def fork(self, memory: int, timeout_s: float | None = None) -> ForkedProcess | None:
        """Fork a worker; None if the server is still starting after `timeout_s` (None: no limit).

        `memory` is the descriptor of the shared memory for bitmasks.

        Raises:
            ExecutionError: The libraries or the vocabulary cannot be loaded.
            WorkerProcessError: The server was ended from outside each time it started.
        """
        for attempt in range(2):
            try:
                process, control = self._start().result(timeout_s)
            except TimeoutError:
                return None
            ours, theirs = socket.socketpair()
            timeout = struct.pack("ll", math.ceil(STALL_S), 0)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, timeout)
            with theirs:
                try:
                    socket.send_fds(control, [b"fork"], [theirs.fileno(), memory])
                    return ForkedProcess(ours, process)
                except OSError as error:
                    ours.close()
                    _kill(process)
                    if attempt:
                        raise WorkerProcessError(_ended("was ended")) from error
        return None

    def close(self) -> None:
        """End all processes, also one that starts; a later `fork` fails."""
        with self._lock:
            self._closed.set()
            started, self._started = self._started, None
            _kill(self._process)
        if started is not None and started.done() and not started.exception():
            started.result().control.close()

    def _start(self) -> "Future[_Started]":
        with self._lock:
            if self._closed.is_set():
                raise ExecutionError("the engine is closed")
            if self._started is not None:
                if not self._started.done():
                    return self._started
                if not self._started.exception():
                    if self._process is not None and self._process.poll() is None:
                        return self._started
                    self._started.result().control.close()
            started: Future[_Started] = Future()
            self._started = started
            threading.Thread(
                target=self._start_in, args=(started,), name="raymoe-grammar-server", daemon=True
            ).start()
            return started

    def _start_in(self, started: "Future[_Started]") -> None:
        try:
            server = self._try_to_start()
        except Exception as error:
            started.set_exception(error)
            return
        with self._lock:
            if not self._closed.is_set():
                started.set_result(server)
                return
        server.control.close()
        started.set_exception(ExecutionError("the engine is closed"))

    def _try_to_start(self) -> _Started:
        for number in itertools.count(1):
            try:
                return self._started_process()
            except WorkerProcessError:
                if number == MAX_STARTS:
                    raise
            self._closed.wait(FIRST_PAUSE_S * 2 ** (number - 1))
        raise AssertionError

    def _started_process(self) -> _Started:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # -P: the folder of the script must not precede the standard library.
            command = [sys.executable, "-P", str(WORKER), str(number), json.dumps(self._vocabulary)]
            with self._lock:
                if self._closed.is_set():
                    ours.close()
                    raise ExecutionError("the engine is closed")
                self._process = process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(number,),
                    process_group=0,
                )
        ours.settimeout(START_LIMIT_S)
        try:
            answer = ours.recv(4096)
            problem = "" if answer else "was ended while it started"
        except OSError as error:
            problem = f"did not start in {START_LIMIT_S:g} s: {error}"
        ours.settimeout(None)
        if not problem and not (refusal := json.loads(answer)["error"]):
            return _Started(process, ours)
        ours.close()
        _kill(process)
        if problem:
            raise WorkerProcessError(_ended(f"{problem}, as were {MAX_STARTS} in a row"))
        raise ExecutionError(f"structured_outputs cannot be used: {refusal}")


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended(how: str) -> str:
    return (
        f"structured_outputs: a process for grammars {how}, through no fault of this row: run it "
        "again, and look for what ends or stops processes (memory?)"
    )


WORD_BITS = 32
NO_SLOT = -1
MAX_RETRIES = 3  # while workers end without an answer and no row explains it
MAX_REFUSED = 4096
REFUSED = "structured_outputs "  # begins what is refused before llguidance sees it


def compile_request(outputs: StructuredOutputs) -> dict[str, Any]:
    """Return what the worker reads and compiles: the text of the row, which only it looks into."""
    source = getattr(outputs, outputs.kind)
    return {"kind": outputs.kind, "source": source, "is_compact": outputs.disable_any_whitespace}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchLimits:
    """Limits for the grammars of rows in CPU time, which does not depend on the machine's load.

    llguidance has limits of its own (`grammar_worker.PARSER_LIMITS`) and refuses most hostile input
    with a message; these limits end the rest. Measured with 128,000 tokens on a core of 2024: usual
    schemas compile in 1 to 4 ms, and their bitmasks take 0.01 to 0.4 ms.

    Attributes:
        compile_limit_s: Until a grammar is compiled; a longer one ends the worker.
        row_limit_s: For all bitmasks of a row, plus `token_limit_s` for each token.
    """

    compile_limit_s: float = 1.0
    step_limit_s: float = 1.0
    row_limit_s: float = 1.0
    token_limit_s: float = 0.005
    max_row_bytes: int = 256 * MIB
    max_memory_bytes: int = 4096 * MIB


class _Row(NamedTuple):
    outputs: StructuredOutputs
    digest: str
    tokens: list[int]  # generated
    reasoning_token: int | None = None  # that may come first instead, and ends the constraint


@dataclass(slots=True)
class _News:
    """Changes not yet sent to the worker: slots, and new tokens of slots."""

    ended: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.ended or self.begun or self.accepted)


class TokenBitmasks:
    """The rows with structured outputs. The engine thread owns it.

    The worker is told of tokens when they are sampled. A caller may wait for a bitmask or come back
    later. If a row's input ends the worker, the slot in work identifies the row: it fails, and the
    other rows are replayed in another worker. If the worker is ended from outside, all rows are.
    """

    def __init__(
        self,
        server: GrammarServer,
        num_slots: int,
        vocab_size: int,
        limits: MatchLimits | None = None,
    ) -> None:
        self._server, self._num_slots, self._vocab_size = server, num_slots, vocab_size
        self._limits = limits or MatchLimits()
        self._num_words = ceil_div(vocab_size, WORD_BITS)
        self._rows: dict[int, _Row] = {}
        self._errors: dict[int, RaymoeError] = {}
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._known: set[str] = set()  # digests of what the worker has compiled
        self._news = _News()
        self._asked: set[int] = set()  # slots whose answer is pending
        self._worker: ForkedProcess | None = None
        self._num_ends = 0  # that no row explains, since the latest answer
        self._memory: mmap.mmap | None = None
        self._descriptor = -1

    def begin(
        self,
        slot: int,
        outputs: StructuredOutputs,
        tokens: Iterable[int],
        reasoning_token: int | None = None,
    ) -> None:
        """Put a row into a slot, after these generated tokens.

        Args:
            reasoning_token: It may be the first token too; the row then leaves its slot.
        """
        row = _Row(outputs, outputs.digest, [int(token) for token in tokens], reasoning_token)
        self._rows[slot] = row
        if row.digest in self._refused:
            self._errors[slot] = _refusal(outputs, self._refused[row.digest])
        else:
            self._news.begun.add(slot)

    def accept(self, slots: Int32s, tokens: Int32s) -> None:
        """Append a token to those of these slots that have structured outputs."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            row = self._rows.get(slot)
            if row is not None and not row.tokens and token == row.reasoning_token:
                self.end(slot)
            elif row is not None and slot not in self._errors:
                row.tokens.append(token)
                if slot not in self._news.begun:
                    self._news.accepted[slot] = token

    def end(self, slot: int) -> None:
        self._errors.pop(slot, None)
        if self._rows.pop(slot, None) is not None:
            self._news.begun.discard(slot)
            self._news.accepted.pop(slot, None)
            self._news.ended.add(slot)

    def error(self, slot: int) -> RaymoeError | None:
        """Why the row in this slot has no tokens to choose from, if it has none."""
        return self._errors.get(slot)

    def pending(self) -> set[int]:
        asked = self._asked - self._news.ended
        waiting = asked | self._news.begun | self._news.accepted.keys()
        return waiting - self._errors.keys()

    def synchronize(
        self, patience_s: float | None = 0.0, slots: Iterable[int] | None = None
    ) -> None:
        """Receive what the worker has computed, and send it what has changed.

        Args:
            patience_s: Longest wait for pending bitmasks; None waits for all of them.
            slots: Whose bitmasks to wait for; by default all.
        """
        deadline_s = None if patience_s is None else time.monotonic() + patience_s
        if slots is not None and self.pending().isdisjoint(slots):
            deadline_s = 0.0
        while self._collect(deadline_s) and not self._news.is_empty:
            if self._worker is not None:
                self._tell()
            elif not self._fork(deadline_s):
                return

    def apply(self, logits_RV: Tensor, rows: npt.NDArray[np.int64], slots: Int32s) -> None:
        """Set logits that the grammars forbid to -inf."""
        masks_RW = np.zeros((len(slots), self._num_words), np.int32)
        self.copy_masks(masks_RW, slots)
        bits = np.unpackbits(masks_RW.view(np.uint8), axis=1, bitorder="little")
        is_allowed_RV = torch.from_numpy(bits[:, : self._vocab_size]).bool()
        index = torch.from_numpy(rows)
        logits_RV[index] = logits_RV[index].masked_fill(~is_allowed_RV, float("-inf"))

    def copy_masks(self, masks_RW: Int32s, slots: Int32s) -> None:
        """Copy the bitmasks of the rows that have no error."""
        well = self._well()
        is_well = np.array([slot in well for slot in slots.tolist()], bool)
        if is_well.any():
            assert self._memory is not None
            words = np.frombuffer(self._memory, np.int32)
            masks_SW = words[:-2].reshape(self._num_slots, self._num_words)
            masks_RW[is_well] = masks_SW[slots[is_well]]
        for index in np.flatnonzero(is_well):
            row = self._rows[int(slots[index])]
            if row.reasoning_token is not None and not row.tokens:
                word, bit = divmod(row.reasoning_token, WORD_BITS)
                masks_RW[index].view(np.uint32)[word] |= np.uint32(1 << bit)

    def close(self) -> None:
        self._end_worker()
        if self._memory is not None:
            os.close(self._descriptor)
            self._memory.close()
            self._memory = None

    def _collect(self, deadline_s: float | None) -> bool:
        while self._asked and self._worker is not None:
            try:
                if not self._worker.has_answer(_left_s(deadline_s)):
                    return False
                failed = json.loads(self._worker.receive())["failed"]
            except (LimitError, WorkerProcessError) as error:
                self._replace(error, deadline_s)
                continue
            self._num_ends = 0
            for slot, problem in failed.items():
                self._fail(int(slot), problem)
            self._asked.clear()
        return True

    def _replace(self, error: Exception, deadline_s: float | None) -> None:
        slot, is_compiling = self._in_work()
        if isinstance(error, LimitError) and slot != NO_SLOT:
            self._fail(slot, self._limit_problem(is_compiling=is_compiling))
        else:
            self._num_ends += 1
        if self._num_ends > MAX_RETRIES:
            reason = (
                str(error) or "structured_outputs: the process that matches tokens keeps ending"
            )
            lost = self._well() if slot == NO_SLOT else {slot} - self._news.ended
            self._errors |= dict.fromkeys(lost, WorkerProcessError(reason))
            self._num_ends = 0  # the rows that are left have had no part in these ends
        self._fork(deadline_s)

    def _limit_problem(self, *, is_compiling: bool) -> str:
        limits = self._limits
        memory = f"{limits.max_memory_bytes // MIB} MiB"
        if is_compiling:
            limit = f"{limits.compile_limit_s:.3g} s of CPU time or {memory}"
            return f"cannot be used: it takes more than {limit} to compile; simplify it"
        limit = f"{limits.step_limit_s:.3g} s of CPU time or {memory}"
        return f"takes more than {limit} to match one token; simplify it"

    def _well(self) -> set[int]:
        return self._rows.keys() - self._errors.keys()

    def _fail(self, slot: int, problem: str) -> None:
        if slot in self._news.ended or slot not in self._rows:
            return  # the slot may have another row by now
        self._news.begun.discard(slot)
        self._news.accepted.pop(slot, None)
        outputs, digest = self._rows[slot][:2]
        self._errors[slot] = _refusal(outputs, problem)
        if problem.startswith(("cannot be used", REFUSED)):  # whatever the tokens are
            self._refused[digest] = problem
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _in_work(self) -> tuple[int, bool]:
        if self._memory is None:
            return NO_SLOT, False
        slot, phase = np.frombuffer(self._memory, np.int32)[-2:].tolist()
        return slot, bool(phase)

    def _fork(self, deadline_s: float | None) -> bool:
        """Start a worker and send it all rows without errors; False if the deadline passes."""
        self._end_worker()
        if not self._well():
            self._num_ends = 0
            return True
        if self._memory is None:
            num_bytes = 4 * (self._num_slots * self._num_words + 2)
            self._descriptor = os.memfd_create("raymoe-masks")
            os.truncate(self._descriptor, num_bytes)
            self._memory = mmap.mmap(self._descriptor, num_bytes)
        np.frombuffer(self._memory, np.int32)[-2:] = NO_SLOT, 0
        self._news = _News(begun=self._well())
        try:
            self._worker = self._server.fork(self._descriptor, _left_s(deadline_s))
        except (ExecutionError, WorkerProcessError) as error:
            self._errors |= dict.fromkeys(self._well(), error)
            self._news = _News()
            return True
        if self._worker is None:
            return False
        self._worker.send(dataclasses.asdict(self._limits) | {"num_slots": self._num_slots})
        self._tell()
        return True

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._known.clear()
        self._asked.clear()
        self._news = _News()

    def _tell(self) -> None:
        assert self._worker is not None
        news, self._news = self._news, _News()
        rows = {slot: self._rows[slot] for slot in self._well()}
        used = {row.digest for row in rows.values()}
        content = {
            "grammars": {
                rows[slot].digest: compile_request(rows[slot].outputs)
                for slot in news.begun
                if rows[slot].digest not in self._known
            },
            "forgotten": [digest for digest in self._known if digest not in used],
            "ended": list(news.ended),
            "begun": [(slot, rows[slot].digest, rows[slot].tokens) for slot in news.begun],
            "accepted": list(news.accepted.items()),
        }
        self._known = used
        self._asked = news.begun | news.accepted.keys() or {NO_SLOT}
        self._worker.send(content)


def _refusal(outputs: StructuredOutputs, problem: str) -> ConfigError:
    if problem.startswith(REFUSED):
        return ConfigError(problem)
    return ConfigError(
        f"structured_outputs has a {outputs.kind} that {in_our_words(outputs, problem)}"
    )


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
