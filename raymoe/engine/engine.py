"""Engine: prompts in, generations out. One thread computes, another decodes; any number call it."""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeGuard

from raymoe.chat.parser import ChatParser
from raymoe.condition import Condition
from raymoe.config import (
    ENGINE_NAMES,
    SAMPLING_NAMES,
    EngineConfig,
    SamplingParams,
    as_engine_config,
    check_names,
)
from raymoe.device.lane import released_on_error
from raymoe.device.threads import set_num_threads
from raymoe.engine.accuracy import Accuracy, Correction, Replanner, RunReport
from raymoe.engine.answers import split_generation
from raymoe.engine.core import (
    ClosedRunner,
    EngineCore,
    Watchdog,
    longest_step_s,
    stacks_of_all_threads,
)
from raymoe.engine.device_memory import log_free_memory
from raymoe.engine.grammars import GrammarServer, TokenBitmasks
from raymoe.engine.load import EngineParts, load_parts
from raymoe.engine.outputs import EngineStats, Generation
from raymoe.engine.progress import shown_load, shown_rows
from raymoe.engine.release import clear_frames, return_memory
from raymoe.engine.request import InputProcessor, Request
from raymoe.engine.sequence import DecodeAll, decode_each
from raymoe.engine.stream import RowStream
from raymoe.engine.tasks.rows import RowAnswers, TaskOptions, TaskRow, check_head, check_labels
from raymoe.engine.tokenizer import Prompt, Tokenizer
from raymoe.errors import ConfigError, ExecutionError
from raymoe.output_schema import OutputSchema
from raymoe.plan.policy import Policy
from raymoe.schedule.graph import Resource
from raymoe.schedule.timeline import Timeline
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.suggestions import METHODS_OF_OTHERS
from raymoe.vllm_names import sampling_options

MAX_ROWS = 256  # at once

logger = logging.getLogger(__name__)


