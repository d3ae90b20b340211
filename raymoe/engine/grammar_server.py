"""Our end of the processes in `grammar_worker`: started when needed, ended with the engine.

A process may end by what it was given (its limits, a crash), which is the fault of a row, or from
outside (the OOM killer, an operator), which is nobody's: how it ended says which it was.
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
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from raymoe.errors import ConfigError, ExecutionError, WorkerProcessError
from raymoe.processes import is_runnable, usage_of

WORKER = Path(__file__).with_name("grammar_worker.py")
START_LIMIT_S = 300.0  # importing torch takes long where everything else is busy
STALL_S = 60.0  # longer than what is slow rests, and than most pauses from outside
CHECK_S = 1.0
ENDED = b"\0ended "  # as in `grammar_worker`; JSON never begins so
# What the kernel sends a process for its limits or its own faults; the others come from outside.
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
    if importlib.util.find_spec("xgrammar") is None:
        raise ConfigError("structured_outputs needs xgrammar: pip install 'xgrammar>=0.2.8,<0.3'")


class LimitError(Exception):
    """A process ended by what it was given: its time, its memory, or a crash."""


class ForkedProcess:
    """A process that the server forked. One thread uses it.

    Attributes:
        pid: Once it has said so, before that 0.
    """

    def __init__(self, pipe: Connection, server: "subprocess.Popen[bytes]") -> None:
        self.pipe, self._server = pipe, server
        self.pid = 0
        self._cpu_s = -1.0
        self._moved_s = self._checked_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, message: object) -> None:
        """Ask for something. If the process has ended, only `receive` says so."""
        self._moved_s = time.monotonic()
        try:
            self.pipe.send_bytes(json.dumps(message).encode())
        except BlockingIOError:  # it did not read for `STALL_S`, and has a part of the message
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
            if self.pipe.poll(min(max(0.0, left_s), CHECK_S)):
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
            message = self.pipe.recv_bytes()
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
        """Let the process end: it sees that its pipe closes."""
        self.pipe.close()

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
            _kill(self._server)  # it may be what stands still; all that it forked ends with it
            raise WorkerProcessError(_ended(f"used no CPU time for {STALL_S:g} s and was ended"))


class GrammarServer:
    """Forks processes that know the vocabulary; the first call starts it. Thread-safe.

    Args:
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
        self._control: socket.socket | None = None
        self._is_closed = False

    def fork(self, role: bytes, *descriptors: int) -> ForkedProcess:
        """A fresh process.

        Args:
            role: What it does, see `grammar_worker`.
            descriptors: Open files that it gets too.

        Raises:
            ExecutionError: The libraries or the vocabulary cannot be loaded.
            WorkerProcessError: The process that forks was ended while it started.
        """
        with self._lock:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                timeout = struct.pack("ll", math.ceil(STALL_S), 0)
                for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    ours.setsockopt(socket.SOL_SOCKET, option, timeout)
                numbers = [theirs.fileno(), *descriptors]
                try:
                    socket.send_fds(self._running(), [role], numbers)
                except OSError:  # it has just ended
                    self._stop()
                    socket.send_fds(self._running(), [role], numbers)
                assert self._process is not None
                return ForkedProcess(Connection(ours.detach()), self._process)

    def close(self) -> None:
        """End all processes, also one that starts; a later `fork` fails."""
        self._is_closed = True
        _kill(self._process)
        with self._lock:
            self._stop()

    def _running(self) -> socket.socket:
        if self._is_closed:
            raise ExecutionError("the engine is closed")
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._control is None:
            self._control = self._start()
        return self._control

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # -P: the folder of the script must not come before the standard library.
            command = [sys.executable, "-P", str(WORKER), str(number), json.dumps(self._vocabulary)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(number,),
                process_group=0,
            )
        if self._is_closed:  # `close` came before there was a process to end
            self._stop()
        ours.settimeout(START_LIMIT_S)
        try:
            answer = ours.recv(4096)
            problem = "" if answer else "was ended while it started"
        except OSError as error:
            problem = f"did not start in {START_LIMIT_S:g} s: {error}"
        ours.settimeout(None)
        if not problem and not (refusal := json.loads(answer)["error"]):
            return ours
        ours.close()
        self._stop()
        if problem:
            raise WorkerProcessError(_ended(problem))
        raise ExecutionError(f"structured_outputs cannot be used: {refusal}")

    def _stop(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        _kill(process)


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended(how: str) -> str:
    return (
        f"structured_outputs: a process for grammars {how}, as was the one before it, through no "
        "fault of this row: run it again, and look for what ends or stops processes (memory?)"
    )
