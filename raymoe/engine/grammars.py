"""Which tokens may come next? Bitmasks of the rows with structured outputs.

A worker computes them while steps run. S slots, R rows of a chunk of logits, V vocabulary, W words
of 32 tokens.
"""

import dataclasses
import json
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.engine.grammar_server import ForkedProcess, GrammarServer, LimitError
from raymoe.engine.grammar_text import exact_regex, lark_of_grammar, regex_of_choice
from raymoe.engine.json_schema import exact_schema
from raymoe.engine.sequence import Int32s
from raymoe.errors import ConfigError, ExecutionError, RaymoeError, WorkerProcessError
from raymoe.structured import StructuredOutputs
from raymoe.units import MIB, ceil_div

WORD_BITS = 32
NO_SLOT = -1
MAX_RETRIES = 3  # while workers end without an answer, and no row explains it
MAX_REFUSED = 4096


def compile_request(outputs: StructuredOutputs) -> dict[str, Any]:
    """What the worker compiles.

    Raises:
        ConfigError: It cannot be kept exactly; the message names the part.
    """
    kind, source = outputs.kind, ""
    if outputs.json is not None:
        source = exact_schema(outputs.json)
    elif outputs.regex is not None:
        source = exact_regex(outputs.regex)
    elif outputs.choice is not None:
        source = regex_of_choice(outputs.choice)
    elif outputs.grammar is not None:
        source = lark_of_grammar(outputs.grammar)
    elif outputs.json_object:
        source = '{"type": "object"}'
    return {"kind": kind, "source": source, "is_compact": outputs.disable_any_whitespace}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchLimits:
    """What the grammars of rows may take; CPU time, so that a busy machine refuses no more.

    llguidance has limits of its own (`grammar_worker.PARSER_LIMITS`) and ends most hostile input
    by name; these end the rest. Measured with 128,000 tokens on a core of 2024: schemas of use
    compile in 1 to 4 ms, and their bitmasks take 0.01 to 0.4 ms.

    Attributes:
        compile_limit_s: Until a grammar is compiled; a longer one ends the worker.
        step_limit_s: Of one bitmask; a longer one ends the worker.
        row_limit_s: Of all bitmasks of a row, together with `token_limit_s` for each token.
        token_limit_s: As above.
        max_row_bytes: Memory of one row.
        max_memory_bytes: Of all rows, beyond the vocabulary.
    """

    compile_limit_s: float = 1.0
    step_limit_s: float = 1.0
    row_limit_s: float = 1.0
    token_limit_s: float = 0.005
    max_row_bytes: int = 256 * MIB
    max_memory_bytes: int = 4096 * MIB


@dataclass(slots=True)
class _News:
    """What the worker was not told yet: slots, and the token of each that has one more."""

    ended: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.ended or self.begun or self.accepted)


