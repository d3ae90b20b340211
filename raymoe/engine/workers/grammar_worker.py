"""Compiles grammars and computes token bitmasks: a script of its own process, with llguidance.

A grammar is untrusted text from a row: only this process reads it, its translation for llguidance
included. The first process, the server, loads libraries and vocabulary once and forks one worker at
a time, which computes the bitmasks of all live rows. The kernel ends a worker that exceeds its time
or memory, also inside native code; the server then sends its exit code to the client, which asks
for another worker.

The control socket preserves message boundaries. The server first sends {"error": ""}, or what is
wrong. Each message to it forks a worker with two descriptors: its pipe and the memory of the
bitmasks. On the pipe the worker first sends its id, then receives messages as descriptors of memory
files with JSON and answers with JSON. When a worker has ended, the server writes `ENDED` and its
exit code.
"""

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

sys.path.append(str(Path(__file__).resolve().parents[3]))  # where the client found the package
from raymoe.engine.grammar_source import exact_source
from raymoe.errors import ConfigError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_ERROR_CHARACTERS, MAX_REFUSAL_CHARACTERS = 500, 2000
NO_SLOT = -1
MATCHING, COMPILING = 0, 1
ENDED = b"\0ended "
PR_SET_PDEATHSIG = 1
MAX_SPACES = 32  # between two parts of JSON: a line end and an indentation
PARSER_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # 1 to 2 kB each, shared by the rows of a grammar
    "max_grammar_size": 500_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}


class Vocabulary:
    """The tokens as bytes for `LLTokenizer`; special tokens match no text.

    A tokenizer from `llguidance.hf` does not work: where a grammar allows only one text, its masks
    allow only one tokenization, which may be a special token with the same spelling.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: LLTokenizer, eos_token_id: int) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer, self.eos_token_id = tokenizer, eos_token_id
        self.tokens = [tokenizer.decode_bytes([token]) for token in ids]
        self.special_token_ids = [token for token in ids if tokenizer.is_special_token(token)]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return token ids of a text, as `LLTokenizer` needs them."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.greedy_tokenize(text)


def load_vocabulary(directory: str, vocab_size: int, stop_token_ids: list[int]) -> LLTokenizer:
    import llguidance.hf  # noqa: PLC0415 - with transformers, which `main` imports without torch
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    n_vocab = max(vocab_size, len(tokenizer))
    known = llguidance.hf.from_tokenizer(tokenizer, n_vocab, stop_token_ids, slices=[])
    vocabulary: Any = Vocabulary(known, stop_token_ids[0])
    slices = LLTokenizer.json_slices()
    return LLTokenizer(vocabulary, eos_token=stop_token_ids, slices=slices)


def used_bytes(field: int) -> int:
    """Memory of this process: field 0 is its address space, 1 its resident memory."""
    with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - for each token
        return int(file.read().split()[field]) * mmap.PAGESIZE


def limit_memory(num_bytes: int) -> None:
    """Make allocations fail beyond the present address space plus `num_bytes`."""
    limit = used_bytes(0) + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """End this process if the body exceeds this CPU time."""
    signal.setitimer(signal.ITIMER_PROF, max(limit_s, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def grammar_text(kind: str, source: Any, *, is_compact: bool) -> str:
    """Return the grammar for llguidance.

    Raises:
        ConfigError: It cannot be kept exactly; names the part.
    """
    source = exact_source(kind, source)
    if kind in ("json", "json_object"):
        # Without a limit (llguidance 1.7 ignores it) some models write spaces until `max_tokens`.
        spaces = rf"[\x20\x0A\x0D\x09]{{0,{MAX_SPACES}}}"
        options: JsonCompileOptions = {"whitespace_pattern": spaces}
        if is_compact:
            options = {"whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(source, overrides=options)
    if kind in ("regex", "choice"):
        return LLMatcher.grammar_from_regex(source)
    return LLMatcher.grammar_from_lark(source)


def reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "needs more memory than it may have"
    text = " ".join(str(error).replace("<non-verbose/>", "").split())
    return f"{text or type(error).__name__}"[:MAX_ERROR_CHARACTERS]


class Row:
    """One live row: its state in the grammar, and its costs."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_tokens = 0
        self.used_s = 0.0
        self.grown_bytes = 0

    def step(self, tokens: list[int], mask_W: npt.NDArray[np.int32]) -> None:
        """Accept tokens and set the bits of those that may come next.

        Raises:
            ValueError: There are none, or llguidance has reached a limit.
        """
        self.num_tokens += len(tokens)
        matcher = self._matcher
        num_accepted = matcher.try_consume_tokens(tokens) if tokens else 0
        if num_accepted == len(tokens) and not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        problem = matcher.get_error()
        if problem and not problem.startswith("NoExtension"):
            raise ValueError(f"cannot be matched: {problem}")
        if num_accepted < len(tokens):
            raise ValueError(f"does not allow token {tokens[num_accepted]}")
        is_dead_end = matcher.is_stopped() and not matcher.is_accepting()
        if is_dead_end or not mask_W.any():
            raise ValueError("allows no next token of the vocabulary")


