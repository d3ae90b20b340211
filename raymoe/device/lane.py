"""Lanes: threads that run the tasks of a schedule in order."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from raymoe import _native
from raymoe.errors import ExecutionError, RaymoeError
from raymoe.schedule.graph import Resource, Task

ThreadContext = Callable[[], AbstractContextManager[object]]


class Worker:
    """Owns a thread that runs jobs in order; jobs must not raise."""

    def __init__(self, name: str, context: ThreadContext = nullcontext) -> None:
        """Start the thread; return when it has entered its context, so that no run pays for that.

        The thread stays in `context`: torch's inference mode and current device belong to a thread.
        Errors of the context are raised here.
        """
        self.name = name
        self._context = context
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        is_ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(is_ready,), name=name, daemon=True)
        self._thread.start()
        try:
            is_ready.result()
        except BaseException:
            self._thread.join()
            raise

    def put(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise ExecutionError(f"{self.name} is closed; submit before close()")
            self._jobs.put(job)

    def close(self) -> bool:
        """Run the queued jobs, then end the thread; False if that was asked before."""
        with self._lock:
            is_first = not self._is_closed
            if is_first:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join()
        return is_first

    def _run(self, is_ready: Future[None]) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._context())
            except BaseException as error:
                is_ready.set_exception(error)
                return
            is_ready.set_result(None)
            while (job := self._jobs.get()) is not None:
                job()
                del job  # otherwise the thread keeps the last job's data alive


Call = Callable[[], object]


class Cancelled(RaymoeError):  # noqa: N818 - an outcome of a task, as asyncio.CancelledError
    """The awaited task will not run to its end: it failed (`__cause__`) or never started."""


class Mark(Protocol):
    """The end of one submitted task; any number of threads may wait for it.

    Times are seconds of `time.perf_counter`; 0.0 for a task that never started.
    """

    def wait(self) -> None:
        """Block the calling thread until the task is done.

        Raises:
            Cancelled: The task failed or was not started.
        """

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""

    @property
    def start_s(self) -> float:
        """Start time; valid once the task is done."""

    @property
    def end_s(self) -> float:
        """End time; valid once the task is done."""


class Lane(Protocol):
    """Runs tasks one at a time, in the order of `submit`, each after its dependencies."""

    @property
    def resource(self) -> Resource:
        """The resource that the lane executes."""

    @property
    def is_synchronous(self) -> bool:
        """Whether a returned call has done its work; False if it has only enqueued it."""

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> Mark:
        """Queue `call`, which does the work of `task`; return at once.

        A task is cancelled if its call raises or a mark in `after` is cancelled; the lane goes on
        with the next one.

        Args:
            task: Gives the name and, on emulated devices, the duration.
            call: Runs in the lane's thread; on lanes of copies here, and returns what to copy.
            after: Marks of tasks, of any lane, that must be done before.
        """

    def close(self) -> None:
        """Finish what was submitted and end the lane's thread; idempotent."""


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, whatever the others raise; then raise the first error."""
    first: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


@contextmanager
def released_on_error(release: Callable[[], object]) -> Iterator[None]:
    """Release what a block has made if it fails; raise its own error, with what that raised too."""
    try:
        yield
    except BaseException as error:
        try:
            release()
        except Exception as second:
            error.add_note(f"and releasing failed: {type(second).__name__}: {second}")
        raise


class TaskMark(_native.Mark):
    """The end of a task, which native threads can wait for without the interpreter.

    A lane of a stream *issues* a task, and the device finishes it later.
    """

    __slots__ = ("_error",)

    def __init__(self) -> None:
        super().__init__()
        self._error: BaseException | None = None

    def wait(self) -> None:
        if not self.wait_done():
            error = self._error
            if error is None and self.native_error:
                error = RuntimeError(self.native_error)
            raise Cancelled("the task was cancelled") from error

    def cancel(self, error: BaseException) -> None:
        # Keeps only the first error of a chain of cancelled tasks.
        self._error = None if isinstance(error, Cancelled) else error
        self.cancel_native("")


Perform = Callable[[Task, Call], None]


def perform(_task: Task, call: Call) -> None:
    call()


class ThreadLane:
    """A lane whose own thread waits for the marks and runs the calls."""

    is_synchronous = True

    def __init__(
        self,
        resource: Resource,
        *,
        perform: Perform = perform,
        context: ThreadContext = nullcontext,
    ) -> None:
        """Start the thread; the time in `perform` counts as the task's."""
        self.resource = resource
        self._perform = perform
        self._worker = Worker(f"raymoe-lane-{resource}", context)

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> TaskMark:
        mark = TaskMark()
        self._worker.put(partial(self._run, task, call, after, mark))
        return mark

    def close(self) -> None:
        self._worker.close()

    def _run(self, task: Task, call: Call, after: Sequence[Mark], mark: TaskMark) -> None:
        try:
            for before in after:
                before.wait()
            start_s = time.perf_counter()
            self._perform(task, call)
            end_s = time.perf_counter()
        except BaseException as error:  # the waiters of the mark get it
            mark.cancel(error)
        else:
            mark.finish(start_s, end_s)
