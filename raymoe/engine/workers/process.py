"""The client of a helper process that answers framed requests (`framed_worker`).

A request that exceeds its CPU time or memory, or that makes the process end itself twice, fails its
row with a `ConfigError`, which is final. If the process is killed or stopped from outside, the
request is retried once in a new process; if that one is ended too, the row gets a
`WorkerProcessError`, which is not final. A process that ends before it is ready has not seen the
request and costs it no try; after `MAX_STARTS` of them the row gets a `WorkerProcessError`, too.
"""

import functools
import json
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raymoe.engine.workers.framed_worker import HEADER, Frame, Message, pack
from raymoe.errors import ConfigError, ExecutionError, WorkerProcessError
from raymoe.processes import Usage, is_runnable, usage_of

SCRIPT = Path(__file__).with_name("framed_worker.py")
POLL_S = 0.5
# A process that waits for this many polls without any CPU time is stopped, not starved. Counts
# polls, because the clock goes on while this process itself is stopped.
MAX_IDLE_POLLS = 60
# Processes that one request starts. Pauses between them double, because memory that is short now
# may be there in a second.
MAX_STARTS, FIRST_PAUSE_S = 5, 0.1
MAX_OWN_ENDS = 2  # while it starts: what ends it then is the same each time
REAP_S = 5.0
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class _EndedError(Exception):
    """The process ended during a request; `is_final`: another try would end the same way."""

    def __init__(self, reason: str, *, is_final: bool = False, is_own: bool = False) -> None:
        super().__init__(reason)
        self.is_final, self.is_own = is_final, is_own