class Matchers:
    """The rows of an engine by slot, and the shared memory of their bitmasks.

    Args:
        memory: Bitmask words of each slot, then the slot in work and what is done for it.
        settings: The fields of `MatchLimits`, and num_slots.
    """

    def __init__(
        self, pipe: socket.socket, memory: mmap.mmap, tokenizer: LLTokenizer, settings: Any
    ) -> None:
        self._socket, self._tokenizer, self._limits = pipe, tokenizer, settings
        self._answers = Connection(os.dup(pipe.fileno()))
        words = np.frombuffer(memory, np.int32)
        self._masks_SW = words[:-2].reshape(settings["num_slots"], -1)
        self._mask_W = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        self._in_work = words[-2:]
        self._parser_limits = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
        self._grammars: dict[str, LLMatcher | str] = {}
        self._rows: dict[int, Row] = {}

    def serve(self) -> None:
        while True:
            message = receive(self._socket)
            for slot in message["ended"]:
                self._rows.pop(slot, None)
            errors = {}
            for slot, digest, tokens in message["begun"]:
                errors[slot] = self._begin(slot, digest, message["grammars"], tokens)
            for slot, token in message["accepted"]:
                errors[slot] = self._step(slot, [token])
            for digest in message["forgotten"]:
                self._grammars.pop(digest, None)
            failed = {slot: error for slot, error in errors.items() if error}
            self._answers.send_bytes(json.dumps({"failed": failed}).encode())

    def _begin(self, slot: int, digest: str, grammars: dict[str, Any], tokens: list[int]) -> str:
        if digest not in self._grammars:
            self._in_work[:] = slot, COMPILING
            with time_limit(self._limits["compile_limit_s"]):
                self._grammars[digest] = self._compiled(grammars[digest])
            self._in_work[:] = NO_SLOT, MATCHING
        grammar = self._grammars[digest]
        if isinstance(grammar, str):
            return grammar
        self._rows[slot] = Row(grammar.deep_copy())
        return self._step(slot, tokens)

    def _compiled(self, request: dict[str, Any]) -> LLMatcher | str:
        try:
            text = grammar_text(**request)
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._parser_limits)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except ConfigError as refusal:
            return str(refusal)[:MAX_REFUSAL_CHARACTERS]
        except Exception as problem:
            return f"cannot be used: {reason(problem)}"
        return matcher

    def _step(self, slot: int, tokens: list[int]) -> str:
        self._in_work[:] = slot, MATCHING
        row, limits = self._rows[slot], self._limits
        begin_s, begin_bytes = time.process_time(), used_bytes(1)
        error = ""
        try:
            with time_limit(limits["step_limit_s"] + limits["token_limit_s"] * len(tokens)):
                row.step(tokens, self._mask_W)
            self._masks_SW[slot] = self._mask_W[: self._masks_SW.shape[1]]
            row.used_s += time.process_time() - begin_s
            row.grown_bytes += used_bytes(1) - begin_bytes
            allowed_s = limits["row_limit_s"] + limits["token_limit_s"] * row.num_tokens
            if row.used_s > allowed_s:
                raise TimeoutError(
                    f"takes {row.used_s:.2f} s of CPU time to match {row.num_tokens} tokens; at "
                    f"most {allowed_s:.2f} s are allowed: simplify it"
                )
            if row.grown_bytes > limits["max_row_bytes"]:
                raise MemoryError
        except Exception as problem:
            error = reason(problem)
            del self._rows[slot]
        self._in_work[:] = NO_SLOT, MATCHING
        return error


def receive(pipe: socket.socket) -> Any:
    """Receive the JSON of the next memory file; raises `EOFError` when the pipe is closed."""
    _, descriptors, _, _ = socket.recv_fds(pipe, 1, 1)
    if not descriptors:
        raise EOFError
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        return json.loads(file.read())


def run_worker(descriptors: list[int], tokenizer: LLTokenizer) -> None:
    pipe = socket.socket(fileno=descriptors[0])
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        Connection(os.dup(descriptors[0])).send_bytes(str(os.getpid()).encode())
        settings = receive(pipe)
        limit_memory(settings["max_memory_bytes"])
        Matchers(pipe, mmap.mmap(descriptors[1], 0), tokenizer, settings).serve()


def serve(control: socket.socket, tokenizer: LLTokenizer) -> None:
    """Fork a worker for each message until the control socket closes; then end them all."""
    pipes: dict[int, int] = {}  # pipes of workers by id
    signal.signal(signal.SIGCHLD, lambda *_: report_ends(pipes))
    server, prctl = os.getpid(), ctypes.CDLL(None).prctl
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            os.killpg(0, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for descriptor in pipes.values():
                os.close(descriptor)
            try:
                if os.getppid() == server:
                    run_worker(descriptors, tokenizer)
            finally:
                os._exit(0)
        pipes[pid] = descriptors[0]
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def report_ends(pipes: dict[int, int]) -> None:
    """Send clients the exit codes of their ended workers."""
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        descriptor = pipes.pop(pid)
        os.set_blocking(descriptor, False)  # a client that does not read must not block the server
        with contextlib.suppress(OSError), Connection(descriptor) as pipe:
            pipe.send_bytes(ENDED + str(os.waitstatus_to_exitcode(status)).encode())


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.modules["torch"] = None  # type: ignore[assignment] # saves 2 s and 100 MB
    try:
        tokenizer = load_vocabulary(**json.loads(sys.argv[2]))
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())
        return
    control.send(b'{"error": ""}')
    serve(control, tokenizer)


if __name__ == "__main__":
    main()
