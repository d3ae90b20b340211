"""Structured outputs to compiled grammars, in the background, within limits, each only once.

Nearly all grammars compile in a moment. One that does not begins anew in a lane of its own, where
it neither delays the others nor takes the cores from the rows that are computed.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from raymoe.engine.grammar_server import ForkedProcess, GrammarServer, LimitError
from raymoe.errors import CapacityError, ConfigError, WorkerProcessError
from raymoe.processes import usage_of
from raymoe.structured import StructuredOutputs
from raymoe.units import MIB

logger = logging.getLogger(__name__)

NUM_PROMPT_COMPILERS = 2
# While rows are computed a slow one takes what their threads leave of the cores, so much for each
# core, and then rests. Its low priority alone would not keep it away from them: it comes in when
# one thread waits for another, and then it is the other that waits. First tries have the priority
# of all: at a low one they disturb for longer, and three times as much in sum.
WORK_S, REST_S = 0.01, 3.0
# What all slow ones of an engine may take together: as much as so many that reach their limit, and
# a share of the time that rows were computed. So they prolong a job by no more than that.
NUM_SLOW, SLOW_SHARE = 2, 0.05
MAX_ENTRIES = 4096
MAX_CACHE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """What compiling one grammar may take; CPU time, so that busy machines refuse no more.

    Attributes:
        write_limit_s: Until the result is written then.
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
        data: How the compiler writes it.
        is_json: Whether all texts must be JSON.
    """

    digest: str
    data: bytes
    is_json: bool


class Grammars:
    """Compiles grammars in processes of their own and keeps results, errors included. Thread-safe.

    Args:
        is_busy: Whether rows are computed now.
        computed_s: How long rows were computed so far.

    Attributes:
        slow_s: CPU time that slow grammars took.
    """

    def __init__(
        self,
        server: GrammarServer,
        is_busy: Callable[[], bool],
        limits: CompileLimits | None = None,
        computed_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._server, self._is_busy, self._computed_s = server, is_busy, computed_s
        self._limits = limits or CompileLimits.of(server.vocab_size)
        self._prompt_limits = self._limits.promptly(server.vocab_size)
        self._prompt = ThreadPoolExecutor(NUM_PROMPT_COMPILERS, "raymoe-grammar")
        self._slow = ThreadPoolExecutor(1, "raymoe-slow-grammar")
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self.slow_s = 0.0

    def get(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """The grammar, or why there is none, as soon as it is known.

        A ConfigError if it cannot be used, a CapacityError if all slow ones took too long together;
        a WorkerProcessError or ExecutionError if it could not be compiled for other reasons.
        """
        digest = outputs.digest
        with self._lock:
            future = self._cache.pop(digest, None)
            if future is None or not self._is_still_right(future):
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

    def _is_still_right(self, future: Future[Grammar]) -> bool:
        error = future.exception() if future.done() else None
        if isinstance(error, CapacityError):
            return self.slow_s >= self._slow_limit_s()
        return error is None or isinstance(error, ConfigError)

    def _slow_limit_s(self) -> float:
        return NUM_SLOW * self._limits.limit_s + SLOW_SHARE * self._computed_s()

    def _compile_promptly(self, outputs: StructuredOutputs, future: Future[Grammar]) -> None:
        try:
            future.set_result(self._compile(outputs, self._prompt_limits))
        except LimitError:
            self._slow.submit(self._compile_slowly, outputs, future)
        except Exception as error:
            future.set_exception(error)

    def _compile_slowly(self, outputs: StructuredOutputs, future: Future[Grammar]) -> None:
        limits, limit_s = self._limits, self._slow_limit_s()
        try:
            if self.slow_s >= limit_s:
                raise CapacityError(
                    f"structured_outputs has a {outputs.kind} that takes long to compile, and such "
                    f"have taken {self.slow_s:.3g} s of CPU time; at most {limit_s:.3g} s, "
                    f"{SLOW_SHARE:.0%} of the time that rows are computed included: simplify it, "
                    "give its texts a smaller maxLength, or run the row again"
                )
            future.set_result(self._compile(outputs, limits, is_slow=True))
        except LimitError:
            memory = f"{limits.max_memory_bytes // MIB} MiB"
            error = (
                f"takes more than {limits.limit_s:.3g} s or {memory} to compile, "
                f"or {limits.write_limit_s:.3g} s to write"
            )
            future.set_exception(_refusal(outputs, error))
        except Exception as error:
            future.set_exception(error)

    def _compile(
        self, outputs: StructuredOutputs, limits: CompileLimits, *, is_slow: bool = False
    ) -> Grammar:
        """Compile in a fresh process, and in another one if that was ended from outside.

        Raises:
            LimitError: The process ended without an answer.
            WorkerProcessError: The second was ended from outside too.
            ConfigError: The compiler refuses it.
        """
        try:
            return self._compile_once(outputs, limits, is_slow=is_slow)
        except WorkerProcessError as error:
            logger.warning("a grammar is compiled again: %s", error)
            return self._compile_once(outputs, limits, is_slow=is_slow)

    def _compile_once(
        self, outputs: StructuredOutputs, limits: CompileLimits, *, is_slow: bool
    ) -> Grammar:
        request = {
            "kind": outputs.kind,
            "source": outputs.source,
            "is_compact": outputs.disable_any_whitespace,
            "gives_way": is_slow,
            **dataclasses.asdict(limits),
        }
        with self._server.fork(b"compile") as process:
            process.send(request)
            if is_slow:
                self._wait_slowly(process)
            process.has_answer(None)
            error = json.loads(process.receive())["error"]
            if not error:
                is_json = outputs.kind in ("json", "json_object")
                process.has_answer(None)
                return Grammar(outputs.digest, process.receive(), is_json)
        raise _refusal(outputs, error)

    def _wait_slowly(self, process: ForkedProcess) -> None:
        work_s, used_s, rested_s = WORK_S * len(os.sched_getaffinity(0)), 0.0, 0.0
        with contextlib.suppress(ProcessLookupError):  # it has ended, which the pipe shows
            while not process.has_answer(work_s):
                usage = usage_of(process.pid) if process.pid else None
                if usage is None:
                    continue
                self.slow_s += usage.cpu_s - used_s
                used_s = usage.cpu_s
                if self._is_busy() and used_s >= rested_s + work_s:
                    rested_s = used_s
                    os.kill(process.pid, signal.SIGSTOP)
                    self._is_closed.wait(REST_S)
                    os.kill(process.pid, signal.SIGCONT)


def _refusal(outputs: StructuredOutputs, error: str) -> ConfigError:
    return ConfigError(f"structured_outputs has a {outputs.kind} that cannot be used: {error}")


def _num_bytes(future: Future[Grammar]) -> int:
    is_grammar = future.done() and not future.cancelled() and future.exception() is None
    return len(future.result().data) if is_grammar else 0
