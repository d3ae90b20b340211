"""Structured outputs to compiled grammars, in the background, within limits, each only once."""

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from raymoe.engine.grammar_server import GrammarServer
from raymoe.errors import ConfigError
from raymoe.structured import StructuredOutputs
from raymoe.units import MIB

NUM_COMPILERS = 2
MAX_ENTRIES = 4096
MAX_CACHE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """What compiling one grammar may take.

    Attributes:
        limit_s: CPU time, so that a busy machine refuses no more grammars than an idle one.
        max_memory_bytes: Beyond the vocabulary.
        max_grammar_bytes: Of the result.
    """

    limit_s: float = 10.0
    max_memory_bytes: int = 1024 * MIB
    max_grammar_bytes: int = 64 * MIB


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
        limits: Of each grammar.
    """

    def __init__(self, server: GrammarServer, limits: CompileLimits | None = None) -> None:
        self._server = server
        self._limits = limits or CompileLimits()
        self._pool = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="raymoe-grammar")
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()

    def get(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """The grammar, or a ConfigError that says why there is none, as soon as it is known."""
        digest = outputs.digest
        with self._lock:
            future = self._cache.pop(digest, None)
            if future is None:
                future = self._pool.submit(self._compile, outputs, digest)
            self._cache[digest] = future
            self._evict()
        return future

    def close(self) -> None:
        """End the threads; the server must be closed before, or they wait for it."""
        self._pool.shutdown(cancel_futures=True)

    def _evict(self) -> None:
        sizes = {digest: _num_bytes(future) for digest, future in self._cache.items()}
        total = sum(sizes.values())
        for digest in list(self._cache)[:-1]:
            if len(self._cache) <= MAX_ENTRIES and total <= MAX_CACHE_BYTES:
                return
            total -= sizes[digest]
            del self._cache[digest]

    def _compile(self, outputs: StructuredOutputs, digest: str) -> Grammar:
        limits = self._limits
        request = {
            "kind": outputs.kind,
            "source": outputs.source,
            "is_compact": outputs.disable_any_whitespace,
            "limit_s": limits.limit_s,
            "max_memory_bytes": limits.max_memory_bytes,
            "max_grammar_bytes": limits.max_grammar_bytes,
        }
        with self._server.fork(b"compile") as pipe:
            try:
                pipe.send_bytes(json.dumps(request).encode())
                error = json.loads(pipe.recv_bytes())["error"]
                if not error:
                    is_json = outputs.kind in ("json", "json_object")
                    return Grammar(digest, pipe.recv_bytes(), is_json)
            except (EOFError, OSError):
                error = (
                    f"takes more than {limits.limit_s:g} s or {limits.max_memory_bytes // MIB} MiB "
                    "to compile"
                )
        raise ConfigError(f"structured_outputs has a {outputs.kind} that cannot be used: {error}")


def _num_bytes(future: Future[Grammar]) -> int:
    is_grammar = future.done() and not future.cancelled() and future.exception() is None
    return len(future.result().data) if is_grammar else 0
