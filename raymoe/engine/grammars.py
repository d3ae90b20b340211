"""Structured outputs to compiled grammars, in the background, within limits, each only once.

Nearly all grammars compile in a moment. One that does not begins anew in a lane of its own, where
it neither delays the others nor takes the cores from the rows that are computed.
"""

import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from raymoe.engine.grammar_server import GrammarServer
from raymoe.errors import ConfigError
from raymoe.processes import usage_of
from raymoe.structured import StructuredOutputs
from raymoe.units import MIB

NUM_PROMPT_COMPILERS = 2
# While rows are computed a slow one takes what their threads leave of the cores, so much for each
# core, and then rests. Its low priority alone would not keep it away from them: it comes in when
# one thread waits for another, and then it is the other that waits. First tries have the priority
# of all: at a low one they disturb for longer, and three times as much in sum.
WORK_S, REST_S = 0.01, 3.0
MAX_ENTRIES = 4096
MAX_CACHE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """What compiling one grammar may take; CPU time, so that busy machines refuse no more.

    Attributes:
        limit_s: Until it is compiled.
        write_limit_s: Until the result is written then.
        max_memory_bytes: Beyond the vocabulary.
        max_grammar_bytes: Of the result.
    """

    limit_s: float
    write_limit_s: float = 20.0
    max_memory_bytes: int = 2048 * MIB
    max_grammar_bytes: int = 128 * MIB

    @classmethod
    def of(cls, vocab_size: int) -> Self:
        """Those of a vocabulary.

        Measured with 32,000 and 128,000 tokens of a BPE on a core of 2024: one string with a
        `maxLength` of 500 is compiled in 2 and 9 s.
        """
        return cls(limit_s=10.0 + 2e-4 * vocab_size)

    def promptly(self, vocab_size: int) -> Self:
        """What is enough for nearly all grammars.

        Measured as above: of 500 random schemas 99 % are compiled in 0.06 and 0.24 s and written in
        0.13 and 0.50 s, objects of a hundred fields in 0.03 and 0.12 s, written in 0.52 and 0.66 s.
        """
        return dataclasses.replace(
            self,
            limit_s=min(0.02 + 2e-6 * vocab_size, self.limit_s),
            write_limit_s=min(0.5 + 5e-6 * vocab_size, self.write_limit_s),
            max_memory_bytes=min(32 * MIB + 1024 * vocab_size, self.max_memory_bytes),
        )


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar of one vocabulary.

    Attributes:
        digest: Of what was compiled.
        data: How the compiler writes it.
        is_json: Whether all texts must be JSON.
    """

    digest: str
    data: bytes
    is_json: bool


class Grammars:
    """Compiles grammars in processes of their own and keeps results, errors included. Thread-safe.

    Args:
        server: Of processes with the vocabulary.
        is_busy: Whether rows are computed now.
        limits: Of each grammar; by default those of the vocabulary.
    """

    def __init__(
        self,
        server: GrammarServer,
        is_busy: Callable[[], bool],
        limits: CompileLimits | None = None,
    ) -> None:
        self._server, self._is_busy = server, is_busy
        self._limits = limits or CompileLimits.of(server.vocab_size)
        self._prompt_limits = self._limits.promptly(server.vocab_size)
        self._prompt = ThreadPoolExecutor(NUM_PROMPT_COMPILERS, "raymoe-grammar")
        self._slow = ThreadPoolExecutor(1, "raymoe-slow-grammar")
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()

    def get(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """The grammar, or a ConfigError that says why there is none, as soon as it is known."""
        digest = outputs.digest
        with self._lock:
            future = self._cache.pop(digest, None)
            if future is None:
                future = Future()
                self._prompt.submit(self._compile_promptly, outputs, future)
            self._cache[digest] = future
            self._evict()
        return future

    def close(self) -> None:
        """End the threads; the server must be closed before, so that what they still do fails."""
        self._is_closed.set()
        self._prompt.shutdown()  # before the lane that it may still fill
        self._slow.shutdown()

    def _evict(self) -> None:
        sizes = {digest: _num_bytes(future) for digest, future in self._cache.items()}
        total = sum(sizes.values())
        for digest in list(self._cache)[:-1]:
            if len(self._cache) <= MAX_ENTRIES and total <= MAX_CACHE_BYTES:
                return
            total -= sizes[digest]
            del self._cache[digest]

    def _compile_promptly(self, outputs: StructuredOutputs, future: Future[Grammar]) -> None:
        try:
            future.set_result(self._compile(outputs, self._prompt_limits, _receive))
        except _LimitError:
            self._slow.submit(self._compile_slowly, outputs, future)
        except Exception as error:
            future.set_exception(error)

    def _compile_slowly(self, outputs: StructuredOutputs, future: Future[Grammar]) -> None:
        limits = self._limits
        try:
            future.set_result(self._compile(outputs, limits, self._receive_slowly))
        except _LimitError:
            memory = f"{limits.max_memory_bytes // MIB} MiB"
            error = (
                f"takes more than {limits.limit_s:.3g} s or {memory} to compile, "
                f"or {limits.write_limit_s:.3g} s to write"
            )
            future.set_exception(_refusal(outputs, error))
        except Exception as error:
            future.set_exception(error)

    def _compile(
        self,
        outputs: StructuredOutputs,
        limits: CompileLimits,
        receive: Callable[[Connection, int], Any],
    ) -> Grammar:
        """Compile in a fresh process.

        Raises:
            _LimitError: The process ended without an answer.
            ConfigError: The compiler refuses it.
        """
        request = {
            "kind": outputs.kind,
            "source": outputs.source,
            "is_compact": outputs.disable_any_whitespace,
            **dataclasses.asdict(limits),
        }
        with self._server.fork(b"compile") as pipe:
            try:
                pid = json.loads(pipe.recv_bytes())["pid"]
                pipe.send_bytes(json.dumps(request).encode())
                error = receive(pipe, pid)["error"]
                if not error:
                    is_json = outputs.kind in ("json", "json_object")
                    return Grammar(outputs.digest, pipe.recv_bytes(), is_json)
            except (EOFError, OSError) as problem:
                raise _LimitError from problem
        raise _refusal(outputs, error)

    def _receive_slowly(self, pipe: Connection, pid: int) -> Any:
        """Wait for the answer of a process that gives way, and rests while rows are computed."""
        work_s, used_s = WORK_S * len(os.sched_getaffinity(0)), 0.0
        with contextlib.suppress(ProcessLookupError):  # it has ended, which the pipe shows
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
            while not pipe.poll(work_s):
                usage = usage_of(pid)
                if self._is_busy() and usage is not None and usage.cpu_s >= used_s + work_s:
                    used_s = usage.cpu_s
                    os.kill(pid, signal.SIGSTOP)
                    self._is_closed.wait(REST_S)
                    os.kill(pid, signal.SIGCONT)
        return _receive(pipe, pid)


class _LimitError(Exception):
    """A process used up its time or memory."""


def _receive(pipe: Connection, _pid: int) -> Any:
    return json.loads(pipe.recv_bytes())


def _refusal(outputs: StructuredOutputs, error: str) -> ConfigError:
    return ConfigError(f"structured_outputs has a {outputs.kind} that cannot be used: {error}")


def _num_bytes(future: Future[Grammar]) -> int:
    is_grammar = future.done() and not future.cancelled() and future.exception() is None
    return len(future.result().data) if is_grammar else 0
