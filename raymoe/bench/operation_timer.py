"""Time the operations of an engine's steps on the CPU, by wrapping the functions that do them.

They are wrapped within `timed_operations` only: other engines and other runs pay nothing.
"""

import dataclasses
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from raymoe.bench.steps import StepRecorder
from raymoe.engine.core import EngineCore, Runner
from raymoe.engine.engine import Engine
from raymoe.engine.scheduler import Scheduler
from raymoe.kernels.cpu_experts import (
    PackedExperts,
    PackedGatedFfn,
    PlainExperts,
    PlainGatedFfn,
    RowMajorExperts,
)
from raymoe.kernels.cpu_linear import PackedGroups, PackedLinear, PlainLinear
from raymoe.kernels.elementwise import Routing
from raymoe.measure.timing import Clock
from raymoe.model.decoder import Decoder
from raymoe.model.feed_forward import LinearFfn, MoE
from raymoe.plan.step_work import OperationKind
from raymoe.plan.work import MicroBatchShape
from raymoe.runtime.batch import InputBatch
from raymoe.specs.attention.recurrent import RecurrentSpec

Kind = OperationKind | None  # None: not accounted for


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step with the time since the one before.

    Attributes:
        seconds: By the clock, from the end of the step before to its own.
        by_kind: What of it each kind of operation took, without those that it called.
        calls: How often each began.
        expert_ids: Experts of each token, [T, K], of each layer with a router.
    """

    shape: MicroBatchShape
    seconds: float
    by_kind: Mapping[Kind, float]
    calls: Mapping[Kind, int]
    expert_ids: tuple[Tensor, ...]


class OperationTimer:
    """Adds up the seconds of each kind of operation on the engine's thread.

    Time belongs to the operation that began last and has not ended.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.steps: list[StepTimes] = []
        self._is_waiting = threading.Event()  # for rows
        self._thread = 0
        self._open: list[OperationKind] = []
        self._is_whole = False  # whether the last of `_open` counts with those that it calls
        self._shape: MicroBatchShape | None = None  # of the step whose tasks are over
        self._since_s = self._step_begin_s = 0.0
        self._forget()

    def begin(self) -> None:
        """Begin a job, once the engine waits for its rows; what came before is forgotten."""
        self._is_waiting.wait()
        self._since_s = self._step_begin_s = self._clock()
        self.steps = []
        self._forget()

    def end(self) -> None:
        """End the job, once the engine waits again; its last step gets the time after it."""
        self._is_waiting.wait()
        self._count()
        last = self.steps[-1]
        self.steps[-1] = dataclasses.replace(
            last,
            seconds=last.seconds + self._since_s - self._step_begin_s,
            by_kind=_added(last.by_kind, self._seconds),
            calls=_added(last.calls, self._calls),
        )

    def begin_waiting(self) -> None:
        self._thread = threading.get_ident()
        self.enter(OperationKind.WAITING)
        self._is_waiting.set()

    def end_waiting(self) -> None:
        self._is_waiting.clear()
        self.leave()

    def took(self, shape: MicroBatchShape) -> None:
        """Say what the step that ends next has computed."""
        self._shape = shape

    def end_step(self) -> None:
        """End a step; without tasks there was none, and the next one gets the time."""
        if self._shape is None:
            return
        self._count()
        self.steps.append(
            StepTimes(
                shape=self._shape,
                seconds=self._since_s - self._step_begin_s,
                by_kind=self._seconds,
                calls=self._calls,
                expert_ids=tuple(self._expert_ids),
            )
        )
        self._step_begin_s, self._shape = self._since_s, None
        self._forget()

    def counts_here(self) -> bool:
        """Whether this is the engine's thread, and not within an operation that is whole."""
        return threading.get_ident() == self._thread and not self._is_whole

    def enter(self, kind: OperationKind, *, is_whole: bool = False) -> None:
        self._count()
        self._calls[kind] += 1
        self._open.append(kind)
        self._is_whole = is_whole

    def leave(self) -> None:
        self._count()
        self._open.pop()
        self._is_whole = False

    def keep_experts(self, ids_TK: Tensor) -> None:
        self._expert_ids.append(ids_TK)

    def _count(self) -> None:
        now_s = self._clock()
        self._seconds[self._open[-1] if self._open else None] += now_s - self._since_s
        self._since_s = now_s

    def _forget(self) -> None:
        self._seconds: defaultdict[Kind, float] = defaultdict(float)
        self._calls: defaultdict[Kind, int] = defaultdict(int)
        self._expert_ids: list[Tensor] = []


Number = TypeVar("Number", int, float)