class Detokenizer:
    """Takes rows whose samples are all over and hands them on with their texts.

    Args:
        finish: Called from the thread with each row and its answer.
    """

    def __init__(self, tokenizer: Tokenizer, finish: Callable[[Request, Generation], None]) -> None:
        self._tokenizer, self._finish = tokenizer, finish
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="raymoe-detokenizer", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Whether it is this thread that asks: a callback of a future."""
        return threading.current_thread() is self._thread

    def put(self, request: Request) -> None:
        self._queue.put(request)

    def close(self) -> None:
        """Hand on all rows that were taken, and end the thread."""
        self._queue.put(None)
        if not self.is_current_thread:
            self._thread.join()
            return
        self._run()  # what is waiting; the loop that called us ends too
        self._queue.put(None)

    def _run(self) -> None:
        is_open = True
        while is_open:
            taken = [self._queue.get()]
            while len(taken) < MAX_ROWS and not self._queue.empty():
                taken.append(self._queue.get())
            is_open = None not in taken
            self._answer([request for request in taken if request is not None])

    def _answer(self, requests: Sequence[Request]) -> None:
        plain = [request for request in requests if request.params.skip_special_tokens]
        marked = [request for request in requests if not request.params.skip_special_tokens]
        self._decode(plain, self._tokenizer.decode_all)
        self._decode(marked, self._tokenizer.decode_marked)
        for request in requests:
            try:
                self._finish(request, _joined(request))
            except BaseException:  # SystemExit, say: other rows wait for this thread
                logger.exception(
                    "a callback that was added to a row's future raised; other rows go on"
                )

    @staticmethod
    def _decode(requests: Sequence[Request], decode_all: DecodeAll) -> None:
        wanted = [(request, index) for request in requests for index in request.undecoded]
        sequences = [request.undecoded[index] for request, index in wanted]
        texts = decode_each(decode_all, sequences) if sequences else []
        for (request, index), text in zip(wanted, texts, strict=True):
            generation = request.finished[index]
            assert generation is not None
            request.finished[index] = (
                Generation.from_error(text, generation.num_input_tokens)
                if isinstance(text, Exception)
                else dataclasses.replace(generation, text=text)
            )


def _joined(request: Request) -> Generation:
    try:
        return request.generation
    except Exception as error:
        return Generation.from_error(error, len(request.prompt))


class BatchingWindow:
    """Holds back the first step of an idle engine until waiting longer is pointless.

    That is: a full pool of rows waits, or all callers are inside (so none can bring more), or a
    caller said that it has no more, or the first row has waited `linger_s`. The owner's lock
    guards it.

    Args:
        pool_rows: Rows that fill the engine.
        expected_calls: How many callers there are; None if unknown.
    """

    def __init__(self, pool_rows: int, linger_s: float, expected_calls: int | None) -> None:
        self.expected_calls = expected_calls
        self.num_calls_in_flight = 0
        self._pool_rows, self._linger_s = pool_rows, linger_s
        self._first_row_s: float | None = None
        self._is_hurried = False

    def start_now(self) -> None:
        self._is_hurried = True

    def row_came(self) -> None:
        if self._first_row_s is None:
            self._first_row_s = time.monotonic()

    def started(self) -> None:
        """Note that the engine runs; the next idle time begins anew."""
        self._first_row_s, self._is_hurried = None, False

    def wait_s(self, num_rows: int) -> float | None:
        """Seconds to wait with this many rows: 0 is start now, None is until something comes."""
        if num_rows == 0 or self._first_row_s is None:
            return None
        expected = self.expected_calls
        all_in_flight = expected is not None and self.num_calls_in_flight >= expected
        if self._is_hurried or all_in_flight or num_rows >= self._pool_rows:
            return 0.0
        return max(0.0, self._first_row_s + self._linger_s - time.monotonic())


Params = SamplingParams | Mapping[str, Any] | None
STUCK_JOIN_S = 2.0  # how long `close` waits for a thread that the watchdog gave up
FULL = 0.9  # share of the tokens of a step from which it counts as full
MAX_SUBMITTING = 32  # calls of `agenerate` whose prompts are encoded at once; others wait
_CLOSED = (
    "this engine is closed and its model is no longer in memory; load it again with "
    "Engine.from_pretrained"
)


class Call:
    """The rows of one call that waits for all of them."""

    def __init__(self) -> None:
        self.is_dropped = False  # nobody waits any more; guarded by the engine's lock
        self._lock, self._num_done = threading.Lock(), 0

    def watch(self, future: Future[Generation]) -> None:
        future.add_done_callback(self._count)

    def num_done(self) -> int:
        return self._num_done

    def _count(self, _: Future[Generation]) -> None:
        with self._lock:
            self._num_done += 1


class Engine:
    """Generates text for rows, many at once, in steps over the whole model.

    Rows from any number of calls share steps; each leaves as soon as it is finished and the next
    takes its place. A row's tokens depend on its prompt, its parameters and the engine's seed, not
    on the rows beside it.

    Use it as a context manager, or call `close`: a model stays in memory until then, whatever
    becomes of the variable.

    Examples:
        >>> with raymoe.Engine.from_pretrained(raymoe.demo_model_path()) as engine:
        ...     [generation] = engine.generate(["date: 5 March 2024 ->"], temperature=0.0)
        >>> generation.text, generation.finish_reason
        ('2024-03-05', 'stop')

    Attributes:
        plan: Sizes, schedule, footprint and prediction; None for an engine made from parts.
        accuracy: What steps were predicted to take and what they took, since rows last began;
            None for an engine made from parts.
        last_report: The same, of the last time that all rows were done.
    """

    _checked_form: object = None  # by the latest `check_params`
    _submitter: ThreadPoolExecutor | None = None  # of `agenerate`, from its first call
    _has_logged_memory = False
    _failure: ExecutionError | None = None  # guarded by `_changed`
    _had_failed = False  # before it was closed

    def __init__(self, parts: EngineParts, config: EngineConfig | None = None) -> None:
        """Start an engine from loaded parts; `from_pretrained` is the usual way."""
        config = config or EngineConfig()
        self._pid, self._parts, self.plan = os.getpid(), _checked_parts(parts), parts.plan
        self.last_report: RunReport | None = None
        self.accuracy: Accuracy | None = None
        replanner: Replanner | None = None
        if parts.plan is not None:
            self.accuracy = Accuracy(Correction(parts.plan.step_times()))
            if config.policy is None:
                replanner = Replanner(parts.plan, self.accuracy, may_grow=parts.may_grow)
        self._input_processor = InputProcessor(
            parts.tokenizer,
            vocab_size=parts.vocab_size,
            max_model_len=parts.max_model_len,
            num_kv_blocks=parts.policy.num_kv_blocks,
            has_eos=bool(parts.eos_token_ids),
            config=config,
        )
        self._grammar_server = GrammarServer(
            parts.tokenizer.directory, parts.vocab_size, parts.eos_token_ids
        )
        num_slots = parts.policy.max_num_seqs if replanner is None else replanner.num_slots
        self._masks = TokenBitmasks(self._grammar_server, num_slots, parts.vocab_size)
        self._detokenizer = Detokenizer(parts.tokenizer, self._resolve)
        self._core = EngineCore(
            parts.runner,
            parts.policy,
            max_model_len=parts.max_model_len,
            vocab_size=parts.vocab_size,
            eos_token_ids=parts.eos_token_ids,
            decode_all=parts.tokenizer.decode_all,
            decode_marked=parts.tokenizer.decode_marked,
            finish=self._finish,
            accuracy=self.accuracy,
            masks=self._masks,
            prefix_salt=parts.prefix_salt,
            restart_length=parts.restart_length,
            has_states=parts.has_states,
            window=parts.window,
            num_past_tokens=parts.num_past_tokens,
            replanner=replanner,
        )
        # Guards everything below; notified when rows come, slots get free, or the engine ends.
        self._changed = Condition()
        self._inbox: deque[Request] = deque()
        self._unfinished: dict[int, Request] = {}
        self._dropped: set[Request] = set()  # the engine's thread lets go of them after its step
        self._drops_prefixes = False  # by the engine's thread, after its step
        self._num_rows = self._num_finished = self._num_errors = self._num_blocked = 0
        self._num_submitting = 0  # calls of `agenerate` whose rows are not all queued
        self._is_closing = False
        self._max_queued_rows = config.max_queued_rows
        pool_rows = min(parts.policy.max_num_seqs, config.max_queued_rows)
        self._start = BatchingWindow(pool_rows, config.linger_s, config.expected_calls)
        self._watchdog = Watchdog(config.watchdog_s or longest_step_s(parts.plan), self._give_up)
        self._thread = threading.Thread(target=self._run, name="raymoe-engine", daemon=True)
        self._thread.start()
        # An interpreter that ends kills daemon threads wherever they are, native code included.
        atexit.register(self.close)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> Self:
        """Load a model: a local directory, or a name that the hub cache or the hub has.

        Args:
            config: An `EngineConfig`, or its fields as a mapping.
            options: Fields of `EngineConfig`, in place of those of `config`.
            use_tqdm: Show on standard error what it does; by default only on a terminal.

        Raises:
            CheckpointError: Files are missing, damaged or unsafe.
            UnsupportedModelError: The model's mathematics is not implemented.
            ConfigError: An option is unknown, or does not suit the machine or the model.
            InfeasiblePlanError: The memory is too small; shows what needs what.
        """
        check_names(options, ENGINE_NAMES, "engine option")
        config = dataclasses.replace(as_engine_config(config), **options)
        with shown_load(Path(path).name, use_tqdm) as tell:
            parts = load_parts(path, config, tell=tell)
            with released_on_error(parts.close):
                return cls(parts, config)

    @property
    def policy(self) -> Policy:
        """Sizes in use; may change between steps where the plan chose them."""
        return self._core.scheduler.policy

    @property
    def last_timeline(self) -> Timeline | None:
        """When each task of the latest step ran."""
        return self._core.last_timeline

    @property
    def expected_calls(self) -> int | None:
        """How many callers there are; once all wait for answers, an idle engine starts at once."""
        return self._start.expected_calls

    @expected_calls.setter
    def expected_calls(self, value: int | None) -> None:
        with self._changed:
            self._start.expected_calls = value
            self._changed.notify_all()

    def enter_call(self) -> None:
        """Say that a caller waits for answers, so it brings no more rows until `leave_call`."""
        with self._changed:
            self._start.num_calls_in_flight += 1
            self._changed.notify_all()

    def leave_call(self) -> None:
        """Say that a caller has its answers and may come again."""
        with self._changed:
            self._start.num_calls_in_flight -= 1

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        output_schema: Any = None,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate for all prompts and return their generations in order.

        Args:
            prompts: Each a text, a list of token ids, or a list of chat messages.
            sampling_params: For all prompts, or a list with one for each.
            output_schema: A pydantic class, a JSON schema of an object, or the path of a file with
                one. Answers follow it, and `Generation.parsed` has their values. Reasoning before
                the answer to a chat is in `Generation.reasoning`, not in the text.
            use_tqdm: Show on standard error how many rows are done, the tokens per second and the
                time left, if it takes more than a second; by default only on a terminal.
            options: Fields of `SamplingParams` for all prompts, in place of those of
                `sampling_params`, such as ``max_tokens=5``.

        Raises:
            UnknownOptionError: `options` has a name that is no sampling parameter.
            ConfigError: `sampling_params` for all prompts or `output_schema` cannot be used, or
                both constrain the text. A bad prompt, or bad
                parameters in a list, raise nothing: that generation has the finish reason "error".
            ExecutionError: The engine failed or is closed.
            KeyboardInterrupt: As by Ctrl-C. The engine lets go of these rows and can go on with
                others.
        """
        params = _with_options(sampling_params, options)
        schema, params = _read_schema(output_schema, params)
        with self._call(prompts, use_tqdm) as call:
            generations = self._results(self._submit_all(prompts, params, call=call))
            return _parsed(self._answers(prompts, params, generations, schema), schema)

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        output_schema: Any = None,
        row_keys: Sequence[object] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """As `generate`, for coroutines: calls that wait at the same time share steps.

        Cancelling it drops its rows, also those that are being generated. `row_keys` are those of
        `submit`.
        """
        self._check_process()
        params = _with_options(sampling_params, options)
        schema, params = _read_schema(output_schema, params)
        call = Call()
        with self._changed:
            self._check_open()
            self._num_submitting += 1
            if self._submitter is None:
                self._submitter = ThreadPoolExecutor(MAX_SUBMITTING, "raymoe-submit")
            submit = functools.partial(self._submit_all, prompts, params, row_keys, call=call)
            submitting = self._submitter.submit(submit)
        try:
            try:
                futures = await asyncio.wrap_future(submitting)
            finally:
                self._submitted()
            generations = await asyncio.gather(*map(asyncio.wrap_future, futures))
            return _parsed(self._answers(prompts, params, generations, schema), schema)
        except BaseException:
            self._drop(call)
            raise

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params = None,
        *,
        output_schema: Any = None,
        max_rows: int | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Generation]]:
        """Generate for prompts of an iterable, and return each as soon as it is finished.

        Ending the loop, or closing the iterator, drops the rows that are being generated.

        Args:
            prompts: As for `generate`. They are read in a thread of their own, and may be slow or
                without an end.
            sampling_params: For all prompts.
            output_schema: As for `generate`.
            max_rows: Prompts that are read before their generations are taken; by default twice as
                many as are generated at once.
            options: As for `generate`.

        Returns:
            Pairs of the index of a prompt and its generation, in the order in which they finish.
            What is drawn at random depends on the index, not on how often a prompt came before.

        Raises:
            ConfigError: As `generate`. What the iterable raises comes after the rows before it.
        """
        return self._streamed(*self._begin_stream(
            prompts, _with_options(sampling_params, options), output_schema, max_rows
        ))  # fmt: skip

    def astream(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params = None,
        *,
        output_schema: Any = None,
        max_rows: int | None = None,
        **options: Any,
    ) -> AsyncIterator[tuple[int, Generation]]:
        """As `stream`, for ``async for``. Cancelling it drops its rows."""
        return self._astreamed(*self._begin_stream(
            prompts, _with_options(sampling_params, options), output_schema, max_rows
        ))  # fmt: skip

    def _begin_stream(
        self, prompts: Iterable[Prompt], params: Any, output_schema: Any, max_rows: int | None
    ) -> tuple[RowStream, Callable[[Prompt, Generation], Generation]]:
        self._check_open()
        _check_list(prompts)
        if _is_list(params):
            raise ConfigError("stream takes sampling_params for all prompts, not a list")
        if max_rows is None:
            max_rows = min(2 * self._parts.policy.max_num_seqs, self._max_queued_rows)
        if type(max_rows) is not int or max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows!r:.60}; it takes a whole number from 1")
        schema, params = _read_schema(output_schema, params)
        self.check_params(params)
        call = Call()

        def submit(prompt: Prompt, index: int) -> Future[Generation]:
            (future,) = self._submit_all([prompt], params, [index], call=call)
            return future

        def finish(prompt: Prompt, generation: Generation) -> Generation:
            (done,) = _parsed(self._answers([prompt], params, [generation], schema), schema)
            return done

        return RowStream(prompts, submit, functools.partial(self._drop, call), max_rows), finish

    @staticmethod
    def _streamed(
        rows: RowStream, finish: Callable[[Prompt, Generation], Generation]
    ) -> Iterator[tuple[int, Generation]]:
        with contextlib.closing(rows):
            while (found := rows.next()) is not None:
                index, prompt, generation = found
                yield index, finish(prompt, generation)

    @staticmethod
    async def _astreamed(
        rows: RowStream, finish: Callable[[Prompt, Generation], Generation]
    ) -> AsyncIterator[tuple[int, Generation]]:
        with contextlib.closing(rows):
            while (found := await asyncio.to_thread(rows.next)) is not None:
                index, prompt, generation = found
                yield index, finish(prompt, generation)

    def _answers(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params],
        generations: list[Generation], schema: OutputSchema | None,
    ) -> list[Generation]:  # fmt: skip
        """Where answers have a schema, take the reasoning of chats from their texts."""
        if schema is None or self.reasoning_parser is None:
            return generations
        parser = ChatParser(reasoning=self.reasoning_parser)
        each = _one_each("sampling_params", params, len(generations))
        return [
            generation.after(functools.partial(self._answer, parser, prompt, one))
            if generation.prompt_end and not generation.error
            else generation
            for generation, prompt, one in zip(generations, prompts, each, strict=True)
        ]

    def _answer(
        self, parser: ChatParser, prompt: Prompt, params: Params, generation: Generation
    ) -> Generation:
        checked = self._input_processor.check_params(params)
        return split_generation(parser, generation, prompt, checked, decode=self.decode)

    @property
    def reasoning_parser(self) -> str | None:
        """What schemas, grammars and stop strings wait for; by default the template's."""
        return self._input_processor.reasoning_parser

    @reasoning_parser.setter
    def reasoning_parser(self, name: str | None) -> None:
        self._input_processor.reasoning_parser = name

    def _submitted(self) -> None:
        with self._changed:
            self._num_submitting -= 1
            if not self._num_submitting:  # those that wait at the same time are all here
                self._start.start_now()
                self._changed.notify_all()

    def check_params(self, sampling_params: object) -> None:
        """Refuse parameters that no row can have with this model.

        Raises:
            ConfigError: Which one, and why; each row would have this as its error.
        """
        self._check_process()
        form = self._input_processor.check_params(sampling_params).structured_outputs_params
        if form is None or form == self._checked_form:
            return
        masks = TokenBitmasks(self._grammar_server, 1, self._parts.vocab_size)
        try:
            masks.begin(0, form, [])
            masks.synchronize(None)  # compiles it
            error = masks.error(0)
        finally:
            masks.close()
        if isinstance(error, ConfigError):
            raise error
        self._checked_form = form

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        row_keys: Sequence[object] | None = None,
        occurrences: Sequence[int | None] | None = None,
    ) -> list[Future[Generation]]:
        """Queue prompts; blocks while the queue is full. Thread-safe.

        Args:
            prompts: As for `generate`.
            sampling_params: As for `generate`.
            row_keys: What the random numbers of each row depend on, such as its id; without it,
                or where it is None, the row's tokens, its parameters and its occurrence.
            occurrences: How many rows equal to each there were before; None counts those of this
                call, so that equal prompts get different samples.

        Raises:
            ConfigError: As for `generate`.
            ExecutionError: The engine is closed. If it fails later, the futures raise it.
        """
        return self._submit_all(prompts, sampling_params, row_keys, occurrences, call=Call())

    def _submit_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params],
        row_keys: Sequence[object] | None = None,
        occurrences: Sequence[int | None] | None = None,
        *,
        call: Call,
    ) -> list[Future[Generation]]:
        self._check_open()
        _check_list(prompts)
        check_head(None, self._parts.head)
        if not _is_list(sampling_params):
            self.check_params(sampling_params)
        params = _one_each("sampling_params", sampling_params, len(prompts))
        keys = _one_each("row_keys", row_keys, len(prompts))
        numbers = _one_each("occurrences", occurrences, len(prompts))
        futures: dict[int, Future[Generation]] = {}
        for index, request in self._input_processor.build_all(prompts, params, keys, numbers):
            if isinstance(request, Exception):
                futures[index] = self._refuse(request)
            else:
                futures[index] = self._submit(request, call)
            call.watch(futures[index])
        return [futures[index] for index in range(len(prompts))]

    def submit_task(
        self,
        rows: Sequence[TaskRow],
        options: TaskOptions | Mapping[str, Any],
    ) -> list[Future[Generation]]:
        """Queue rows of a task besides generation; what was found is in `Generation.values`."""
        return self._submit_tasks(rows, options, call=Call())

    def _submit_tasks(
        self, rows: Sequence[TaskRow], options: TaskOptions | Mapping[str, Any], *, call: Call
    ) -> list[Future[Generation]]:
        self._check_open()
        if not isinstance(options, TaskOptions):
            options = TaskOptions.from_dict(options)
        check_head(options, self._parts.head)
        answers = RowAnswers(options, self._parts.labels, is_multi=self._parts.is_multi_label)
        futures: dict[int, Future[Generation]] = {}
        for index, encoded in self._input_processor.encode_rows(rows, options, self._parts.head):
            if isinstance(encoded, Exception):
                futures[index] = self._refuse(encoded)
            else:
                requests = [self._input_processor.build_read(*part) for part in encoded.parts]
                parts = [self._submit(request, call) for request in requests]
                futures[index] = answers.join(encoded, parts)
            call.watch(futures[index])
        return [futures[index] for index in range(len(rows))]

    def run_task(
        self,
        rows: Sequence[TaskRow],
        options: TaskOptions | Mapping[str, Any],
        *,
        use_tqdm: bool | None = None,
    ) -> list[Generation]:
        """As `submit_task`, and wait for the answers; `use_tqdm` as for `generate`."""
        with self._call(rows, use_tqdm, is_task=True) as call:
            return self._results(self._submit_tasks(rows, options, call=call))

    def score(
        self,
        prompts: Sequence[Prompt | None],
        continuations: Sequence[Any],
        *,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Log probabilities of continuations, or of documents where the prompt is None or empty.

        Args:
            prompts: As for `generate`, one for each continuation.
            continuations: Texts or token ids.
            use_tqdm: As for `generate`; so it is for `classify` and `embed`.
            options: Fields of `TaskOptions`.
        """
        _check_list(prompts)
        each = _one_each("continuations", continuations, len(prompts))
        rows = [TaskRow(prompt, (one,)) for prompt, one in zip(prompts, each, strict=True)]
        return self.run_task(rows, {"task": "score", **options}, use_tqdm=use_tqdm)

    def classify(
        self,
        prompts: Sequence[Prompt],
        labels: Sequence[str] | None = None,
        *,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Probabilities of labels, scored as continuations or by a classification head.

        Found values are in `Generation.values`, as for `score` and `embed`.
        """
        _check_list(prompts)
        chosen = None if labels is None else check_labels([*labels] if _is_list(labels) else labels)
        rows = [TaskRow(prompt, chosen) for prompt in prompts]
        task = {"task": "classify", "labels": chosen, **options}
        return self.run_task(rows, task, use_tqdm=use_tqdm)

    def embed(
        self, prompts: Sequence[Prompt], *, use_tqdm: bool | None = None, **options: Any
    ) -> list[Generation]:
        """Embeddings of prompts; needs `EngineConfig(head="none")`."""
        _check_list(prompts)
        rows = [TaskRow(one) for one in prompts]
        return self.run_task(rows, {"task": "embed", **options}, use_tqdm=use_tqdm)

    def __getattr__(self, name: str) -> NoReturn:
        """Say what vLLM's methods are called here."""
        here = METHODS_OF_OTHERS.get(name)
        hint = "" if here is None else f"; {here}"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        state = "closed" if self._is_closing else "running" if self._failure is None else "failed"
        policy, plan = self.policy, "" if self.plan is None else f", schedule {self.plan.schedule}"
        return (
            f"<Engine of {self.directory.name}: {state}{plan}, up to {policy.max_num_seqs} "
            f"sequences, KV cache of {policy.num_kv_blocks * KV_BLOCK_TOKENS:,} tokens>"
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of a row, prompt and generated together."""
        return self._parts.max_model_len

    @property
    def directory(self) -> Path:
        """Where the model's files are."""
        return self._parts.tokenizer.directory

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str | Exception]:
        """Decode token ids with their special tokens; a text, or why there is none."""
        self._check_open()
        return self._parts.tokenizer.decode_marked(sequences)

    def read_prompts(
        self, prompts: Sequence[object], sampling_params: Sequence[Params]
    ) -> list[tuple[str, list[int]]]:
        """Return the text of prompts, chats rendered ("" for token ids), and their tokens.

        Raises:
            ConfigError: One of them cannot be used.
        """
        self._check_open()
        return self._input_processor.read_prompts(prompts, sampling_params)

    def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        """Return the bytes of text that tokens stand for, where they are known."""
        self._check_open()
        return self._parts.tokenizer.token_bytes(token_ids)

    def stats(self) -> EngineStats:
        """A snapshot of the counts."""
        self._check_process()
        with self._changed:
            scheduler, counters = self._core.scheduler, self._core.counters
            active_s = counters.active_s
            total = RunReport() if self.accuracy is None else self.accuracy.total
            return EngineStats(
                num_finished_rows=self._num_finished,
                num_error_rows=self._num_errors,
                num_queued_rows=self._num_queued(),
                num_live_sequences=scheduler.table.num_live,
                num_slots=self.policy.max_num_seqs,
                num_free_blocks=scheduler.pool.num_free,
                num_kv_blocks=self.policy.num_kv_blocks,
                num_steps=counters.num_steps,
                num_computed_tokens=counters.num_computed_tokens,
                num_prompt_tokens=counters.num_prompt_tokens,
                num_cached_tokens=counters.num_cached_tokens,
                num_generated_tokens=counters.num_sampled_tokens,
                num_evicted_blocks=scheduler.pool.num_evicted,
                num_preemptions=scheduler.num_preemptions,
                busy_s=counters.step_s,
                predicted_s=total.predicted_s,
                link_s=total.busy_s.get(Resource.HTOD, 0.0),
                generated_tokens_per_s=counters.num_sampled_tokens / active_s if active_s else 0.0,
            )

    def reset_prefix_cache(self) -> None:
        """Forget the prompts of rows that are over, before any row that is submitted later."""
        self._check_open()
        with self._changed:
            self._drops_prefixes = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop after the current step, fail unfinished rows, and free all memory, weights too.

        `plan`, `policy`, `stats` and `last_report` stay readable; anything else raises
        ExecutionError. Does nothing in a process that was forked from the one that has the
        engine.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._is_closing:
                return
            self._is_closing, self._had_failed = True, self._failure is not None
            self._changed.notify_all()
        if self._submitter is not None:
            self._submitter.shutdown(wait=False, cancel_futures=True)
        atexit.unregister(self.close)
        if self._had_failed:
            self._parts.runner.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join(STUCK_JOIN_S if self._had_failed else None)
        self._watchdog.close()
        self._detokenizer.close()
        self._fail_all("the engine was closed before this row was finished", None)
        self._grammar_server.close()
        if self._thread.is_alive():
            logger.warning(
                "the engine is closed while a step is stuck: its memory is freed with the process"
            )
            self._parts.tokenizer.close()
        else:
            self._masks.close()
            self._release()
        if self._submitter is not None:
            self._submitter.shutdown()

    def _release(self) -> None:
        parts = self._parts
        try:
            parts.close()
        finally:
            self._parts = dataclasses.replace(parts, runner=ClosedRunner())
            del parts
            self._core.close()
            if self._failure is not None:
                clear_frames(self._failure.__cause__)
            return_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _results(self, futures: Sequence[Future[Generation]]) -> list[Generation]:
        with self._changed:
            self._start.start_now()
            self._changed.notify_all()
        return [future.result() for future in futures]

    @contextlib.contextmanager
    def _call(
        self, rows: Sequence[Any], use_tqdm: bool | None, *, is_task: bool = False
    ) -> Iterator[Call]:
        """Show how far the rows of a call are, and drop them if it ends before they do."""
        _check_list(rows)
        call, counters = Call(), self._core.counters
        read = "num_prompt_tokens" if is_task else "num_sampled_tokens"
        shown = shown_rows(
            len(rows),
            num_done=call.num_done,
            num_tokens=lambda: getattr(counters, read),
            unit="tokens/s read" if is_task else "tokens/s",
            use_tqdm=use_tqdm,
        )
        try:
            with shown:
                yield call
        except BaseException:
            self._drop(call)
            raise

    def _drop(self, call: Call) -> None:
        with self._changed:
            call.is_dropped = True
            dropped = {one for one in self._unfinished.values() if one.call is call}
            for request in dropped:
                del self._unfinished[request.order]
            self._inbox = deque(one for one in self._inbox if one not in dropped)
            self._dropped.update(dropped)
            self._changed.notify_all()

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closing:
            raise self._failed("", None) if self._had_failed else ExecutionError(_CLOSED)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ExecutionError(
                f"this engine is of process {self._pid}, and process {os.getpid()}, which was "
                "forked from it, has none of its threads: load an engine in each process, and "
                "start processes with the method 'spawn'"
            )

    def _refuse(self, error: Exception) -> Future[Generation]:
        """The future of a row that cannot be generated."""
        future: Future[Generation] = Future()
        with self._changed:
            if self._failure is not None or self._is_closing:  # not the row's fault
                future.set_exception(self._failed("the engine is closed", None))
                return future
            self._num_errors += 1
            self._num_finished += 1
        future.set_result(Generation.from_error(error))
        return future

    def _submit(self, request: Request, call: Call) -> Future[Generation]:
        request.future.set_running_or_notify_cancel()  # a row cannot be cancelled
        with self._changed:
            self._wait_for_place(call)
            if call.is_dropped:
                raise CancelledError
            if self._failure is not None or self._is_closing:
                request.future.set_exception(self._failed("the engine is closed", None))
                return request.future
            request.order, request.call = self._num_rows, call
            self._num_rows += 1
            self._unfinished[request.order] = request
            self._enqueue(request)
        return request.future

    def _enqueue(self, request: Request) -> None:
        self._inbox.append(request)
        self._start.row_came()
        self._changed.notify_all()

    def _num_queued(self) -> int:
        return len(self._inbox) + self._core.scheduler.num_waiting

    def _wait_for_place(self, call: Call) -> None:
        if threading.current_thread() is self._thread or self._detokenizer.is_current_thread:
            return  # a callback of a future submits more: others would wait for it
        self._num_blocked += 1
        self._changed.wait_for(
            lambda: (
                self._num_queued() < self._max_queued_rows
                or self._failure is not None
                or self._is_closing
                or call.is_dropped
            )
        )
        self._num_blocked -= 1

    def _run(self) -> None:
        try:
            set_num_threads(self._parts.num_threads, self._parts.num_torch_threads)
            while self._has_work():
                begin_s = time.perf_counter()
                self._watchdog.step_begins()
                self._core.step()
                self._watchdog.step_ends()
                self._core.counters.time_step(begin_s)
                self._log_memory()
        except BaseException as error:
            logger.exception("the engine failed")
            if self._parts.device_memory is not None:
                self._parts.device_memory.learn(error)
            self._fail_all(f"the engine failed: {type(error).__name__}: {error}", error)

    def _log_memory(self) -> None:
        """Say once what is free of a GPU's memory, when a step was about as large as any may be."""
        largest = self._core.counters.max_step_tokens
        is_full = largest >= FULL * self.policy.max_num_batched_tokens
        if is_full and not self._has_logged_memory and self._parts.device_memory is not None:
            self._has_logged_memory = True
            log_free_memory(f"after a step of {largest:,} tokens")

    def _has_work(self) -> bool:
        """Take new rows in; waits while there is nothing to do. False ends the thread."""
        with self._changed:
            self._report_run()
            while not self._is_closing and self._failure is None:
                if self._dropped:
                    self._core.drop(self._dropped)
                    self._dropped.clear()
                    self._changed.notify_all()  # there is room for others
                if self._drops_prefixes:
                    self._core.scheduler.drop_kept_prefixes()
                    self._drops_prefixes = False
                if self._core.has_work or self._start.wait_s(len(self._inbox)) == 0.0:
                    while self._inbox:
                        self._core.add(self._inbox.popleft())
                    self._start.started()
                    if self._num_blocked:
                        self._changed.notify_all()
                    return True
                self._changed.wait(self._start.wait_s(len(self._inbox)))
            return False

    def _report_run(self) -> None:
        """Once all rows are done, say how right the plan was."""
        if self.accuracy is None or self._core.has_work or not self.accuracy.report.num_steps:
            return
        self.last_report = self.accuracy.report
        logger.info("%s", self.last_report)
        self.accuracy.restart()

    def _finish(self, request: Request) -> None:
        """Hand over a row whose samples are over: it gets its answer whatever the engine does."""
        with self._changed:
            is_open = self._unfinished.pop(request.order, None) is not None
        if is_open:
            self._detokenizer.put(request)

    def _resolve(self, request: Request, generation: Generation) -> None:
        with self._changed:
            self._unfinished.pop(request.order, None)
            self._num_finished += 1
            self._num_errors += generation.finish_reason == "error"
        _resolve_future(functools.partial(request.future.set_result, generation))

    def _give_up(self, waited_s: float) -> None:
        number = self._core.counters.num_steps + 1
        logger.critical("step %d is stuck; all threads:\n%s", number, stacks_of_all_threads())
        self._fail_all(
            f"step {number} has not ended after {waited_s:.1f} s, so the engine counts as stuck; "
            "raise watchdog_s if steps may take that long",
            None,
        )

    def _fail_all(self, message: str, cause: BaseException | None) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = self._failed(message, cause)
            requests = list(self._unfinished.values())
            self._unfinished.clear()
            self._inbox.clear()
            self._changed.notify_all()
        for request in requests:
            error = self._failed(message, cause)
            _resolve_future(functools.partial(request.future.set_exception, error))

    def _failed(self, message: str, cause: BaseException | None) -> ExecutionError:
        """A fresh error for each future: a raised one collects the traceback of its raiser."""
        first = self._failure
        error = ExecutionError(message if first is None else str(first))
        error.__cause__ = cause if first is None else first.__cause__
        return error


def _resolve_future(resolve: Callable[[], None]) -> None:
    try:
        resolve()
    except InvalidStateError:  # the watchdog was faster
        pass
    except KeyboardInterrupt:
        raise
    except BaseException:
        logger.exception("a callback that was added to a row's future raised; other rows go on")


def _checked_parts(parts: object) -> EngineParts:
    if not isinstance(parts, EngineParts):
        raise ConfigError(
            f"Engine({str(parts)!r:.60}) loads no model: use Engine.from_pretrained(...) with the "
            "same path"
        )
    return parts


def _check_list(prompts: object) -> None:
    if isinstance(prompts, (str, bytes, Mapping)):
        raise ConfigError(f"prompts is a {type(prompts).__name__}; it takes a list of prompts")
    if isinstance(prompts, Sequence) and prompts and all(map(_is_message, prompts)):
        raise ConfigError(
            f"prompts is a list of {len(prompts)} messages, which are one chat; give a list of "
            "chats, as [messages]"
        )


def _is_message(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and "role" in prompt


def _with_options(
    params: Params | Sequence[Params], options: Mapping[str, Any]
) -> Params | Sequence[Params]:
    options = sampling_options(options)
    check_names(options, SAMPLING_NAMES, "sampling parameter")
    if not options:
        return params
    if _is_list(params):
        return [_with_option(one, options) for one in params]
    changed: Params = _with_option(params, options)
    return changed


def _with_option(params: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(params, SamplingParams):
        return params.override(options)
    if params is None or isinstance(params, Mapping):
        return {**(params or {}), **options}
    return params  # what reads them refuses them


def _read_schema(
    value: object, params: Params | Sequence[Params]
) -> tuple[OutputSchema | None, Params | Sequence[Params]]:
    if value is None:
        return None, params
    schema = OutputSchema.of(value)
    if _is_list(params):
        return schema, [schema.constrain(one) for one in params]
    return schema, schema.constrain(params)


def _parsed(generations: Sequence[Generation], schema: OutputSchema | None) -> list[Generation]:
    if schema is None:
        return [*generations]
    return [one.after(lambda row: row.parsed_as(schema)) for one in generations]


def _is_list(values: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(values, Iterable) and not isinstance(values, (Mapping, str, bytes))


def _one_each(name: str, values: object, count: int) -> list[Any]:
    if _is_list(values):
        each = list(values)
        if len(each) != count:
            raise ConfigError(f"{name} has {len(each)} entries for {count} prompts")
        return each
    return [values] * count
