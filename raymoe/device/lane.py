"""Lanes: threads that run the tasks of a schedule in order."""

import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Protocol

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

    def close(self) -> None:
        """Run the queued jobs, then end the thread; idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join()

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


Call = Callable[[], None]


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
            call: Runs in the lane's thread.
            after: Marks of tasks, of any lane, that must be done before.
        """

    def close(self) -> None:
        """Finish what was submitted and end the lane's thread; idempotent."""


class HostMark:
    """The end of a task that a host thread runs.

    Waiters block on a raw lock that the owner holds until the end and that each waiter passes on.
    This costs a third of `threading.Event`, and a step has thousands of marks.
    """

    __slots__ = ("_error", "_is_cancelled", "_is_done", "_lock", "end_s", "start_s")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._is_done = False
        self._is_cancelled = False
        self._error: BaseException | None = None
        self.start_s = 0.0
        self.end_s = 0.0

    @property
    def is_done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        if not self._is_done:
            with self._lock:
                pass
        if self._is_cancelled:
            raise Cancelled("the task was cancelled") from self._error

    def finish(self, start_s: float, end_s: float) -> None:
        self.start_s = start_s
        self.end_s = end_s
        self._is_done = True
        self._lock.release()

    def cancel(self, error: BaseException) -> None:
        # Keeps only the first error of a chain of cancelled tasks.
        self._error = None if isinstance(error, Cancelled) else error
        self._is_cancelled = True
        self._is_done = True
        self._lock.release()


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

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> HostMark:
        mark = HostMark()
        self._worker.put(partial(self._run, task, call, after, mark))
        return mark

    def close(self) -> None:
        self._worker.close()

    def _run(self, task: Task, call: Call, after: Sequence[Mark], mark: HostMark) -> None:
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