def _added(one: Mapping[Kind, Number], other: Mapping[Kind, Number]) -> dict[Kind, Number]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in (*one, *other)}


class TimedRunner(StepRecorder):
    """A runner whose logits, and what is done with them, are operations."""

    def __init__(self, runner: Runner, timer: OperationTimer) -> None:
        super().__init__(runner)
        self._timer = timer

    @contextmanager
    def run(self, batch: InputBatch) -> Iterator[Tensor]:
        with super().run(batch) as hidden_RH:
            self._timer.enter(OperationKind.SAMPLING)
            try:
                yield hidden_RH
            finally:
                self._timer.leave()
        shape, _ = self.steps.pop()
        self._timer.took(shape)

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        self._timer.enter(OperationKind.HEAD, is_whole=True)
        try:
            return super().compute_logits(hidden_RH)
        finally:
            self._timer.leave()


class _Timed(NamedTuple):
    """A method that is an operation; a whole one counts with the operations that it calls."""

    owner: type
    name: str
    kind: OperationKind
    is_whole: bool = True


_TIMED = (
    *(_Timed(Scheduler, name, OperationKind.SCHEDULER) for name in ("next_step", "complete")),
    *(
        _Timed(Decoder, name, OperationKind.EMBEDDING)
        for name in ("embed", "experts_of_tokens", "ngrams_of_tokens")
    ),
    *(
        _Timed(Decoder, name, OperationKind.ELEMENTWISE, is_whole=False)
        for name in ("pre", "post", "ffn", "final")
    ),
    *(
        _Timed(owner, "__call__", OperationKind.PROJECTIONS)
        for owner in (PackedLinear, PackedGroups, PlainLinear)
    ),
    *(
        _Timed(owner, "__call__", OperationKind.EXPERTS)
        for owner in (PackedExperts, PlainExperts, RowMajorExperts)
    ),
    *(
        _Timed(owner, "__call__", OperationKind.NETWORKS)
        for owner in (PackedGatedFfn, PlainGatedFfn, LinearFfn)
    ),
)


@contextmanager
def timed_operations(timer: OperationTimer) -> Iterator[None]:
    """Time the operations of the one engine that is made and closed within the context."""
    wrapped = {(each.owner, each.name): _timed(timer, each) for each in _TIMED}
    wrapped[Decoder, "attend"] = _timed_attention(timer, Decoder.attend)
    wrapped[MoE, "route"] = _timed_router(timer, MoE.route)
    wrapped[EngineCore, "step"] = _timed_step(timer, EngineCore.step)
    wrapped[Engine, "_has_work"] = _timed_waiting(timer, Engine._has_work)  # noqa: SLF001
    before = {(owner, name): owner.__dict__[name] for owner, name in wrapped}
    try:
        for (owner, name), function in wrapped.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


Function = Callable[..., Any]


def _timed(timer: OperationTimer, timed: _Timed) -> Function:
    function = timed.owner.__dict__[timed.name]

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not timer.counts_here():
            return function(*args, **options)
        timer.enter(timed.kind, is_whole=timed.is_whole)
        try:
            return function(*args, **options)
        finally:
            timer.leave()

    return call


def _timed_attention(timer: OperationTimer, attend: Function) -> Function:
    @functools.wraps(attend)
    def call(decoder: Decoder, i: int, *args: Any) -> Tensor:
        is_recurrent = isinstance(decoder.spec.layers[i].attention, RecurrentSpec)
        kind = OperationKind.STATES if is_recurrent else OperationKind.ATTENTION
        timer.enter(kind, is_whole=True)
        try:
            result_TX: Tensor = attend(decoder, i, *args)
            return result_TX
        finally:
            timer.leave()

    return call


def _timed_router(timer: OperationTimer, route: Function) -> Function:
    timed = _timed(timer, _Timed(MoE, "route", OperationKind.ROUTER))

    @functools.wraps(route)
    def call(*args: Any, **options: Any) -> Routing:
        routing: Routing = timed(*args, **options)
        timer.keep_experts(routing.topk_ids_TK)
        return routing

    return call


def _timed_step(timer: OperationTimer, step: Function) -> Function:
    @functools.wraps(step)
    def call(core: EngineCore) -> None:
        timer.enter(OperationKind.REST_OF_STEP)
        try:
            step(core)
        finally:
            timer.leave()
        timer.end_step()

    return call


def _timed_waiting(timer: OperationTimer, has_work: Function) -> Function:
    @functools.wraps(has_work)
    def call(engine: Engine) -> bool:
        timer.begin_waiting()
        try:
            is_there: bool = has_work(engine)
            return is_there
        finally:
            timer.end_waiting()

    return call