class Turns:
    """A lock in order of arrival: a thread that releases it queues behind all waiters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # the first has its turn

    def __enter__(self) -> None:
        mine = threading.Lock()
        mine.acquire()
        with self._lock:
            self._queue.append(mine)
            if self._queue[0] is mine:
                return
        try:
            mine.acquire()  # released by the one before
        except BaseException:  # an interrupt
            self._leave(mine)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(self._queue[0])

    def _leave(self, lock: threading.Lock) -> None:
        with self._lock:
            is_next = self._queue[0] is lock
            self._queue.remove(lock)
            if is_next and self._queue:
                self._queue[0].release()


class WorkerProcess:
    """A helper process, started when needed. Thread-safe: requests take turns.

    Args:
        blob: Raw bytes for the process. If the first process returns raw bytes with its facts,
            later ones get those instead.
        what: Names it in errors, such as "the chat template".
        load_cpu_s: CPU time limit of starting.
        memory_bytes: Memory limit, the libraries of the role included.
    """

    def __init__(
        self,
        role: Path,
        settings: Mapping[str, Any],
        blob: bytes = b"",
        *,
        what: str,
        load_cpu_s: float,
        memory_bytes: int,
    ) -> None:
        self._role, self._what = role, what
        self._settings = {**settings, "memory_bytes": memory_bytes}, blob
        self._load_cpu_s, self._memory_bytes = load_cpu_s, memory_bytes
        self._turns = Turns()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._facts: Frame | None = None
        self._is_loaded = False  # the current process
        self._problem = ""  # why it can never be loaded
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        with self._turns:
            try:
                self._run()
            except _EndedError:
                self._stop()  # the next caller tries again

    def load(self) -> Frame:
        """Wait until the process is ready and return its facts; raises as `ask` does."""
        return self._persist(lambda: self._facts or ({}, b""), num_tries=1)

    def ask(
        self, message: Message, blob: bytes = b"", *, cpu_s: float, num_tries: int = 2
    ) -> Frame:
        """Send a request and return the answer.

        `num_tries` is the number of processes that the request may end; those that end before they
        are ready do not count.

        Raises:
            ConfigError: The request failed, or exceeded a limit.
            WorkerProcessError: The process was killed or stopped from outside.
            ExecutionError: It was closed.
        """

        def exchange() -> Frame:
            self._send(pack(message, blob, cpu_s))
            return self._receive(cpu_s)

        answer, data = self._persist(exchange, num_tries)
        if "error" in answer:
            raise ConfigError(f"{self._what} failed: {answer['error']}")
        return answer, data

    def close(self) -> None:
        """End the process, also a busy one; callers that wait get an error."""
        self._closed.set()
        process = self._process
        if process is not None:
            process.kill()
        with self._turns:
            self._stop()

    def _persist(self, work: Callable[[], Frame], num_tries: int) -> Frame:
        starts: list[_EndedError] = []  # of processes that were never ready
        ends: list[_EndedError] = []  # during the request
        with self._turns:
            while True:
                is_ready = False
                try:
                    self._run()
                    self._finish_loading()
                    is_ready = True
                    return work()
                except _EndedError as end:
                    self._stop()
                    if self._closed.is_set():
                        raise ExecutionError(f"{self._what} is closed") from end
                    if end.is_final:
                        raise ConfigError(f"{self._what} {end}") from end
                    (ends if is_ready else starts).append(end)
                    if len(ends) == num_tries:
                        raise self._verdict(ends) from end
                    num_own = sum(one.is_own for one in starts)
                    if len(starts) == MAX_STARTS or num_own == MAX_OWN_ENDS:
                        raise self._start_verdict(starts) from end
                    if not is_ready:
                        self._closed.wait(FIRST_PAUSE_S * 2 ** (len(starts) - 1))
                except BaseException:
                    self._stop()  # an interrupt leaves an answer in the socket
                    raise

    def _verdict(self, ends: list[_EndedError]) -> Exception:
        if all(end.is_own for end in ends):
            return self._own_end(ends[-1])
        return WorkerProcessError(f"{self._what}'s process {ends[-1]}; try the row again")

    def _start_verdict(self, starts: list[_EndedError]) -> Exception:
        if starts[-1].is_own:
            return self._own_end(starts[-1])
        return WorkerProcessError(
            f"{self._what}'s process {starts[-1]} while it started, as were {len(starts)} in a "
            "row: look for what ends processes (is memory short?), and try the row again"
        )

    def _own_end(self, end: _EndedError) -> ConfigError:
        return ConfigError(
            f"{self._what}'s process {end}, perhaps for lack of memory: it may have "
            f"{self._memory_bytes >> 20} MiB"
        )

    def _run(self) -> None:
        if self._closed.is_set() or self._problem:
            raise _EndedError(self._problem, is_final=True)
        if self._process is not None and self._process.poll() is not None:
            self._stop()  # between requests
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        ours.settimeout(POLL_S)
        self._socket = ours
        # -P: the folder of the script must not precede the standard library.
        command = [sys.executable, "-P", str(SCRIPT), str(self._role)]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # a terminal's Ctrl-C is for us
                )
            except OSError as error:
                raise _EndedError(f"cannot be started ({error})") from error
        if self._closed.is_set():  # `close` came before there was a process to end
            self._process.kill()
        settings, blob = self._settings
        if self._facts is not None:
            blob = self._facts[1] or blob
        self._send(pack(settings, blob, self._load_cpu_s))

    def _finish_loading(self) -> None:
        if self._is_loaded:
            return
        try:
            facts = self._receive(self._load_cpu_s)
            if "error" in facts[0]:
                raise _EndedError(f"failed: {facts[0]['error']}", is_final=True)
        except _EndedError as end:
            if self._facts is not None:  # it could be loaded before
                raise _EndedError(f"cannot be started again: it {end}") from end
            self._problem = str(end) if end.is_final else ""
            raise
        self._facts, self._is_loaded = self._facts or facts, True

    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        left = memoryview(data)
        while left:
            left = left[self._patiently(functools.partial(self._socket.send, left), 0.0) :]

    def _receive(self, cpu_s: float) -> Frame:
        header = HEADER.unpack(self._read(HEADER.size, cpu_s))
        message = json.loads(self._read(header[1], cpu_s))
        return message, self._read(header[2], cpu_s)

    def _read(self, count: int, cpu_s: float) -> bytes:
        assert self._socket is not None
        data = bytearray(count)
        left = memoryview(data)
        while left:
            num_bytes = self._patiently(functools.partial(self._socket.recv_into, left), cpu_s)
            if not num_bytes:
                raise self._end(cpu_s)
            left = left[num_bytes:]
        return bytes(data)

    def _patiently(self, operate: Callable[[], int], cpu_s: float) -> int:
        assert self._process is not None
        seen: Usage | None = None
        num_idle = 0
        while True:
            try:
                return operate()
            except TimeoutError:
                pid, before = self._process.pid, seen
                seen = usage_of(pid)
                is_idle = before is not None and seen is not None and seen.cpu_s == before.cpu_s
                num_idle = num_idle + 1 if is_idle and not is_runnable(pid) else 0
            except OSError:
                raise self._end(cpu_s) from None
            if num_idle >= MAX_IDLE_POLLS:
                raise _EndedError(f"did nothing for {POLL_S * num_idle:g} s and was ended")

    def _end(self, cpu_s: float) -> _EndedError:
        assert self._process is not None
        try:
            code = self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return _EndedError("closed its socket and was ended")
        if code == -signal.SIGPROF:
            return _EndedError(f"took more than {cpu_s:g} s of CPU time", is_final=True)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return _EndedError(how, is_own=-code not in FROM_OUTSIDE)

    def _stop(self) -> None:
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        self._is_loaded = False
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()
