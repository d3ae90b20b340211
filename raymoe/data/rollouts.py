"""Rollouts: a coroutine for each row, whose calls of the model share the engine's steps."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import logging
import reprlib
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from raymoe.config import SAMPLING_NAMES, check_names
from raymoe.data.batches import plain_cell, with_columns
from raymoe.data.columns import ERROR_COLUMN, OutputColumns
from raymoe.data.job_rows import content_key, occurrence_key
from raymoe.data.rows import RowRequest
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import Chat
from raymoe.errors import (
    CapacityError,
    ConfigError,
    ExecutionError,
    RaymoeError,
    UnknownOptionError,
    WorkerProcessError,
    describe,
)
from raymoe.periodic import Periodic
from raymoe.vllm_names import sampling_options

if TYPE_CHECKING:
    from raymoe.engine.engine import Engine

Generate = Callable[..., Awaitable[Generation]]
Function = Callable[[dict[str, Any], Generate], Coroutine[Any, Any, Mapping[str, Any]]]
Split = Callable[[RowRequest, Generation], Generation]

CALLS_PER_ROW = "calls_per_row"  # for the plan of a job
MAX_TOOL_THREADS = 64  # of `asyncio.to_thread`; the default is the cores and four
BLOCKED_AFTER_S = 10.0
LATE_S = 0.5  # for a timer; then the loop was blocked, and no row's clock counts it
CLOSE_TIMEOUT_S = 2.0  # for a function that does not give up the loop

# Options of a generator that have no meaning with a rollout, and their defaults.
_WITHOUT_MEANING: dict[str, Any] = {
    "prompt_column": "prompt", "messages_column": "messages", "tools_column": None,
    "prompt_template": None, "system_prompt": None, "output_schema": None, "has_choices": False,
    "has_request": False, "has_token_bytes": False, "task": "generate", "task_options": None,
}  # fmt: skip
_NUM_CALLS, _RETURNED = "num_calls", "columns"  # in `Generation.values` of a row
_FIELDS = (
    pa.field(_NUM_CALLS, pa.int32()),
    pa.field("num_input_tokens", pa.int32()),
    pa.field("num_cached_tokens", pa.int32()),
    pa.field("num_generated_tokens", pa.int32()),
    pa.field(ERROR_COLUMN, pa.string()),
)
_CLOSED = "the generator was closed before this row was finished"
_ERRORS = {one.__name__: one for one in (ConfigError, CapacityError, WorkerProcessError)}

logger = logging.getLogger(__name__)


class RolloutLimitError(RaymoeError):
    """A row has reached one of the `rollout_limits`; a resumed job tries it again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What a row may take; None is without a limit.

    Attributes:
        calls: Of the model.
        tokens: Generated in all calls; looked at before each call.
        seconds: In which the function waits for something besides the model, or runs itself.
    """

    calls: int | None = 1000
    tokens: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, value: object) -> "RolloutLimits":
        """Read limits as a user gives them.

        Raises:
            ConfigError: They are no mapping, or one is unknown or not positive.
        """
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError(f"rollout_limits is {value!r:.60}; it takes a mapping, such as "
                              "{'calls': 8, 'tokens': 4000, 'seconds': 60}")  # fmt: skip
        known = [field.name for field in dataclasses.fields(cls)]
        for name, limit in value.items():
            if name not in known:
                raise UnknownOptionError(str(name), known, "key of rollout_limits")
            kinds = (int, float) if name == "seconds" else (int,)
            if limit is not None and (type(limit) not in kinds or not limit > 0):
                what = "a number above 0" if name == "seconds" else "a whole number from 1"
                raise ConfigError(f"rollout_limits has {name} {limit!r:.60}; it takes {what}")
        return cls(**value)


def check_rollout(options: Mapping[str, Any]) -> None:
    """Check the rollout among the options of a generator, if there is one.

    Raises:
        ConfigError: It is no coroutine function, or another option contradicts it.
    """
    rollout = options.get("rollout")
    calls = options.get(CALLS_PER_ROW)
    if calls is not None and (type(calls) is not int or calls < 1):
        raise ConfigError(f"{CALLS_PER_ROW} is {calls!r}; it must be a whole number from 1")
    if rollout is None:
        for name in ("rollout_limits", CALLS_PER_ROW):
            if options.get(name) is not None:
                raise ConfigError(f"{name} belongs to a rollout; give rollout too, or leave it out")
        return
    of_object = getattr(type(rollout), "__call__", None)  # noqa: B004 - whether it is a coroutine
    if not any(map(inspect.iscoroutinefunction, (rollout, of_object))):
        raise ConfigError(
            f"rollout is {name_of(rollout)}, which is no coroutine function; give "
            "`async def turns(row, generate)`, which awaits its calls of generate and returns a "
            "dict of columns"
        )
    for name, default in _WITHOUT_MEANING.items():
        if options.get(name, default) != default:
            raise ConfigError(
                f"{name} has no meaning with a rollout, whose function gets the whole row and says "
                "itself what the model is asked; leave it out"
            )
    RolloutLimits.of(options.get("rollout_limits"))


def name_of(function: object) -> str:
    """Return the name of a function for messages and manifests; it is the same in each run."""
    named = getattr(function, "func", function)  # of a partial
    return str(getattr(named, "__qualname__", type(named).__qualname__))


class RolloutRow:
    """The function of one row while it runs. Belongs to the thread of the loop."""

    def __init__(self, owner: "Rollouts", request: RowRequest, done: Future[Generation]) -> None:
        self._owner, self._request, self._done = owner, request, done
        key = request.row_key
        if key is None:
            own = occurrence_key(content_key(request), request.occurrence)
            key = int.from_bytes(own[:8], "big") >> 1
        self._key = key
        self._seen: Counter[bytes] = Counter()  # calls by what they ask
        self._num_calls = self._num_input = self._num_cached = self._num_generated = 0
        self._waiting: Counter[asyncio.Task[Any]] = Counter()  # by the tasks that call
        self._problem: Exception | None = None
        self._left_s, self._begin_s = owner.limits.seconds, 0.0
        self._timer: asyncio.TimerHandle | None = None
        assert request.cells is not None
        self._names = request.cells.keys()
        self._task = owner.loop.create_task(owner.function({**request.cells}, self.generate))
        self._task.add_done_callback(self._finish)
        self._start_clock()

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> Generation:
        """Generate for a prompt, in the batch of all rows.

        What is drawn at random depends on the row, the prompt, the parameters, and on how many
        equal calls the row made before.

        Args:
            prompt: A text, token ids, or messages.
            tools: That the messages may call; `Generation.tool_calls` has the calls.
            chat_template_kwargs: For the template, in addition to those of the job.
            params: Fields of `SamplingParams`, in place of those of the row.

        Raises:
            ConfigError: The call cannot be generated; says why.
        """
        self._check_limits()
        request = self._read(prompt, tools, chat_template_kwargs, params)
        assert request.prompt is not None
        content = content_key(request)
        key = occurrence_key(content, self._seen[content])
        self._seen[content] += 1
        self._num_calls += 1
        caller = asyncio.current_task()
        assert caller is not None
        self._stop_clock()
        self._waiting[caller] += 1
        try:
            (generation,) = await self._owner.engine.agenerate(
                [request.prompt], [request.sampling_params], row_keys=[key]
            )
            if not generation.error:
                generation = generation.after(functools.partial(self._owner.split, request))
        except ExecutionError as error:  # whatever the function makes of it, the engine failed
            self._end(error)
        finally:
            self._waiting -= Counter([caller])
            if not self._waiting:
                self._start_clock()
        self._num_input += generation.num_input_tokens
        self._num_cached += generation.num_cached_tokens
        self._num_generated += generation.num_tokens_of_outputs
        if generation.error:
            kind, _, reason = generation.error.partition(": ")
            raise _ERRORS.get(kind, ConfigError if "Option" in kind else RaymoeError)(reason)
        return generation

    def cancel(self, problem: Exception) -> None:
        """End the function, wherever it waits; the row then has this problem."""
        self._problem = self._problem or problem
        self._task.cancel()

    def _end(self, problem: Exception) -> NoReturn:
        """End the function from inside a call of `generate`."""
        self.cancel(problem)
        raise asyncio.CancelledError

    def _check_limits(self) -> None:
        if self._problem is not None or self._task.done():
            raise asyncio.CancelledError  # a function that goes on, or a task that it left behind
        limits = self._owner.limits
        for count, limit, what in (
            (self._num_calls, limits.calls, "made {} calls"),
            (self._num_generated, limits.tokens, "generated {} tokens"),
        ):
            if limit is not None and count >= limit:
                self._end(RolloutLimitError(
                    f"the row has {what.format(count)} of at most {limit} and asks for more; see "
                    "rollout_limits"
                ))  # fmt: skip

    def _read(
        self, prompt: Any, tools: Any, template_kwargs: Any, params: Mapping[str, Any]
    ) -> RowRequest:
        params = sampling_options(params)
        check_names(params, SAMPLING_NAMES, "sampling parameter")
        if not isinstance(prompt, Sequence):
            raise TypeError(f"generate takes a text, token ids or a list of messages, not "
                            f"{type(prompt).__name__}")  # fmt: skip
        prompt = copy.deepcopy(prompt)  # the function may change its list while this waits
        kwargs = {**self._owner.template_kwargs, **(template_kwargs or {})}
        if isinstance(prompt[0] if prompt else None, Mapping):
            if tools or kwargs:
                prompt = Chat(prompt, copy.deepcopy([*tools]), kwargs)
        elif tools or template_kwargs:
            raise ConfigError("tools and chat_template_kwargs belong to messages, not to a text")
        return RowRequest(
            prompt=prompt,
            sampling_params=self._request.sampling_params.override(params),
            column="",
            row_key=self._key,
        )

    def _start_clock(self) -> None:
        if self._left_s is not None and not self._task.done():
            self._begin_s = time.monotonic()
            self._timer = self._owner.loop.call_later(self._left_s, self._run_out)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            assert self._left_s is not None
            self._timer.cancel()
            self._left_s = max(0.0, self._left_s - (time.monotonic() - self._begin_s))
            self._timer = None

    def _run_out(self) -> None:
        limit, left_s = self._owner.limits.seconds, self._left_s
        assert left_s is not None
        late_s = time.monotonic() - self._begin_s - left_s
        if late_s > LATE_S:  # another row's function blocked the loop
            self._begin_s += late_s
            self._timer = self._owner.loop.call_later(left_s, self._run_out)
            return
        self.cancel(RolloutLimitError(
            f"the function ran or waited for {limit:g} s besides its {self._num_calls} calls of "
            "the model; see rollout_limits"
        ))  # fmt: skip

    def _finish(self, task: "asyncio.Task[Mapping[str, Any]]") -> None:
        self._stop_clock()
        for caller in self._waiting:  # tasks that the function left behind
            caller.cancel()
        if isinstance(self._problem, ExecutionError):
            self._done.set_exception(self._problem)
        else:
            self._done.set_result(self._result(task))
        self._owner.leave(self)

    def _result(self, task: "asyncio.Task[Mapping[str, Any]]") -> Generation:
        problem = self._problem or (None if task.cancelled() else task.exception())
        if problem is not None or task.cancelled():
            return self._answer(error=self._describe(problem))
        try:
            return self._answer(columns=self._read_columns(task.result()))
        except Exception as error:
            return self._answer(error=describe(error))

    def _answer(self, *, columns: dict[str, Any] | None = None, error: str = "") -> Generation:
        return Generation(
            finish_reason="error" if error else "stop",
            error=error,
            num_input_tokens=self._num_input,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=self._num_generated,
            values={_NUM_CALLS: self._num_calls, _RETURNED: columns or {}},
        )

    def _describe(self, problem: BaseException | None) -> str:
        problem = problem or asyncio.CancelledError("the function cancelled itself")
        while isinstance(problem, BaseExceptionGroup):  # of a TaskGroup
            problem = problem.exceptions[0]
        frames = traceback.extract_tb(problem.__traceback__)
        where = [frame for frame in frames if frame.filename != __file__]
        own = [frame for frame in where if frame.filename == where[0].filename]
        place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        calls = f"after {self._num_calls} calls of generate"
        problem.add_note(f"while running {name_of(self._owner.function)}{place}, {calls}")
        return describe(problem)

    def _read_columns(self, returned: object) -> dict[str, Any]:
        """Return the columns as a journal keeps them, so that a resumed job finds the same."""
        name = name_of(self._owner.function)
        if not isinstance(returned, Mapping) or not all(isinstance(one, str) for one in returned):
            raise TypeError(f"{name} returned {reprlib.repr(returned)}; it takes a dict of columns "
                            "by name")  # fmt: skip
        taken = sorted(returned.keys() & (self._names | self._owner.reserved))
        if taken:
            raise ValueError(f"{name} returned {', '.join(map(repr, taken))}, which the row or its "
                             "output has already; choose other names")  # fmt: skip
        plain = {}
        for column, value in returned.items():
            try:
                plain[column] = json.loads(json.dumps(plain_cell(value)))
            except (TypeError, ValueError, RecursionError) as error:
                raise TypeError(
                    f"{name} returned a column {column!r} that cannot be kept: {error}; it takes "
                    "text, numbers, booleans, None, and lists and dicts of them"
                ) from None
        return plain


class Rollouts:
    """Runs the functions of rows on one event loop, in a thread of its own.

    Args:
        split: Takes reasoning and tool calls from the text of an answer.
        reserved: Columns that a function may not return.
        template_kwargs: Of all calls with messages.
    """

    def __init__(
        self,
        function: Function,
        engine: "Engine",
        *,
        limits: RolloutLimits,
        split: Split,
        reserved: frozenset[str],
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.function, self.engine, self.limits, self.split = function, engine, limits, split
        self.reserved, self.template_kwargs = reserved, template_kwargs
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(MAX_TOOL_THREADS, "raymoe-tool"))
        self._rows: set[RolloutRow] = set()  # of the loop's thread
        self._is_closing = self._has_warned = False
        self._num_beats, self._num_checks, self._asked_s = 0, 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="raymoe-rollouts", daemon=True)
        self._thread.start()
        self._watch = Periodic(self._check, BLOCKED_AFTER_S, name="raymoe-rollouts-watch")

    def submit(self, requests: Sequence[RowRequest]) -> list[Future[Generation]]:
        """Start the functions of rows; their futures have the columns."""
        futures: list[Future[Generation]] = [Future() for _ in requests]
        for future in futures:
            future.set_running_or_notify_cancel()  # a row cannot be cancelled
        try:
            self.loop.call_soon_threadsafe(self._start, requests, futures)
        except RuntimeError as error:  # the loop is closed
            raise ExecutionError(_CLOSED) from error
        return futures

    def leave(self, row: RolloutRow) -> None:
        """Forget a row that is over."""
        self._rows.discard(row)
        if self._is_closing and not self._rows:
            self.loop.stop()

    def close(self) -> None:
        """End the functions that run; their rows fail as those of a closed engine do."""
        self._watch.close()
        self.loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("a rollout does not end: %s", self._where())
        else:
            self.loop.close()

    def _start(self, requests: Sequence[RowRequest], futures: Sequence[Future[Generation]]) -> None:
        for request, future in zip(requests, futures, strict=True):
            if self._is_closing:
                future.set_exception(ExecutionError(_CLOSED))
            else:
                self._rows.add(RolloutRow(self, request, future))

    def _end(self) -> None:
        self._is_closing = True
        for row in self._rows:
            row.cancel(ExecutionError(_CLOSED))
        if not self._rows:
            self.loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_closing:
            try:
                self.loop.run_forever()
            except BaseException:  # SystemExit in a task of a row, whose error it is; others go on
                logger.exception("a rollout ended its event loop; other rows go on")

    def _check(self) -> None:
        """Say once that a function holds the loop, so that no other row goes on."""
        waited_s = time.monotonic() - self._asked_s
        is_held = self._num_beats < self._num_checks and waited_s > BLOCKED_AFTER_S / 2
        if is_held and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a rollout has held the event loop of all rows for more than %.3g s: await "
                "asyncio.to_thread(function, ...) instead of calling what waits or computes; it is "
                "at %s", BLOCKED_AFTER_S, self._where(),
            )  # fmt: skip
        self._num_checks, self._asked_s = self._num_checks + 1, time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._beat, self._num_checks)

    def _beat(self, number: int) -> None:
        self._num_beats = number

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - documented
        return "".join(traceback.format_stack(frame)[-2:]) if frame else "its end"


class RolloutColumns:
    """The columns of rollouts: those of every one, and what the functions returned. Thread-safe.

    Types are those of the values so far, so that all tables of an operator have one for a column.
    """

    def __init__(self, prefix: str) -> None:
        self._own = OutputColumns(fields=_FIELDS, prefix=prefix)
        self._lock = threading.Lock()
        self._schema = pa.schema([])  # guarded by the lock

    @property
    def names(self) -> frozenset[str]:
        return self._own.names

    def check_names(self, names: Collection[str]) -> None:
        """As `OutputColumns.check_names`."""
        self._own.check_names(names)

    def append(
        self, batch: Any, generations: Sequence[Generation]
    ) -> tuple[Any, Sequence[Generation]]:
        """As `OutputColumns.append`; a row whose values fit no type with those of others fails."""
        with self._lock:
            schema = self._schema = _joined(self._schema, generations)
        fitting = [_fitting(schema, generation) for generation in generations]
        batch, generations = self._own.append(batch, fitting)
        return with_columns(batch, _arrays(schema, generations)), generations


def _joined(schema: pa.Schema, generations: Sequence[Generation]) -> pa.Schema:
    """Return types that hold values of the schema and of these rows, but for misfits."""
    try:
        return _merged(schema, generations)
    except Exception:
        if len(generations) > 1:
            for generation in generations:
                schema = _joined(schema, [generation])
        return schema


def _merged(schema: pa.Schema, generations: Sequence[Generation]) -> pa.Schema:
    rows = [_returned(generation) for generation in generations]
    names = dict.fromkeys(name for row in rows for name in row)
    found = pa.schema([(name, pa.array([row.get(name) for row in rows]).type) for name in names])
    return pa.unify_schemas([schema, found], promote_options="permissive")


def _fitting(schema: pa.Schema, generation: Generation) -> Generation:
    """Return the row, or its error row if no column holds its values with those of others."""
    try:
        _merged(schema, [generation])
        _arrays(schema, [generation])
    except Exception as error:
        problem = TypeError("what the rollout returned does not fit columns that hold the rows "
                            f"before: {error}")  # fmt: skip
        return dataclasses.replace(
            generation, error=describe(problem), finish_reason="error",
            values={**(generation.values or {}), _RETURNED: {}},
        )  # fmt: skip
    return generation


def _arrays(schema: pa.Schema, generations: Sequence[Generation]) -> dict[str, pa.Array]:
    rows = [_returned(generation) for generation in generations]
    return {
        field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in schema
    }


def _returned(generation: Generation) -> Mapping[str, Any]:
    """Return the columns of a row; none of one that was refused before."""
    columns: Mapping[str, Any] = (generation.values or {}).get(_RETURNED, {})
    return columns
