"""EngineCore: one step after another, from the schedule to finished rows. One thread owns it."""

import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.condition import Condition
from raymoe.engine.accuracy import Accuracy, Replanner
from raymoe.engine.grammars import TokenBitmasks
from raymoe.engine.outputs import Counters, Generation, Int32s, TokenLogprob
from raymoe.engine.reasoning_state import ReasoningState
from raymoe.engine.request import Request, Sample
from raymoe.engine.sampler import Sampler, to_host, token_logprobs
from raymoe.engine.scheduler import Scheduler
from raymoe.engine.sequence import Bools, DecodeAll, SchedulerOutput, decode_each
from raymoe.engine.tasks.reading import Found
from raymoe.engine.tokenizer import StopStrings
from raymoe.errors import ExecutionError, RaymoeError
from raymoe.kernels.elementwise import triton_runs_on
from raymoe.memory.prefixes import PrefixSalt, no_salt
from raymoe.plan.footprint import LOGIT_CHUNK_ROWS
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.work import StepLoad
from raymoe.runtime.batch import InputBatch
from raymoe.schedule.timeline import Timeline
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS

# A node that does other work too, a first step that compiles, a predicted length that is wrong:
# none of them makes a step this much longer, and a restart for nothing costs a load of the model.
STUCK_AFTER_PREDICTIONS, STUCK_AFTER_S = 20, 600.0


class Watchdog:
    """A thread that calls `on_stuck` once when a step takes longer than `limit_s`.

    Args:
        on_stuck: Called from the watchdog's thread with the seconds waited.
    """

    def __init__(self, limit_s: float, on_stuck: Callable[[float], None]) -> None:
        self._limit_s, self._on_stuck = limit_s, on_stuck
        self._changed = Condition()
        self._begin_s: float | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="raymoe-watchdog", daemon=True)
        self._thread.start()

    def step_begins(self) -> None:
        with self._changed:
            is_asleep = self._begin_s is None
            self._begin_s = time.monotonic()
            if is_asleep:
                self._changed.notify_all()

    def step_ends(self) -> None:
        with self._changed:
            self._begin_s = None

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closing:
                if self._begin_s is None:
                    self._changed.wait()
                    continue
                late_s = time.monotonic() - self._begin_s - self._limit_s
                if late_s >= 0:
                    break
                self._changed.wait(-late_s)
            else:
                return
        self._on_stuck(self._limit_s + late_s)


def longest_step_s(plan: Plan | None) -> float:
    """Seconds after which a step counts as stuck: many times the longest that the plan predicts.

    That is a step with every sequence decoding over a full cache, and full of prompts besides.
    """
    if plan is None:
        return STUCK_AFTER_S
    policy = plan.policy
    largest = StepLoad(
        decode_rows=policy.max_num_seqs,
        decode_context=max(1.0, policy.num_kv_blocks * KV_BLOCK_TOKENS / policy.max_num_seqs),
        prompt_tokens=policy.max_num_batched_tokens,
        prompt_chunk=policy.max_prefill_chunk_tokens,
    )
    return max(STUCK_AFTER_S, STUCK_AFTER_PREDICTIONS * plan.steps.seconds(largest))


def stacks_of_all_threads() -> str:
    """Where every thread is; a thread in native code shows the call that led there."""
    with tempfile.TemporaryFile() as file:  # faulthandler writes to descriptors only
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


NO_TOKEN = -1  # what the sampler gives where the logits allow none
_NO_TOKEN = (
    "no token can be chosen: the logits have NaN, or logit_bias, stop tokens and grammar exclude "
    "everything"
)
PATIENCE = 0.005  # share of a step that rows without a grammar may wait for masks of others
MAX_LATE = 64  # rows whose logits are kept until their masks come: 64 MB for 250,000 tokens
Finish = Callable[[Request], None]
Rows = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes a step: `runtime.runner.ModelRunner`, or a test's stand-in."""

    @property
    def last_timeline(self) -> Timeline:
        """When each task of the latest step ran, its logits included."""

    def run(self, batch: InputBatch) -> AbstractContextManager[Tensor]:
        """Run one step: in the context there are its hidden rows, [R, H], for `compute_logits`."""

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        """Return the logits, [R, V], of some of the hidden rows, on the device that has these."""

    def interrupt(self) -> None:
        """End what a stuck step may be waiting for, so that it fails; from any thread."""

    def close(self) -> None:
        """Give memory back; called once, when no step runs any more."""


