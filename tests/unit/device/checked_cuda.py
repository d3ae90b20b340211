"""A CUDA device without a GPU that says what nothing orders; see `happens_before`.

Work is done at once, in the order of issue. What has an order is asked of the calls of CUDA, of
marks, queues, futures and threads; what is read and written, of torch's operations, native kernels
and copies. Memory that the device gave, and results of operations on it, are the device's: its
operations run in the current stream of the thread, or in the default stream. What numpy does is not
seen.
"""

import ast
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from raymoe import _native
from raymoe.device import lane as lanes
from raymoe.device.cuda import CudaDevice, CudaLane
from raymoe.device.lane import Call, Mark, TaskMark, ThreadLane
from raymoe.device.mover import MoverLane
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.schedule.graph import Task
from tests.unit.device.deferred_cuda import ALLOCATIONS, HOST_WAITS, DeferredCuda
from tests.unit.device.fake_cuda import FakeEvent, FakeStream
from tests.unit.device.happens_before import Agent, Stamp, Trace

# Operations of torch by indices, of which the first are those of rows.
INDEXED = ("index", "index_put_", "_index_put_impl_")
# What native kernels write, by the names of `_native.pyi`; they read all other tensors.
WRITTEN = {
    "add_gated": ("out",),
    "add_row_experts": ("sums",),
    "add_to_streams": ("hidden",),
    "append": (),
    "append_and_attend": ("out",),
    "append_and_attend_compressed": ("out",),
    "append_and_attend_latent": ("out",),
    "append_latent": (),
    "argmax": ("ids",),
    "causal_conv": ("states", "out"),
    "choose_blocks": ("out",),
    "choose_positions": ("out",),
    "fused_experts": ("out",),
    "gate_and_norm": ("out",),
    "gate_values": ("out",),
    "gated_ffn": ("out",),
    "gumbel_argmax": ("ids",),
    "log_sum_exp": ("out",),
    "mixing_matrices": ("out",),
    "norm_and_gate": ("out",),
    "pack_codes": ("packed",),
    "pack_gate_up": ("packed",),
    "pack_gate_up_codes": ("packed",),
    "pack_linear": ("packed",),
    "packed_grouped_linear": ("out",),
    "packed_linear": ("out",),
    "pool_entries": (),
    "qkv_rope": ("query", "key", "value"),
    "quantise_rows": ("codes", "scales"),
    "read_gated_streams": ("out",),
    "read_streams": ("out",),
    "rms_norm": ("hidden", "out"),
    "rotate_ends": ("out",),
    "route": ("ids", "weights"),
    "scan": ("states", "out"),
    "stream_logits": ("logits",),
    "top_k": ("ids", "values"),
}


@dataclass
class _Job:
    """What a mover was given; the native thread does one after another."""

    mark: TaskMark
    after: Sequence[Mark]
    given: Stamp
    task: Task | None


def _thread_agent(name: str) -> Agent:
    """Threads that are no lane's do the work of the engine."""
    return Agent(name, role=name if name.startswith("raymoe-lane") else "engine")


