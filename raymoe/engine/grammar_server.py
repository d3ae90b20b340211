"""The client's end of `grammar_worker`: started when needed, ended with the engine.

The worker may end because of its input (its limits, a crash), which is the fault of a row, or from
outside (the OOM killer, an operator), which is nobody's fault: the exit code tells them apart.
"""

import contextlib
import importlib.util
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from raymoe.errors import ConfigError, ExecutionError, WorkerProcessError
from raymoe.processes import is_runnable, usage_of

WORKER = Path(__file__).with_name("grammar_worker.py")
START_LIMIT_S = 300.0  # importing transformers takes long on a busy machine
STALL_S = 60.0  # longer than most pauses from outside
CHECK_S = 1.0
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
    """Refuse structured outputs where the library for them is missing.

    Raises:
        ConfigError: Says how to install it.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise ConfigError("structured_outputs needs llguidance: pip install 'llguidance>=1.9,<2'")


class LimitError(Exception):
    """The worker ended because of its input: its time, its memory, or a crash."""


class ForkedProcess:
    """A worker that the server forked. One thread uses it.

    Attributes:
        pid: 0 until the worker has said it.
    """

    def __init__(self, pipe: socket.socket, server: "subprocess.Popen[bytes]") -> None:
        self._socket, self._server = pipe, server
        self._pipe = Connection(os.dup(pipe.fileno()))
        self.pid = 0
        self._cpu_s = -1.0
        self._moved_s = self._checked_s = time.monotonic()

    def send(self, message: object) -> None:
        """Send a message. If the worker has ended, only `receive` says so.

        The text goes through a memory file: a pipe would block while the worker does not read.
        """
        self._moved_s = time.monotonic()
        with os.fdopen(os.memfd_create("raymoe-grammars"), "wb") as file:
            file.write(json.dumps(message).encode())
            file.flush()
            try:
                socket.send_fds(self._socket, [b"m"], [file.fileno()])
            except BlockingIOError:  # it has not read for `STALL_S`
                _kill(self._server)
            except OSError:
                pass

    def has_answer(self, timeout_s: float | None) -> bool:
        """Wait for an answer or an end, at most so long; None waits until there is one.

        Raises:
            LimitError: The process ended before it said which it is.
            WorkerProcessError: The same from outside, or it is at a standstill, which ends it.
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
        """The answer that `has_answer` has seen.

        Raises:
            LimitError: The process ended by what it was given.
            WorkerProcessError: It ended from outside, or stopped in the middle of an answer.
        """
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            # Nobody says how: the server has ended too, or a message stopped in its middle.
            _kill(self._server)
            raise WorkerProcessError(_ended("was ended")) from error
        if not message.startswith(ENDED):
            return message
        code = int(message.removeprefix(ENDED))
        if code >= 0 or -code in OWN_SIGNALS:
            raise LimitError
        raise WorkerProcessError(_ended(f"was ended by signal {-code}"))

    def close(self) -> None:
        """End the worker: it sees that its pipe closes."""
        self._pipe.close()
        self._socket.close()

    def _check_moves(self) -> None:
        """End a process that uses no CPU time and does not wait for it either."""
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
            _kill(self._server)  # it may be what stands still; all that it forked ends with it
            raise WorkerProcessError(_ended(f"used no CPU time for {STALL_S:g} s and was ended"))


class _Started(NamedTuple):
    process: "subprocess.Popen[bytes]"
    control: socket.socket


class GrammarServer:
    """Forks workers that have the vocabulary already. Thread-safe.

    Args:
        directory: Of the tokenizer.
        vocab_size: Of the logits.
        stop_token_ids: Tokens that end a text.
    """

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
        self._is_closed = False

    def fork(self, memory: int, timeout_s: float | None = None) -> ForkedProcess | None:
        """Fork a worker; None if the server still starts after `timeout_s`.

        Args:
            memory: Descriptor of the shared memory for bitmasks.
            timeout_s: None waits until the server has started.

        Raises:
            ExecutionError: The libraries or the vocabulary cannot be loaded.
            WorkerProcessError: The server was ended from outside while it started.
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
            self._is_closed = True
            started, self._started = self._started, None
            _kill(self._process)
        if started is not None and started.done() and not started.exception():
            started.result().control.close()

    def _start(self) -> "Future[_Started]":
        """Start the server in a thread, unless it runs or starts already."""
        with self._lock:
            if self._is_closed:
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
            server = self._started_process()
        except Exception as error:
            started.set_exception(error)
            return
        with self._lock:
            if not self._is_closed:
                started.set_result(server)
                return
        server.control.close()
        started.set_exception(ExecutionError("the engine is closed"))

    def _started_process(self) -> _Started:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # -P: the folder of the script must not come before the standard library.
            command = [sys.executable, "-P", str(WORKER), str(number), json.dumps(self._vocabulary)]
            with self._lock:
                if self._is_closed:
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
            raise WorkerProcessError(_ended(problem))
        raise ExecutionError(f"structured_outputs cannot be used: {refusal}")


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    """End a process and its children, which are in its group."""
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended(how: str) -> str:
    return (
        f"structured_outputs: a process for grammars {how}, as was the one before it, through no "
        "fault of this row: run it again, and look for what ends or stops processes (memory?)"
    )