class ClosedRunner:
    """Stands for the runner of an engine that is closed."""

    last_timeline = Timeline("closed", ())

    def run(self, batch: InputBatch) -> AbstractContextManager[Tensor]:
        """Refuse a step."""
        raise ExecutionError(f"the engine is closed: it runs no {len(batch.token_ids)} tokens")

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        """Refuse rows."""
        raise ExecutionError(f"the engine is closed: it has no {len(hidden_RH)} rows")

    def interrupt(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class EngineCore:
    """Sequences from admission to their last token. One thread owns it.

    Args:
        policy: Sizes of steps and of the KV cache.
        decode_all: Token ids to texts, for stop strings.
        decode_marked: The same with special tokens, for the ends of reasoning.
        finish: Called with each row whose samples are over; some of its texts are undecoded.
        accuracy: Learns how long each step took.
        masks: Of rows with a grammar; without it there must be none.
        has_states: Whether layers keep a state per sequence.
        window: Tokens that layers with a sliding window keep (`ModelSpec.cache_window`).
        replanner: Changes the policy between steps.
    """

    def __init__(  # noqa: PLR0913 - the parts of an engine, most of them keyword-only
        self,
        runner: Runner,
        policy: Policy,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        decode_all: DecodeAll,
        decode_marked: DecodeAll | None = None,
        finish: Finish,
        accuracy: Accuracy | None = None,
        masks: TokenBitmasks | None = None,
        prefix_salt: PrefixSalt = no_salt,
        restart_length: int | None = None,
        has_states: bool = False,
        window: int | None = None,
        num_past_tokens: int = 0,
        replanner: Replanner | None = None,
    ) -> None:
        self._replanner = replanner
        self._runner, self._decode_all, self._finish_row = runner, decode_all, finish
        self._decode_marked = decode_marked or decode_all
        self.scheduler = Scheduler(
            policy,
            max_model_len,
            prefix_salt=prefix_salt,
            restart_length=restart_length,
            has_states=has_states,
            window=window,
            num_past_tokens=num_past_tokens,
            num_slots=None if replanner is None else replanner.num_slots,
        )
        self._table = self.scheduler.table
        self._masks = masks
        self._sampler = Sampler(self._table, eos_token_ids, masks)
        self._is_eos: Bools = np.zeros(vocab_size, np.bool_)
        self._is_eos[[token for token in eos_token_ids if token < vocab_size]] = True
        self._chosen: list[tuple[Int32s, Int32s]] = []
        # By slot, logits and their position of rows that wait for their masks outside of steps.
        self._late: dict[int, tuple[Tensor, int]] = {}
        self._errors: dict[int, Exception] = {}  # what ends the row in a slot after this step
        self._begin_s = 0.0  # of the latest step
        self.counters = Counters()
        self._accuracy = accuracy
        self.last_timeline: Timeline | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Take on a row; its first sample waits, the others follow it."""
        self.scheduler.add(request.samples[0])

    def drop(self, requests: Collection[Request]) -> None:
        """End rows for whose answers nobody waits any more, between steps."""
        if self._masks is not None:
            for slot in self.scheduler.running_slots():
                if self.scheduler.sample_of(slot).request in requests:
                    self._masks.end(slot)
                    self._late.pop(slot, None)
        self.scheduler.drop(requests)

    def close(self) -> None:
        """Let go of the runner, and of all memory besides the scheduler's tables."""
        self._runner = ClosedRunner()
        self._late.clear()
        self._errors.clear()

    def step(self) -> None:
        self._replan()
        self._sample_late()
        if not self.scheduler.has_work:
            return
        next_step = self.scheduler.next_step()
        if next_step is None:  # only masks can change that; the next call uses them
            self._wait_for_late()
            return
        for sample in self.scheduler.admitted:
            try:
                self._admit(sample)
            except Exception as error:
                self._errors[sample.slot] = error
        if self._masks is not None:
            self._masks.synchronize()
        self._begin_s = time.perf_counter()
        self.last_timeline = self._run(next_step)
        self.scheduler.complete(next_step)
        self.counters.record_step(next_step, time.perf_counter() - self._begin_s)
        if self._accuracy is not None:
            self._accuracy.record(next_step, self.last_timeline)
        self._advance_chosen()
        self._end_read(next_step)
        self._fail_rows()
        if self._masks is not None:
            self._masks.synchronize()  # they are made while the next step runs

    def _replan(self) -> None:
        if self._replanner is None:
            return
        policy = self._replanner.poll(self.scheduler.num_waiting + self._table.num_live)
        if policy is not None:
            self.scheduler.adopt(policy)

    @torch.inference_mode()
    def _run(self, next_step: SchedulerOutput) -> Timeline:
        """Run a step, and sample in chunks: logits of a whole prompt are never held at once."""
        with self._runner.run(next_step.batch) as hidden_RH:
            for begin in range(0, len(hidden_RH), LOGIT_CHUNK_ROWS):
                chunk_CH = hidden_RH[begin : begin + LOGIT_CHUNK_ROWS]
                rows = np.arange(begin, begin + len(chunk_CH))
                logits_CV = self._runner.compute_logits(chunk_CH)
                if triton_runs_on(logits_CV.device):
                    rows, logits_CV = self._take_on_device(next_step, rows, logits_CV)
                if len(rows):
                    self._take(next_step, rows, to_host(logits_CV))
        return self._runner.last_timeline

    @torch.inference_mode()
    def _sample_late(self) -> None:
        """Choose tokens of rows whose masks came after their step."""
        preempted = [slot for slot in self._late if not self._table.is_live[slot]]
        for slot in preempted:
            del self._late[slot]
        if self._masks is None or not self._late:
            return
        if self._late.keys() >= self.scheduler.running_slots():
            self._wait_for_late()  # there is nothing else to do
        ready = sorted(self._late.keys() - self._masks.pending())
        if not ready:
            return
        logits, positions = zip(*map(self._late.pop, ready), strict=True)
        slots, rows = np.array(ready, np.int32), np.arange(len(ready))
        self._sample(torch.stack(logits), slots, np.array(positions, np.int32), rows)
        self._advance_chosen()
        self._fail_rows()

    def _wait_for_late(self) -> None:
        assert self._masks is not None
        assert self._late, "only rows whose masks are late wait for tokens"
        self._masks.synchronize(None, self._late)

    def _have_masks(self, done: SchedulerOutput, slots: Int32s) -> Bools:
        """Which of these slots can be sampled; others of the step do not wait long for the rest."""
        assert self._masks is not None
        has_others = not self._table.has_grammar[done.row_slots].all()
        elapsed_s = time.perf_counter() - self._begin_s
        self._masks.synchronize(PATIENCE * elapsed_s if has_others else None, slots.tolist())
        num_late = len(self._masks.pending().intersection(slots.tolist()))
        if len(self._late) + num_late > MAX_LATE:
            self._masks.synchronize(None, slots.tolist())
        return ~np.isin(slots, list(self._masks.pending()))

    def _admit(self, sample: Sample) -> None:
        slot, params = sample.slot, sample.request.params
        if sample.request.reasoning is not None and sample.reasoning is None:
            sample.reasoning = ReasoningState(sample.request.reasoning)
        self._sampler.admit(sample)
        if params.stop_strings and sample.stop_strings is None:
            sample.stop_strings = StopStrings(
                params.stop_strings,
                params.min_tokens,
                is_included=params.include_stop_str_in_output,
            )
        if params.logprobs is not None and sample.logprobs is None:
            sample.logprobs = []
        leads_others = sample.index == 0 and params.n > 1
        self._table.ignores_eos[slot] = params.ignore_eos
        self._table.is_watched[slot] = bool(
            params.stop_strings
            or params.stop_token_ids
            or leads_others
            or sample.request.reasoning is not None
        )
        self._table.wants_logprobs[slot] = params.logprobs is not None
        if sample.request.reading is not None:
            sample.found = Found(sample.request.reading, sample.num_prompt_tokens)
        if self._masks is not None:
            self._masks.end(slot)  # of a row that was preempted here
            self._late.pop(slot, None)
            if sample.is_constrained:
                self._constrain(sample)

    def _change_constraint(self, sample: Sample) -> None:
        if self._masks is not None and sample.request.params.structured_outputs_params is not None:
            self._masks.end(sample.slot)
            self._sampler.admit(sample)
            if sample.is_constrained:
                self._constrain(sample)

    def _constrain(self, sample: Sample) -> None:
        request, form = sample.request, sample.request.params.structured_outputs_params
        assert self._masks is not None
        assert form is not None
        may_reason = sample.reasoning is not None and sample.reasoning.is_open is None
        tokens = self._table.generated(sample.slot)[sample.answer_index :]
        token = request.reasoning_token if may_reason else None
        self._masks.begin(sample.slot, form, tokens, token)

    def _take_on_device(
        self, done: SchedulerOutput, step_rows: Rows, logits_CV: Tensor
    ) -> tuple[Rows, Tensor]:
        """Choose where the logits are; returns the rows, and their logits, that the host needs."""
        slots, positions = done.row_slots[step_rows], done.row_positions[step_rows]
        needs_logits = self._sampler.needs_logits(slots, done.row_is_sample[step_rows])
        rows, others = np.flatnonzero(~needs_logits), np.flatnonzero(needs_logits)
        if not len(rows):
            return step_rows, logits_CV
        tokens = self._sampler.choose_on_device(logits_CV, slots, positions)
        self._refuse_none(rows, slots, tokens)
        self._keep(rows, slots, tokens)
        if not len(others):
            return others, logits_CV[:0]
        index = torch.from_numpy(others).to(logits_CV.device)
        return step_rows[others], logits_CV[index]

    def _take(self, done: SchedulerOutput, step_rows: Rows, logits_CV: Tensor) -> None:
        slots, positions = done.row_slots[step_rows], done.row_positions[step_rows]
        is_sample = done.row_is_sample[step_rows]
        is_read = self._table.is_read[slots]
        self._read(logits_CV, slots, positions, np.flatnonzero(is_read))
        prompt = np.flatnonzero(~is_sample & ~is_read)
        if len(prompt):
            self._take_prompt(logits_CV, slots[prompt], positions[prompt], prompt)
        rows = self._well(np.flatnonzero(is_sample), slots)
        if self._table.has_grammar[slots[rows]].any():
            is_ready = self._have_masks(done, slots[rows])
            for row in rows[~is_ready].tolist():
                self._late[int(slots[row])] = logits_CV[row].clone(), int(positions[row])
            rows = rows[is_ready]
        self._sample(logits_CV, slots, positions, rows)

    def _sample(self, logits_CV: Tensor, slots: Int32s, positions: Int32s, rows: Rows) -> None:
        tokens = np.full(len(slots), NO_TOKEN, np.int32)

        def choose(rows: Rows) -> None:
            tokens[rows] = self._sampler.choose(logits_CV, slots[rows], positions[rows], rows)

        self._each(rows, slots, choose)
        self._refuse_none(rows, slots, tokens)
        wanted = self._well(rows[self._table.wants_logprobs[slots[rows]]], slots)
        self._each(wanted, slots, lambda rows: self._keep_logprobs(logits_CV, slots, tokens, rows))
        self._keep(rows, slots, tokens)

    def _refuse_none(self, rows: Rows, slots: Int32s, tokens: Int32s) -> None:
        for row in rows[tokens[rows] == NO_TOKEN].tolist():
            self._errors.setdefault(int(slots[row]), self._no_token(int(slots[row])))

    def _keep(self, rows: Rows, slots: Int32s, tokens: Int32s) -> None:
        rows = self._well(rows, slots)
        self._chosen.append((slots[rows], tokens[rows]))

    def _read(self, logits_CV: Tensor, slots: Int32s, positions: Int32s, rows: Rows) -> None:
        for run in np.split(rows, np.flatnonzero(np.diff(slots[rows])) + 1):
            if not len(run):
                continue
            sample = self.scheduler.sample_of(int(slots[run[0]]))
            assert sample.found is not None
            first, index = int(positions[run[0]]) - 1, int(run[0])
            if positions[run[-1]] - 1 != first + len(run) - 1:  # the first row, then the last
                sample.found.take(logits_CV[index : index + 1], first)
                first, index = int(positions[run[-1]]) - 1, int(run[-1])
            sample.found.take(logits_CV[index : int(run[-1]) + 1], first)

    def _end_read(self, done: SchedulerOutput) -> None:
        """End the sequences of the step that are only read and whose prompts are computed."""
        table, slots = self._table, done.slots
        is_over = table.num_computed_tokens[slots] == table.num_tokens[slots]
        for slot in slots[table.is_read[slots] & is_over].tolist():
            if slot in self._errors:
                continue
            sample = self.scheduler.sample_of(slot)
            found = sample.found
            assert found is not None
            if not (np.isfinite(found.logprobs).all() and found.is_finite):
                self._errors[slot] = ExecutionError("the logits have NaN or infinity")
                continue
            num_tokens, num_cached = sample.num_prompt_tokens, sample.num_cached_tokens
            self._end(
                sample,
                Generation(
                    num_input_tokens=num_tokens, num_cached_tokens=num_cached,
                    values={"found": found},
                ),
            )  # fmt: skip

    def _well(self, rows: Rows, slots: Int32s) -> Rows:
        return rows[~np.isin(slots[rows], list(self._errors))] if self._errors else rows

    def _each(self, rows: Rows, slots: Int32s, work: Callable[[Rows], None]) -> None:
        """Work on some rows at once; if that raises, on each alone, so that only its own row ends.

        Args:
            work: Changes nothing when it raises.
        """
        if not len(rows):
            return
        try:
            work(rows)
        except Exception:
            for row in rows:
                try:
                    work(np.array([row]))
                except Exception as error:
                    self._errors[int(slots[row])] = error

    def _no_token(self, slot: int) -> Exception:
        error = None if self._masks is None else self._masks.error(slot)
        return error or ExecutionError(_NO_TOKEN)

    def _keep_logprobs(self, logits_CV: Tensor, slots: Int32s, tokens: Int32s, rows: Rows) -> None:
        samples = [self.scheduler.sample_of(slot) for slot in slots[rows]]
        counts = [sample.request.params.logprobs or 0 for sample in samples]
        wanted_RV = logits_CV[torch.from_numpy(rows)]
        entries = token_logprobs(wanted_RV, tokens[rows].tolist(), counts)
        for sample, entry in zip(samples, entries, strict=True):
            assert sample.logprobs is not None
            sample.logprobs.append(entry)

    def _take_prompt(self, logits_CV: Tensor, slots: Int32s, positions: Int32s, rows: Rows) -> None:
        def keep(index: Rows) -> None:
            samples = [self.scheduler.sample_of(slot) for slot in slots[index]]
            counts = [sample.request.params.prompt_logprobs or 0 for sample in samples]
            tokens = [
                int(sample.request.prompt[position])
                for sample, position in zip(samples, positions[index], strict=True)
            ]
            entries = token_logprobs(logits_CV[torch.from_numpy(rows[index])], tokens, counts)
            for sample, entry in zip(samples, entries, strict=True):
                if sample.prompt_logprobs is None:
                    sample.prompt_logprobs = [None]  # nothing predicts the first token
                sample.prompt_logprobs.append(entry)

        self._each(self._well(np.arange(len(rows)), slots), slots, keep)

    def _advance_chosen(self) -> None:
        chosen, self._chosen = self._chosen, []
        for slots, tokens in chosen:
            self._advance(slots, tokens)

    def _advance(self, slots: Int32s, tokens: Int32s) -> None:
        self._table.append(slots, tokens)
        if self._masks is not None:
            self._masks.accept(slots, tokens)
        is_eos = self._is_eos[tokens] & ~self._table.ignores_eos[slots]
        is_full = self._table.num_tokens[slots] >= self._table.max_tokens_total[slots]
        rows = np.flatnonzero(is_eos | is_full | self._table.is_watched[slots])
        is_stopped = [
            bool(is_eos[row]) or self._is_stop_token(int(slots[row]), int(tokens[row]))
            for row in rows
        ]
        going_on = slots[rows[~np.array(is_stopped, np.bool_)]].tolist()
        texts = self._find_stop_strings(going_on, self._follow_reasoning(going_on))
        for row, is_stop in zip(rows, is_stopped, strict=True):
            sample = self.scheduler.sample_of(int(slots[row]))
            if sample.index == 0 and self._num_generated(sample) == 1:
                self.scheduler.add_first(sample.request.samples[1:])
            if sample.slot in self._errors:
                continue
            try:
                generation = self._check(
                    sample, texts.get(sample.slot), is_stop=is_stop, is_full=bool(is_full[row])
                )
            except Exception as error:
                self._errors[sample.slot] = error
                continue
            if generation is not None:
                self.scheduler.forecast.record_finished(generation.num_generated_tokens)
                if self._replanner is not None:
                    self._replanner.record_row(
                        sample.num_prompt_tokens,
                        generation.num_generated_tokens,
                        sample.num_cached_tokens,
                    )
                self._end(sample, generation)

    def _num_generated(self, sample: Sample) -> int:
        return int(self._table.num_tokens[sample.slot]) - sample.num_prompt_tokens

    def _is_stop_token(self, slot: int, token: int) -> bool:
        return token in (self.scheduler.sample_of(slot).request.params.stop_token_ids or ())

    def _follow_reasoning(self, slots: Sequence[int]) -> dict[int, bool | None]:
        """Return whether the latest token of these slots is in their reasoning, its end too.

        None where that is not known yet. Constraints begin after the end.
        """
        samples = {slot: self.scheduler.sample_of(slot) for slot in slots}
        states = {
            slot: sample.reasoning
            for slot, sample in samples.items()
            if sample.reasoning is not None and sample.reasoning.is_open is not False
        }
        before = {slot: state.is_open for slot, state in states.items()}
        self._read_text(states, self._decode_marked, lambda slot, *texts: states[slot].find(*texts))
        for slot, state in states.items():
            if state.is_open:
                is_changed = not before[slot]
            else:  # an answer from the first token on is constrained already
                is_changed = before[slot] is True and state.is_open is False
            if is_changed and slot not in self._errors:
                samples[slot].answer_index = self._num_generated(samples[slot])
                self._change_constraint(samples[slot])
        return {slot: before[slot] or state.is_open for slot, state in states.items()}

    def _find_stop_strings(
        self, slots: Sequence[int], is_open: Mapping[int, bool | None]
    ) -> dict[int, str | None]:
        samples = {slot: self.scheduler.sample_of(slot) for slot in slots}
        finders = {
            slot: sample.stop_strings
            for slot, sample in samples.items()
            if sample.stop_strings is not None
        }
        found: dict[int, str | None] = {}

        def find(slot: int, before: str, text: str) -> None:
            found[slot] = finders[slot].find(before, text, is_open.get(slot, False))

        for decode_all, has_special in ((self._decode_all, False), (self._decode_marked, True)):
            some = {
                slot: finder
                for slot, finder in finders.items()
                if samples[slot].request.params.skip_special_tokens is not has_special
            }
            self._read_text(some, decode_all, find)
        return found

    def _read_text(
        self,
        readers: Mapping[int, StopStrings | ReasoningState],
        decode_all: DecodeAll,
        read: Callable[[int, str, str], None],
    ) -> None:
        """Decode the latest tokens of these slots together, and read the text of each."""
        pushed: list[int] = []
        windows: list[list[int]] = []
        for slot, reader in readers.items():
            try:
                windows += reader.push(int(self._table.last_token[slot]))
                pushed.append(slot)
            except Exception as error:
                self._errors[slot] = error
        decoded = iter(decode_each(decode_all, windows)) if windows else iter(())
        for slot, before, text in zip(pushed, decoded, decoded, strict=True):
            try:
                read(slot, _text(before), _text(text))
            except Exception as error:
                self._errors[slot] = error

    def _check(
        self, sample: Sample, text: str | None, *, is_stop: bool, is_full: bool
    ) -> Generation | None:
        if is_stop or text is not None:
            is_hidden = is_stop and not sample.request.params.include_stop_str_in_output
            return self._generation(sample, "stop", text=text, num_hidden=int(is_hidden))
        return self._generation(sample, "length") if is_full else None

    def _generation(
        self, sample: Sample, reason: str, *, text: str | None = None, num_hidden: int = 0
    ) -> Generation:
        first = sample.num_prompt_tokens
        token_ids = self._table.tokens(sample.slot, first).tolist()
        if text is None:
            sample.request.undecoded[sample.index] = token_ids[: len(token_ids) - num_hidden]
        return Generation(
            text=text or "",
            token_ids=tuple(token_ids),
            finish_reason=reason,
            num_input_tokens=first,
            num_generated_tokens=len(token_ids),
            num_cached_tokens=sample.num_cached_tokens,
            logprobs=None if sample.logprobs is None else tuple(sample.logprobs),
            prompt_logprobs=_prompt_logprobs(sample),
        )

    def _fail_rows(self) -> None:
        while self._errors:
            slot, problem = self._errors.popitem()
            self._fail(self.scheduler.sample_of(slot), problem)

    def _fail(self, sample: Sample, error: Exception) -> None:
        """End a sample by an error, and with it those that were to follow its first token."""
        if not isinstance(error, RaymoeError):
            logger.error("a row failed, the others go on", exc_info=error)
        generation = Generation.from_error(error, sample.num_prompt_tokens)
        if sample.index == 0 and self._num_generated(sample) == 0:
            sample.request.finished[1:] = [generation] * (sample.request.params.n - 1)
        sample.request.undecoded.pop(sample.index, None)
        self._end(sample, generation)

    def _end(self, sample: Sample, generation: Generation) -> None:
        request = sample.request
        if self._masks is not None:
            self._masks.end(sample.slot)
            self._late.pop(sample.slot, None)
        self.scheduler.finish(sample.slot)
        self.counters.num_generated_tokens += generation.num_generated_tokens
        self.counters.num_cached_tokens += generation.num_cached_tokens
        request.finished[sample.index] = generation
        if None not in request.finished:
            self._finish_row(request)


def _text(decoded: str | Exception) -> str:
    if isinstance(decoded, Exception):
        raise decoded
    return decoded


def _prompt_logprobs(sample: Sample) -> tuple[TokenLogprob | None, ...] | None:
    if sample.index > 0 or sample.request.params.prompt_logprobs is None:
        return None
    return tuple(sample.prompt_logprobs or [None])  # a prompt of one token has no logits