class TokenBitmasks:
    """The rows with structured outputs. The engine thread owns it.

    A worker is told of tokens when they are chosen. A caller that needs a bitmask may wait for it
    or come back later. A row whose input ends the worker is known by the slot in work; it fails
    alone, and the others begin anew in another worker, by their tokens. If the worker is ended
    from outside, all do.

    Args:
        server: Of workers with the vocabulary.
        num_slots: Most rows at once.
        vocab_size: Of the logits.
        limits: Of each row.
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
        self._rows: dict[int, tuple[StructuredOutputs, list[int]]] = {}
        self._errors: dict[int, RaymoeError] = {}
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._known: set[str] = set()  # digests of what the worker has compiled
        self._news = _News()
        self._asked: set[int] = set()  # slots of which an answer is due
        self._worker: ForkedProcess | None = None
        self._num_ends = 0  # that no row explains, since the latest answer
        self._memory: mmap.mmap | None = None
        self._descriptor = -1

    def begin(self, slot: int, outputs: StructuredOutputs, tokens: Iterable[int]) -> None:
        """Put a row into a slot, after these generated tokens."""
        self._rows[slot] = (outputs, [int(token) for token in tokens])
        if outputs.digest in self._refused:
            self._errors[slot] = _refusal(outputs, self._refused[outputs.digest])
        else:
            self._news.begun.add(slot)

    def accept(self, slots: Int32s, tokens: Int32s) -> None:
        """Append a token to those of these slots that have structured outputs."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot in self._rows and slot not in self._errors:
                self._rows[slot][1].append(token)
                if slot not in self._news.begun:
                    self._news.accepted[slot] = token

    def end(self, slot: int) -> None:
        """Forget the row in this slot, if there is one."""
        self._errors.pop(slot, None)
        if self._rows.pop(slot, None) is not None:
            self._news.begun.discard(slot)
            self._news.accepted.pop(slot, None)
            self._news.ended.add(slot)

    def error(self, slot: int) -> RaymoeError | None:
        """Why the row in this slot has no tokens to choose from, if it has none."""
        return self._errors.get(slot)

    def pending(self) -> set[int]:
        """Slots whose bitmasks are not computed yet."""
        asked = self._asked - self._news.ended
        waiting = asked | self._news.begun | self._news.accepted.keys()
        return waiting - self._errors.keys()

    def settle(self, patience_s: float | None = 0.0, slots: Iterable[int] | None = None) -> None:
        """Take in what the worker has computed, and tell it what has changed.

        Args:
            patience_s: Longest wait for pending bitmasks; None waits for all of them.
            slots: Whose bitmasks are worth a wait; by default all.
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
        """Make impossible what the grammars of some rows forbid.

        Args:
            logits_RV: Float32, changed in place.
            rows: Of the logits.
            slots: Of these rows; none may be pending.
        """
        masks_RW = np.zeros((len(slots), self._num_words), np.int32)
        self.copy_masks(masks_RW, slots)
        bits = np.unpackbits(masks_RW.view(np.uint8), axis=1, bitorder="little")
        is_allowed_RV = torch.from_numpy(bits[:, : self._vocab_size]).bool()
        index = torch.from_numpy(rows)
        logits_RV[index] = logits_RV[index].masked_fill(~is_allowed_RV, float("-inf"))

    def copy_masks(self, masks_RW: Int32s, slots: Int32s) -> None:
        """Copy the bitmasks of the rows that have no error.

        Args:
            masks_RW: Changed in place.
            slots: Of these rows; none may be pending.
        """
        well = self._well()
        is_well = np.array([slot in well for slot in slots.tolist()], bool)
        if is_well.any():
            assert self._memory is not None
            words = np.frombuffer(self._memory, np.int32)
            masks_SW = words[:-2].reshape(self._num_slots, self._num_words)
            masks_RW[is_well] = masks_SW[slots[is_well]]

    def close(self) -> None:
        """End the worker and give the memory back."""
        self._end_worker()
        if self._memory is not None:
            os.close(self._descriptor)
            self._memory.close()
            self._memory = None

    def _collect(self, deadline_s: float | None) -> bool:
        """Take in the answer that is due; returns False if it does not come in time."""
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
        """Go on in another worker without the row that ended this one, if a row did."""
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
            return  # another row may be there by now
        self._news.begun.discard(slot)
        self._news.accepted.pop(slot, None)
        outputs = self._rows[slot][0]
        self._errors[slot] = _refusal(outputs, problem)
        if problem.startswith("cannot be used"):  # whatever the tokens are
            self._refused[outputs.digest] = problem
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _in_work(self) -> tuple[int, bool]:
        """The slot that the worker works for, and whether it compiles."""
        if self._memory is None:
            return NO_SLOT, False
        slot, phase = np.frombuffer(self._memory, np.int32)[-2:].tolist()
        return slot, bool(phase)

    def _fork(self, deadline_s: float | None) -> bool:
        """Start a worker and tell it of all rows without errors; False if that takes too long."""
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
        except WorkerProcessError as error:
            self._replace(error, deadline_s)
            return True
        except ExecutionError as error:
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
        """Send the news, with what the worker must compile for it."""
        assert self._worker is not None
        begun = {}
        for slot in self._news.begun:
            try:
                begun[slot] = compile_request(self._rows[slot][0])
            except RaymoeError as error:
                self._errors[slot] = error
        news, self._news = self._news, _News()
        used = {self._rows[slot][0].digest for slot in self._well()}
        content = {
            "grammars": {
                self._rows[slot][0].digest: request
                for slot, request in begun.items()
                if self._rows[slot][0].digest not in self._known
            },
            "forgotten": [digest for digest in self._known if digest not in used],
            "ended": list(news.ended),
            "begun": [(slot, self._rows[slot][0].digest, self._rows[slot][1]) for slot in begun],
            "accepted": list(news.accepted.items()),
        }
        self._known = used
        self._asked = set(begun) | news.accepted.keys() or {NO_SLOT}
        self._worker.send(content)


def _refusal(outputs: StructuredOutputs, problem: str) -> ConfigError:
    return ConfigError(f"structured_outputs has a {outputs.kind} that {problem}")


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
