"""Which tokens may come next? Masks of the rows with a grammar, made while passes run.

S slots, R rows of a chunk of logits, V vocabulary, W words of 32 tokens.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.reduction import send_handle
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.engine.grammar_server import ForkedProcess, GrammarServer, LimitError
from raymoe.engine.grammars import Grammar
from raymoe.engine.outputs import Int32s
from raymoe.errors import ConfigError, ExecutionError, RaymoeError, WorkerProcessError
from raymoe.units import MIB, ceil_div

WORD_BITS = 32
NO_SLOT = -1
MAX_RETRIES = 3  # while processes end without an answer, and no row explains it
SLOW_SHARE = 0.005  # of the cores, for slow rows while others are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchLimits:
    """What the masks of live rows may take.

    Attributes:
        row_limit_s: CPU time that a row may use in advance.
        token_limit_s: CPU time that each token pays back; what it does not use is not saved up.
        step_limit_s: CPU time by which one step may exceed both; one that takes longer ends the
            process of all rows, other slow ones just their row.
    """

    row_limit_s: float
    token_limit_s: float
    step_limit_s: float
    max_row_bytes: int = 128 * MIB
    max_memory_bytes: int = 4096 * MIB

    @classmethod
    def of(cls, vocab_size: int) -> Self:
        """Those of a vocabulary.

        Nearly all masks take less than a millisecond. The dearest of use, of ``.{1,200}``, took
        5 ms with 32,000 tokens and 35 with 128,000 on a core of 2024, single ones three times that.
        """
        row_limit_s = 0.05 + 2e-6 * vocab_size
        return cls(
            row_limit_s=row_limit_s,
            token_limit_s=1e-3 + 4e-7 * vocab_size,
            step_limit_s=row_limit_s,
        )

    def promptly(self, vocab_size: int) -> Self:
        return dataclasses.replace(self, row_limit_s=0.01 + 5e-7 * vocab_size)


@dataclass(slots=True)
class _News:
    """What the process was not told yet: slots, and the token of each that has one more."""

    ended: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.ended or self.begun or self.accepted)


class TokenMasks:
    """The rows with a grammar. The engine thread owns it.

    Masks are made in a process of their own, which is told of tokens when they are chosen. Who
    needs a mask that is not made yet may wait for it, or come back later. A row that ends this
    process is known by the slot in work; it fails alone, and the others begin anew in another
    process, by their tokens. If the process is ended from outside, all do.

    Args:
        gives_way: Whether the process takes only what others leave of the cores, and rests.
        slower: Where rows that are too slow here begin anew instead of failing.
    """

    def __init__(
        self,
        server: GrammarServer,
        num_slots: int,
        vocab_size: int,
        limits: MatchLimits | None = None,
        *,
        gives_way: bool = False,
        slower: "TokenMasks | None" = None,
    ) -> None:
        self._server, self._num_slots, self._vocab_size = server, num_slots, vocab_size
        self._limits = limits or MatchLimits.of(vocab_size)
        self._gives_way, self._slower = gives_way, slower
        self._num_words = ceil_div(vocab_size, WORD_BITS)
        self._rows: dict[int, tuple[Grammar, list[int]]] = {}
        self._errors: dict[int, RaymoeError] = {}
        self._known: set[str] = set()  # grammars that the process has
        self._news = _News()
        self._asked: set[int] = set()  # slots of which an answer is due
        self._process: ForkedProcess | None = None
        self._num_ends = 0  # that no row explains, since the latest answer
        self._memory: mmap.mmap | None = None
        self._descriptor = -1
        self._rest_until_s = 0.0

    @classmethod
    def with_slow_lane(cls, server: GrammarServer, num_slots: int, vocab_size: int) -> Self:
        """Those of an engine: slow rows neither delay others nor take the cores from passes."""
        limits = MatchLimits.of(vocab_size)
        slower = cls(server, num_slots, vocab_size, limits, gives_way=True)
        return cls(server, num_slots, vocab_size, limits.promptly(vocab_size), slower=slower)

    def begin(self, slot: int, grammar: Grammar, tokens: Iterable[int]) -> None:
        """Put a row into a slot, after these generated tokens."""
        self._rows[slot] = (grammar, [int(token) for token in tokens])
        self._news.begun.add(slot)

    def accept(self, slots: Int32s, tokens: Int32s) -> None:
        """Append a token to those of these slots that have a grammar."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot in self._rows and slot not in self._errors:
                self._rows[slot][1].append(token)
                if slot not in self._news.begun:
                    self._news.accepted[slot] = token
        if self._slower is not None:
            self._slower.accept(slots, tokens)

    def end(self, slot: int) -> None:
        """Forget what is in a slot, if anything is."""
        if self._rows.pop(slot, None) is not None:
            self._errors.pop(slot, None)
            self._news.begun.discard(slot)
            self._news.accepted.pop(slot, None)
            self._news.ended.add(slot)
        elif self._slower is not None:
            self._slower.end(slot)

    def error(self, slot: int) -> RaymoeError | None:
        """Why the row in this slot has no tokens to choose from, if it has none."""
        if slot in self._errors or self._slower is None:
            return self._errors.get(slot)
        return self._slower.error(slot)

    def pending(self) -> set[int]:
        later = set() if self._slower is None else self._slower.pending()
        return self._pending_here() | later

    def synchronize(
        self, patience_s: float | None = 0.0, slots: Iterable[int] | None = None
    ) -> None:
        """Take in what the process has made, and let it work on what has changed.

        Args:
            patience_s: Longest wait for pending masks; None waits for all of them.
            slots: Whose masks are worth a wait; by default all.
        """
        deadline_s = None if patience_s is None else time.monotonic() + patience_s
        waits = slots is None or not self._pending_here().isdisjoint(slots)
        while self._collect(deadline_s if waits else 0.0) and not self._news.is_empty:
            if time.monotonic() < self._rest_until_s and not (waits and patience_s is None):
                break
            if self._process is None:
                self._fork()
            else:
                self._tell()
        if self._slower is not None:
            self._slower.synchronize(_left_s(deadline_s), slots)

    def apply(self, logits_RV: Tensor, rows: npt.NDArray[np.int64], slots: Int32s) -> None:
        """Make impossible what the grammars of some rows forbid."""
        masks_RW = np.zeros((len(slots), self._num_words), np.int32)
        self.copy_masks(masks_RW, slots)
        bits = np.unpackbits(masks_RW.view(np.uint8), axis=1, bitorder="little")
        is_allowed_RV = torch.from_numpy(bits[:, : self._vocab_size]).bool()
        index = torch.from_numpy(rows)
        logits_RV[index] = logits_RV[index].masked_fill(~is_allowed_RV, float("-inf"))

    def copy_masks(self, masks_RW: Int32s, slots: Int32s) -> None:
        """Put in the masks of the rows that are well."""
        well = self._rows.keys() - self._errors.keys()
        is_well = np.array([slot in well for slot in slots.tolist()], bool)
        if is_well.any():
            assert self._memory is not None
            words = np.frombuffer(self._memory, np.int32)
            masks_SW = words[:-1].reshape(self._num_slots, self._num_words)
            masks_RW[is_well] = masks_SW[slots[is_well]]
        if self._slower is not None:
            self._slower.copy_masks(masks_RW, slots)

    def close(self) -> None:
        """End the process and give the memory back."""
        self._end_process()
        if self._memory is not None:
            os.close(self._descriptor)
            self._memory.close()
            self._memory = None
        if self._slower is not None:
            self._slower.close()

    def _pending_here(self) -> set[int]:
        asked = self._asked - self._news.ended
        waiting = asked | self._news.begun | self._news.accepted.keys()
        return waiting - self._errors.keys()

    def _collect(self, deadline_s: float | None) -> bool:
        while self._asked:
            assert self._process is not None
            try:
                if not self._process.has_answer(_left_s(deadline_s)):
                    return False
                answer = json.loads(self._process.receive())
            except (LimitError, WorkerProcessError) as error:
                self._replace(error)
                continue
            self._num_ends = 0
            self._fail(answer["failed"])
            self._asked.clear()
            if self._gives_way:
                share = SLOW_SHARE * len(os.sched_getaffinity(0))
                self._rest_until_s = time.monotonic() + answer["used_s"] / share
        return True

    def _replace(self, error: Exception) -> None:
        slot = self._slot_in_work()
        if isinstance(error, LimitError) and slot != NO_SLOT:
            limit_s = self._limits.step_limit_s
            self._fail({slot: (f"takes more than {limit_s:.2g} s for one token", True)})
        else:
            self._num_ends += 1
        if self._num_ends > MAX_RETRIES:
            reason = (
                str(error) or "structured_outputs: the process that matches tokens keeps ending"
            )
            lost = self._well() if slot == NO_SLOT else {slot} - self._news.ended
            self._errors |= dict.fromkeys(lost, WorkerProcessError(reason))
        self._fork()

    def _well(self) -> set[int]:
        return self._rows.keys() - self._errors.keys()

    def _fail(self, failed: dict[Any, tuple[str, bool]]) -> None:
        """Note by slot what is wrong with a row, or hand it over if it is just slow."""
        for slot, (error, is_slow) in failed.items():
            if int(slot) in self._news.ended:
                continue  # another row may be there by now
            if is_slow and self._slower is not None:
                self._slower.begin(int(slot), *self._rows.pop(int(slot)))
            else:
                reason = f"structured_outputs has a grammar that {error}"
                self._errors[int(slot)] = ConfigError(reason)

    def _slot_in_work(self) -> int:
        assert self._memory is not None
        return int(np.frombuffer(self._memory, np.int32)[-1])

    def _fork(self) -> None:
        self._end_process()
        if not self._well():
            self._num_ends = 0
            return
        if self._memory is None:
            num_bytes = 4 * (self._num_slots * self._num_words + 1)
            self._descriptor = os.memfd_create("raymoe-masks")
            os.truncate(self._descriptor, num_bytes)
            self._memory = mmap.mmap(self._descriptor, num_bytes)
        np.frombuffer(self._memory, np.int32)[-1:] = NO_SLOT
        try:
            self._process = self._server.fork(b"match", self._descriptor)
        except WorkerProcessError as error:
            self._replace(error)
            return
        except ExecutionError as error:
            self._errors |= dict.fromkeys(self._well(), error)
            return
        settings = dataclasses.asdict(self._limits) | {
            "num_slots": self._num_slots,
            "gives_way": self._gives_way,
        }
        self._process.send(settings)
        self._news = _News(begun=self._well())
        self._tell()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        self._known.clear()
        self._asked.clear()
        self._news = _News()

    def _tell(self) -> None:
        assert self._process is not None
        news, self._news = self._news, _News()
        grammars = {
            grammar.digest: (slot, grammar)
            for slot, (grammar, _) in self._rows.items()
            if slot not in self._errors
        }
        fresh = [
            (digest, slot, grammar)
            for digest, (slot, grammar) in grammars.items()
            if digest not in self._known
        ]
        content = {
            "grammars": [
                (digest, slot, len(grammar.data), grammar.is_json)
                for digest, slot, grammar in fresh
            ],
            "forgotten": [digest for digest in self._known if digest not in grammars],
            "ended": list(news.ended),
            "begun": [
                (slot, self._rows[slot][0].digest, self._rows[slot][1]) for slot in news.begun
            ],
            "accepted": list(news.accepted.items()),
        }
        self._known = set(grammars)
        self._asked = news.begun | news.accepted.keys() or {NO_SLOT}
        # Through the pipe, grammars would go only as fast as the process reads them.
        data = _memory_file(grammar.data for _, _, grammar in fresh) if fresh else None
        self._process.send(content)
        with data or contextlib.nullcontext(), contextlib.suppress(OSError):
            # This fails if the process has ended, which the answer will show.
            if data is not None:
                send_handle(self._process.pipe, data.fileno(), 0)


def _memory_file(parts: Iterable[bytes]) -> BinaryIO:
    file = os.fdopen(os.memfd_create("raymoe-grammars"), "wb")
    file.writelines(parts)
    file.seek(0)
    return file


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
