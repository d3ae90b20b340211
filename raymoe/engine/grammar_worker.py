"""The processes that compile grammars and match tokens: run as a script, with xgrammar.

A grammar is text from a row. The first process only loads libraries and vocabulary, once, and forks
a child for each request it gets: `compile` for one grammar, `match` for the masks of all live rows.
Each child ends itself when it uses more time or memory than it may, in C++ code too, since the
kernel does it; whoever talks to it is told how it ended.

The control socket keeps the borders of messages. The first goes out: {"error": ""}, or what is
wrong. Each message in is a role and the descriptors of the child. Pipes carry first out which
process it is, then JSON messages, the bytes of a compiled grammar out, and the descriptor of a file
that has them in. When a child has ended, the first process writes `ENDED` and its exit code.
"""

import contextlib
import ctypes
import json
import mmap
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np
import torch
import xgrammar
from transformers import AutoTokenizer

COMPILE, MATCH = b"compile", b"match"
MAX_ERROR_CHARACTERS = 500
NO_SLOT = -1
ENDED = b"\0ended "
PR_SET_PDEATHSIG = 1
MAX_SPACES = 32  # between two parts of JSON: a line end and an indentation
SURROGATE, SECOND_OF_SURROGATE = re.compile(b"\xed[\xa0-\xbf]"), re.compile(b"[\xa0-\xbf]")


def load_vocabulary(
    directory: str, vocab_size: int, stop_token_ids: list[int]
) -> xgrammar.TokenizerInfo:
    """The tokens as bytes. Special tokens have none: a grammar must not spell text with them."""
    tokenizer = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    detected = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids
    )
    tokens = [""] * vocab_size
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size:
            tokens[index] = token
    spelled = detected.decoded_vocab
    unfit = {index for index in range(vocab_size) if SURROGATE.search(spelled[index])}
    for index in unfit.union(tokenizer.all_special_ids):
        if index < vocab_size:
            tokens[index] = ""
    return xgrammar.TokenizerInfo.from_vocab_and_metadata(tokens, detected.dump_metadata())


def used_bytes(field: int) -> int:
    """Memory of this process: field 0 is its address space, 1 what is resident."""
    with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - for each token
        return int(file.read().split()[field]) * mmap.PAGESIZE