class CheckedCuda(DeferredCuda):
    """See the module."""

    # Not that of host memory, so that moving a tensor to it makes a copy, as on a GPU.
    device = torch.device("cpu", 0)

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace(self.me)
        self._lock = self.trace.lock  # one, so that no two threads take two in different orders
        self._default = Agent("default stream")
        self._threads: dict[int, Agent] = {}
        self._agents: weakref.WeakKeyDictionary[FakeStream, Agent] = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakKeyDictionary[FakeEvent, Stamp] = weakref.WeakKeyDictionary()
        self._finished: weakref.WeakKeyDictionary[TaskMark, Stamp] = weakref.WeakKeyDictionary()
        self._jobs: dict[FakeStream, deque[_Job]] = {}
        self._movers: dict[FakeStream, Agent] = {}  # their threads

    def me(self) -> Agent:
        """The calling thread. Native threads have no state of Python's between their calls."""
        ident = threading.get_ident()
        if ident not in self._threads:
            self._threads[ident] = _thread_agent(threading.current_thread().name)
        return self._threads[ident]

    @property
    def stream(self) -> Agent:
        """The current stream of the calling thread."""
        stream = getattr(self._current, "stream", None)
        return self._default if stream is None else self._agents[stream]

    # Streams and events.

    def thread_context(self) -> AbstractContextManager[object]:
        return torch.inference_mode()  # threads are watched from their start

    def new_stream(self) -> FakeStream:
        stream = super().new_stream()
        self._agents[stream] = Agent(f"stream {len(self.streams)}")
        return stream

    def open_runtime(self) -> "_Runtime":  # type: ignore[override]
        return _Runtime(super().open_runtime(), self)

    def _drift(self) -> None:
        for stream in self.streams:
            self._advance(stream, len(stream.steps))

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        with self.trace.lock:
            agent = self._issue(stream)
            super().record(event, stream)
            self._recorded[event] = self.trace.stamp(agent, self.me().label)

    def stream_wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self.trace.lock:
            agent = self._issue(stream)
            super().stream_wait(stream, event)
            self.trace.wait(agent, self._recorded[event], self.me().label)

    def wait_event(self, event: FakeEvent) -> None:
        super().wait_event(event)
        self.trace.wait(self.me(), self._recorded[event])

    def wait_stream(self, stream: FakeStream) -> None:
        super().wait_stream(stream)
        if stream in self._movers:  # native code waits for it when its thread has ended
            self.trace.wait(self.me(), self.trace.stamp(self._movers[stream], "end of a thread"))
        self.trace.synchronize(self._agents[stream])

    def synchronize(self) -> None:
        self.trace.synchronize(self.stream)

    def _enqueue_copies(self, stream: FakeStream, copies: list[tuple[int, int, int]]) -> None:
        with self.trace.lock:
            agent = self._issue(stream)
            super()._enqueue_copies(stream, copies)
            span_at = self.trace.span_at
            self.trace.access(
                agent,
                "copy",
                [span_at(source, num_bytes) for _, source, num_bytes in copies],
                [span_at(target, num_bytes) for target, _, num_bytes in copies],
            )

    def _issue(self, stream: FakeStream) -> Agent:
        """The stream goes on after what the calling thread knows."""
        agent, me, jobs = self._agents[stream], self.me(), self._jobs.get(stream, ())
        while jobs and jobs[0].mark.is_done:
            jobs.popleft()
        if jobs:
            job = jobs[0]
            self._movers[stream] = me
            me.name = me.role = agent.name.replace("stream", "thread")
            me.task = job.task
            self.trace.wait(me, job.given, me.role)
            self._wait_for_host_tasks(job.after)
        if stream is not self.clock:  # any thread records on it, for its own measure of time only
            self.trace.issue(agent)
        return agent

    def _wait_for_host_tasks(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            if mark in self._finished:  # not there before: the native code still waits
                self.trace.wait(self.me(), self._finished[mark])

    # Memory.

    def allocate(self, num_bytes: int) -> Tensor:
        return self.placed(super().allocate(num_bytes), "device memory", self._default)

    def placed(self, tensor: Tensor, name: str, home: Agent | None) -> Tensor:
        if tensor.numel():
            self.trace.place(tensor, name, home)
        return tensor

    def is_on_device(self, tensor: Tensor) -> bool:
        return bool(tensor.numel()) and self.trace.region_of(tensor).home is not None

    # What is read and written.

    def on_host(self, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        self._access(self.me(), operation, reads, writes)

    def _access(
        self, agent: Agent, operation: str, reads: Iterable[Tensor], writes: Iterable[Tensor]
    ) -> None:
        spans = ([self.trace.span_of(t) for t in each if t.numel()] for each in (reads, writes))
        self.trace.access(agent, operation, *spans)

    def in_stream(self, operation: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Pageable memory of the host is read at once; if some is written, the host waits."""
        with self.trace.lock:
            me, stream = self.me(), self.stream
            on_host = [tensor for tensor in reads if not self.is_on_device(tensor)]
            on_device = [tensor for tensor in reads if self.is_on_device(tensor)]
            if on_host:
                self._access(me, operation, on_host, ())
            self.trace.issue(stream)
            self._access(stream, operation, on_device, writes)
            if not all(self.is_on_device(tensor) for tensor in writes if tensor.numel()):
                self.trace.synchronize(stream)

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation of torch."""
        reads, writes = _operands(func, args, kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in (*reads, *writes)}
        made = [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in given]
        is_made_there = kwargs.get("device") == self.device or (
            self.is_in_stream and not reads and not writes
        )
        with self.trace.lock:
            is_there = is_made_there or any(map(self.is_on_device, (*reads, *writes)))
            name, label = func._schema.name.removeprefix("aten::"), self.me().label
            for tensor in made:
                self.placed(tensor, f"a result in {label}", self.stream if is_there else None)
            if func._schema.name in ALLOCATIONS or not (made or writes):
                return  # nothing was computed
            if name in INDEXED and not is_there:
                rows = _rows_of(*args[:2])
                reads, writes = (reads, rows) if writes else ([*rows, *reads[1:]], [])
            (self.in_stream if is_there else self.on_host)(name, reads, [*writes, *made])

    def read_by_host(self, func: Callable[..., Any], tensor: Tensor) -> None:
        """Note what makes the host wait, as a number or a copy does."""
        if self.is_on_device(tensor):
            self.synchronize()
        self.on_host(func.__name__, [tensor], ())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the operations of the calling thread."""
        with _HostReads(self), _Operations(self):
            yield


class CheckedDevice(CudaDevice[FakeStream, FakeEvent]):
    """Names its memory by purpose."""

    _driver: CheckedCuda

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        memory = super().allocate(num_bytes, purpose)
        if num_bytes:
            self._driver.trace.region_of(memory).name = f"device memory for {purpose}"
        return memory

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        return self._driver.placed(super().allocate_pinned(num_bytes), "pinned buffer", None)


class _Runtime:
    """Marks of host tasks are known to whoever began after them."""

    def __init__(self, native: _native.DeviceRuntime, cuda: CheckedCuda) -> None:
        self.native, self._cuda = native, cuda
        self.end, self.close = native.end, native.close

    def begin(self, stream: int, after: Sequence[Mark], mark: TaskMark) -> bool:
        agent = self._cuda._agents[self._cuda._stream(stream)]
        agent.name = self._cuda.me().name.replace("raymoe-lane-", "stream ")
        is_begun = self.native.begin(stream, after, mark)
        self._cuda._wait_for_host_tasks(after)
        return is_begun


class _HostReads(TorchFunctionMode):
    def __init__(self, cuda: CheckedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in HOST_WAITS:
            return func(*args, **(kwargs or {}))
        is_copied = func is Tensor.cpu and self._cuda.is_on_device(args[0])
        self._cuda.read_by_host(func, args[0])
        result = func(*args, **(kwargs or {}))
        if is_copied:
            result = self._cuda.placed(result.clone(), "a copy on the host", None)
        return result


class _Operations(TorchDispatchMode):
    def __init__(self, cuda: CheckedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode, operations come before they are taken apart
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        if not func.is_view:
            with torch._C.DisableTorchFunction():
                self._cuda.computed(func, args, kwargs, result)
        return result


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor)]


def _operands(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What an operation of torch reads and what it writes; both if it changes a tensor."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    named = {argument.name: argument for argument in func._schema.arguments}
    given = [*zip(named.values(), args, strict=False), *((named[k], v) for k, v in kwargs.items())]
    for argument, value in given:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(_tensors(value))
    return reads, writes


def _rows_of(tensor: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor]:
    """What an operation by indices touches: all but other rows, if the first one chooses these."""
    first = indices[0]
    if first is None or first.dtype == torch.bool:
        return [tensor]
    return [tensor[row] for row in first.unique().tolist()]


def _signatures() -> Iterator[tuple[str, list[str]]]:
    """Native functions that take tensors, and the names of their arguments."""
    stubs = Path(_native.__file__).with_suffix(".pyi").read_text()
    for node in ast.parse(stubs).body:
        if isinstance(node, ast.FunctionDef):
            types = [ast.unparse(each.annotation) for each in node.args.args if each.annotation]
            if any("Tensor" in each or "_Codes" in each for each in types):
                yield node.name, [argument.arg for argument in node.args.args]


def _blocks(arguments: dict[str, Any], *, only_new: bool) -> list[Tensor]:
    """Blocks of the cache in which sequences of a step have tokens, or new ones."""
    starts, contexts = arguments["query_start"].tolist(), arguments["context_tokens"].tolist()
    table, found = arguments["block_table"].tolist(), set()
    for i, context in enumerate(contexts):
        first = context - (starts[i + 1] - starts[i]) if only_new else 0
        found |= set(table[i][first // BLOCK_TOKENS : -(-context // BLOCK_TOKENS)])
    return [arguments["cache"][block] for block in sorted(found)]


def _slots(arguments: dict[str, Any]) -> list[Tensor]:
    """Rows or sums in the slots of a step, which are counted from the end."""
    kept = arguments["rows"] if "rows" in arguments else arguments["sums"]
    return [kept[-1 - slot] for slot in arguments["slots"].tolist()]


def _watch_native(patch: pytest.MonkeyPatch, cuda: CheckedCuda) -> None:
    def watched(name: str, names: list[str], call: Callable[..., object], *args: object) -> object:
        result = call(*args)
        with torch._C.DisableTorchFunction():
            arguments = dict(zip(names, args, strict=False))
            writes = [arguments[each] for each in WRITTEN[name]]
            if "cache" in arguments:
                writes += _blocks(arguments, only_new=True)
                reads = _blocks(arguments, only_new=not WRITTEN[name])
                del arguments["cache"]
            elif "entries" in arguments:
                arguments["cache"] = arguments.pop("entries")
                reads = _blocks(arguments, only_new=False) if len(arguments["cache"]) else []
                if name == "pool_entries":
                    writes += _blocks(arguments, only_new=True)
                writes += _slots(arguments)
                for each in ("cache", "rows", "sums"):
                    arguments.pop(each, None)
            elif "block_table" in arguments:  # index keys are read alone
                arguments["cache"] = arguments.pop("keys")
                reads = _blocks(arguments, only_new=False)
                del arguments["cache"]
            else:
                reads = []
            reads += _tensors([each for key, each in arguments.items() if key not in WRITTEN[name]])
            cuda.on_host(name, reads, writes)
        return result

    for name, names in _signatures():
        assert name in WRITTEN, f"which arguments does {name} write?"
        patch.setattr(_native, name, partial(watched, name, names, getattr(_native, name)))


class _Mover(_native.Mover):
    cuda: CheckedCuda

    def __init__(self, name: str, runtime: _Runtime, stream: int, **options: Any) -> None:
        super().__init__(name, runtime.native, stream, **options)
        handle = self.cuda._stream(stream)
        self.cuda._agents[handle].name = f"stream {name.removeprefix('raymoe-lane-')}"
        self._jobs = self.cuda._jobs[handle] = deque()

    def submit(self, rows, can_batch, after, mark, *rest) -> None:
        me = self.cuda.me()
        self._jobs.append(_Job(mark, after, self.cuda.trace.stamp(me, "queue"), me.submitting))
        super().submit(rows, can_batch, after, mark, *rest)


def _watch_threads(patch: pytest.MonkeyPatch, cuda: CheckedCuda) -> None:
    start, join, trace = threading.Thread.start, threading.Thread.join, cuda.trace
    ended: weakref.WeakKeyDictionary[threading.Thread, Stamp] = weakref.WeakKeyDictionary()

    def watched_run(thread: threading.Thread, begin: Stamp, run: Callable[[], None]) -> None:
        me = cuda._threads[threading.get_ident()] = _thread_agent(thread.name)
        trace.wait(me, begin)
        try:
            with cuda.watching():
                run()
        finally:
            ended[thread] = trace.stamp(me, "end of a thread")
            del cuda._threads[threading.get_ident()]

    def watched_start(thread: threading.Thread) -> None:
        begin = trace.stamp(cuda.me(), "start of a thread")
        thread.run = partial(watched_run, thread, begin, thread.run)  # type: ignore[method-assign]
        start(thread)

    def watched_join(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread in ended:
            trace.wait(cuda.me(), ended[thread])

    patch.setattr(threading.Thread, "start", watched_start)
    patch.setattr(threading.Thread, "join", watched_join)


def _watch_queues(patch: pytest.MonkeyPatch, cuda: CheckedCuda) -> None:
    class Queue(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: object, *_: Any, **__: Any) -> None:
            me = cuda.me()
            super().put((cuda.trace.stamp(me, "queue"), me.submitting, item))

        def get(self, *args: Any, **kwargs: Any) -> object:
            given, task, item = super().get(*args, **kwargs)
            me = cuda.me()
            me.task = None
            cuda.trace.wait(me, given)
            me.task = task
            return item

        def get_nowait(self) -> object:
            return self.get(block=False)

    for module in (queue, lanes):
        patch.setattr(module, "SimpleQueue", Queue)
    results: weakref.WeakKeyDictionary[Future[Any], Stamp] = weakref.WeakKeyDictionary()
    set_result, result = Future.set_result, Future.result

    def watched_set_result(future: Future[Any], value: object) -> None:
        results[future] = cuda.trace.stamp(cuda.me(), "future")
        set_result(future, value)

    def watched_result(future: Future[Any], timeout: float | None = None) -> object:
        value = result(future, timeout)
        if future in results:
            cuda.trace.wait(cuda.me(), results[future])
        return value

    patch.setattr(Future, "set_result", watched_set_result)
    patch.setattr(Future, "result", watched_result)


def _watch_lanes(patch: pytest.MonkeyPatch, cuda: CheckedCuda) -> None:
    for lane_type in (CudaLane, ThreadLane, MoverLane):
        submit = lane_type.submit

        def watched(lane: Any, task: Task, call: Call, after: Sequence[Mark], submit=submit):
            me = cuda.me()
            me.submitting = task
            try:
                return submit(lane, task, call, after)
            finally:
                me.submitting = None

        patch.setattr(lane_type, "submit", watched)
    finish, wait_done = _native.Mark.finish, _native.Mark.wait_done

    def watched_finish(mark: TaskMark, start_s: float, end_s: float) -> None:
        cuda._finished[mark] = cuda.trace.stamp(cuda.me())
        finish(mark, start_s, end_s)

    def watched_wait(mark: TaskMark) -> bool:
        is_done = wait_done(mark)
        cuda._wait_for_host_tasks([mark])
        return is_done

    patch.setattr(_native.Mark, "finish", watched_finish)
    patch.setattr(_native.Mark, "wait_done", watched_wait)
    patch.setattr(_native, "Mover", type("Mover", (_Mover,), {"cuda": cuda}))


def watch(patch: pytest.MonkeyPatch, cuda: CheckedCuda) -> None:
    """Let a device see what threads of the host do; of this one, within `cuda.watching`."""
    _watch_native(patch, cuda)
    _watch_threads(patch, cuda)
    _watch_queues(patch, cuda)
    _watch_lanes(patch, cuda)