def limit_memory(num_bytes: int) -> None:
    """Let allocations fail beyond what is there already and `num_bytes`."""
    limit = used_bytes(0) + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """End this process if the body takes more CPU time; pauses and other processes do not count."""
    signal.setitimer(signal.ITIMER_PROF, max(limit_s, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def new_compiler(vocabulary: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    """A compiler for one grammar; the processes here have one thread each."""
    # With its cache, rules that a grammar has several times are compiled once.
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=True)


def compile_grammar(
    vocabulary: xgrammar.TokenizerInfo, request: dict[str, Any]
) -> xgrammar.CompiledGrammar:
    compiler = new_compiler(vocabulary)
    kind, source = request["kind"], request["source"]
    # Without a limit some models write spaces until `max_tokens`.
    spaces: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": MAX_SPACES}
    if request["is_compact"]:
        spaces = {"any_whitespace": False, "separators": (",", ":")}
    if kind == "json":
        return compiler.compile_json_schema(source, **spaces)
    if kind == "json_object":
        schema = '{"type": "object", "additionalProperties": true}'
        return compiler.compile_json_schema(schema, **spaces)
    if kind == "regex":
        return compiler.compile_regex(source)
    if "::=" in source:
        return compiler.compile_grammar(source)
    return compiler.compile_lark(source)


def check_first_token(grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
    """Refuse a grammar that no first token can satisfy."""
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(mask)
    if not bool(mask.any()):
        raise ValueError("no token of the vocabulary can begin a text that it allows")


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def reason(error: Exception) -> str:
    """The message without time and source line of the compiler's own code."""
    text = str(error).strip()
    if is_out_of_memory(error):
        return "needs more memory than it may have"
    if text.startswith("[") and ": " in text:
        text = text.split(": ", 1)[1]
    return f"{text or type(error).__name__}"[:MAX_ERROR_CHARACTERS]


def serve_compile(pipe: Connection, vocabulary: xgrammar.TokenizerInfo) -> None:
    """Compile one grammar; answer with an error, or "" and it.

    Without enough memory there is no answer, as there is none without enough time.
    """
    request = json.loads(pipe.recv_bytes())
    if request["gives_way"]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    limit_memory(request["max_memory_bytes"])
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            with time_limit(request["limit_s"]):
                grammar = compile_grammar(vocabulary, request)
                check_first_token(grammar, vocabulary.vocab_size)
            # What explodes does so before; it gets less time than large ones need here.
            with time_limit(request["write_limit_s"]):
                text = grammar.serialize_json().encode()
        except Exception as problem:
            if is_out_of_memory(problem):
                return
            error = reason(problem)
        else:
            said.seek(0)
            # What the compiler warns of is a part of the grammar that it does not keep.
            lines = said.read().decode(errors="replace").splitlines()
            warnings = [line.split("Warning: ", 1)[1] for line in lines if "Warning: " in line]
            error = warnings[0][:MAX_ERROR_CHARACTERS] if warnings else ""
            if len(text) > request["max_grammar_bytes"]:
                error = f"takes {len(text)} bytes; at most {request['max_grammar_bytes']}"
    pipe.send_bytes(json.dumps({"error": error}).encode())
    if not error:
        pipe.send_bytes(text)


class SurrogateGuard:
    """Keeps surrogates out: grammars count them as characters, UTF-8 and thus the text has none.

    Their bytes are ED and then A0 to BF. `load_vocabulary` leaves out tokens that hold both.

    Attributes:
        mask_W: Bits of the tokens that may follow ED.
    """

    def __init__(self, vocabulary: xgrammar.TokenizerInfo) -> None:
        tokens = vocabulary.decoded_vocab
        self._leads = {index for index, token in enumerate(tokens) if token.endswith(b"\xed")}
        is_allowed = [not SECOND_OF_SURROGATE.match(token) for token in tokens]
        is_allowed += [True] * (-len(is_allowed) % 32)
        bits = np.packbits(np.array(is_allowed), bitorder="little")
        self.mask_W = torch.from_numpy(bits.view(np.int32))

    def is_needed_after(self, token: int) -> bool:
        """Whether a token ends where a surrogate could go on."""
        return token in self._leads


class Allowance:
    """CPU time that a row may use: some in advance, which its tokens pay back.

    What tokens do not use is not saved up: a row that was cheap for long may be no slower after.
    """

    def __init__(self, row_limit_s: float, token_limit_s: float) -> None:
        self._row_limit_s, self._token_limit_s = row_limit_s, token_limit_s
        self._debt_s = 0.0

    def left_s(self, num_tokens: int) -> float:
        """What a step over so many tokens may use; the first mask counts as one."""
        return self._row_limit_s + self._paid_s(num_tokens) - self._debt_s

    def use(self, used_s: float, num_tokens: int) -> bool:
        """Note what a step used; returns whether it may."""
        self._debt_s = max(0.0, self._debt_s + used_s - self._paid_s(num_tokens))
        return self._debt_s <= self._row_limit_s

    def _paid_s(self, num_tokens: int) -> float:
        return max(1, num_tokens) * self._token_limit_s


class Row:
    """One live row: where it is in its grammar, and what it has cost."""

    def __init__(self, allowance: Allowance, *grammars: xgrammar.CompiledGrammar) -> None:
        self.matchers = [xgrammar.GrammarMatcher(grammar) for grammar in grammars]
        self.allowance = allowance
        self.num_tokens = 0
        self.used_s = 0.0
        self.grown_bytes = 0

    def accept(self, tokens: list[int]) -> None:
        self.num_tokens += len(tokens)
        for token in tokens:
            if not all(matcher.accept_token(token) for matcher in self.matchers):
                raise ValueError(f"does not allow token {token}")

    def fill_mask(self, mask_1W: torch.Tensor) -> None:
        """Set the bits of the tokens that all grammars allow next."""
        first, *others = self.matchers
        first.fill_next_token_bitmask(mask_1W)
        for matcher in others:
            too_1W = torch.empty_like(mask_1W)
            matcher.fill_next_token_bitmask(too_1W)
            mask_1W &= too_1W
        if not bool(mask_1W.any()):
            raise ValueError("allows no next token of the vocabulary")


class Matchers:
    """The rows of an engine by slot, and the shared memory of their masks.

    Args:
        memory: One row of mask words for each slot, and the slot in work behind them.
        settings: num_slots, limits, and whether it takes only what others leave of the cores.
    """

    def __init__(
        self,
        pipe: Connection,
        memory: mmap.mmap,
        vocabulary: xgrammar.TokenizerInfo,
        settings: dict[str, Any],
    ) -> None:
        self._pipe, self._vocabulary, self._settings = pipe, vocabulary, settings
        words = torch.frombuffer(memory, dtype=torch.int32)
        num_slots = settings["num_slots"]
        self._masks_SW, self._in_work = words[:-1].view(num_slots, -1), words[-1:]
        self._grammars: dict[str, list[xgrammar.CompiledGrammar]] = {}
        self._rows: dict[int, Row] = {}
        self._guard = SurrogateGuard(vocabulary)
        # Grammars of schemas let control characters and quotes of patterns into strings as they
        # are; what is JSON besides has none.
        self._any_json = new_compiler(vocabulary).compile_json_schema("true")

    def serve(self) -> None:
        while True:
            message = json.loads(self._pipe.recv_bytes())
            begin_s = time.process_time()
            if message["grammars"]:
                self._load(message["grammars"])
            for slot in message["ended"]:
                self._rows.pop(slot, None)
            errors: dict[int, tuple[str, bool]] = {}
            for slot, digest, tokens in message["begun"]:
                if digest in self._grammars:
                    self._rows[slot] = Row(self._allowance(), *self._grammars[digest])
                    errors[slot] = self._step(slot, tokens)
                else:
                    errors[slot] = ("needs more memory than it may have to be loaded", False)
            for slot, token in message["accepted"]:
                errors[slot] = self._step(slot, [token])
            for digest in message["forgotten"]:
                self._grammars.pop(digest, None)
            failed = {slot: error for slot, error in errors.items() if error[0]}
            answer = {"failed": failed, "used_s": time.process_time() - begin_s}
            self._pipe.send_bytes(json.dumps(answer).encode())

    def _load(self, grammars: list[tuple[str, int, int, bool]]) -> None:
        """Take over grammars, each for the row in a slot and others, if there is memory for it."""
        with os.fdopen(recv_handle(self._pipe), "rb") as file:
            for digest, slot, num_bytes, is_json in grammars:
                self._in_work[0] = slot
                data = file.read(num_bytes)
                with contextlib.suppress(MemoryError):
                    text = data.decode()
                    grammar = xgrammar.CompiledGrammar.deserialize_json(text, self._vocabulary)
                    self._grammars[digest] = [grammar, self._any_json] if is_json else [grammar]
                self._in_work[0] = NO_SLOT

    def _allowance(self) -> Allowance:
        return Allowance(self._settings["row_limit_s"], self._settings["token_limit_s"])

    def _step(self, slot: int, tokens: list[int]) -> tuple[str, bool]:
        """Accept tokens and fill the mask of the next one.

        Returns:
            What is wrong with the row, and whether it is that it is slow.
        """
        self._in_work[0] = slot
        row = self._rows[slot]
        limits = self._settings
        begin_s, begin_bytes = time.process_time(), used_bytes(1)
        try:
            # A row that is slow fails alone; only one endless step ends the whole process.
            with time_limit(row.allowance.left_s(len(tokens)) + limits["step_limit_s"]):
                row.accept(tokens)
                row.fill_mask(self._masks_SW[slot : slot + 1])
                if tokens and self._guard.is_needed_after(tokens[-1]):
                    self._masks_SW[slot] &= self._guard.mask_W
            step_s = time.process_time() - begin_s
            row.used_s += step_s
            row.grown_bytes += used_bytes(1) - begin_bytes
            if not row.allowance.use(step_s, len(tokens)):
                raise TimeoutError(f"took {row.used_s:.2f} s to match {row.num_tokens} tokens")
            if row.grown_bytes > limits["max_row_bytes"]:
                raise MemoryError
        except Exception as problem:
            error = reason(problem), isinstance(problem, TimeoutError)
            del self._rows[slot]
        else:
            error = "", False
        self._in_work[0] = NO_SLOT
        return error


def run_child(role: bytes, descriptors: list[int], vocabulary: xgrammar.TokenizerInfo) -> None:
    """Say which process this is, and do what a role asks for."""
    pipe = Connection(descriptors[0])
    with contextlib.suppress(EOFError, BrokenPipeError):
        pipe.send_bytes(str(os.getpid()).encode())
        if role == COMPILE:
            serve_compile(pipe, vocabulary)
            return
        settings = json.loads(pipe.recv_bytes())
        if settings["gives_way"]:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        limit_memory(settings["max_memory_bytes"])
        memory = mmap.mmap(descriptors[1], 0)
        Matchers(pipe, memory, vocabulary, settings).serve()


def serve(control: socket.socket, vocabulary: xgrammar.TokenizerInfo) -> None:
    """Fork a child for each message until the control socket closes; then end them all."""
    pipes: dict[int, int] = {}  # of the children, so that what we say comes before their end
    signal.signal(signal.SIGCHLD, lambda *_: report_ends(pipes))
    server, prctl = os.getpid(), ctypes.CDLL(None).prctl
    while True:
        role, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not role:
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
                    run_child(role, descriptors, vocabulary)
            finally:
                os._exit(0)
        pipes[pid] = descriptors[0]
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def report_ends(pipes: dict[int, int]) -> None:
    """Tell those who talk to children that have ended how they did."""
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        descriptor = pipes.pop(pid)
        os.set_blocking(descriptor, False)  # who does not read it must not stop us
        with contextlib.suppress(OSError), Connection(descriptor) as pipe:
            pipe.send_bytes(ENDED + str(os.waitstatus_to_exitcode(status)).encode())


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    torch.set_num_threads(1)
    try:
        vocabulary = load_vocabulary(**json.loads(sys.argv[2]))
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())
        return
    control.send(b'{"error": ""}')
    serve(control, vocabulary)


if __name__ == "__main__":
    main()
