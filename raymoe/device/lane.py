"""One named thread that runs jobs in the order in which they come."""

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
    """Owns a thread and its queue; `close` ends the thread after the jobs that were put before.

    A job must not raise: whoever puts it says what becomes of its errors.
    """

    def __init__(self, name: str, context: ThreadContext = nullcontext) -> None:
        """Start the thread; returns when it is in its context, so that no run pays for that.

        Args:
            context: Entered by the thread for all its life; torch's inference mode and the current
                device belong to a thread, so they cannot be set by whoever puts a job. Its error
                is raised here.
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
        """Queue a job.

        Raises:
            ExecutionError: The worker is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ExecutionError(f"{self.name} is closed; submit before close()")
            self._jobs.put(job)

    def close(self) -> None:
        """Finish what was put, then end the thread; may be called again."""
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
                del job  # or the thread would keep the last job's data alive until the next one


Call = Callable[[], None]


class Cancelled(RaymoeError):  # noqa: N818 - an outcome of a task, as asyncio.CancelledError
    """The awaited task will not be done: it failed (`__cause__`), or was never started."""


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
        """When the task started; known once it is done."""

    @property
    def end_s(self) -> float:
        """When the task ended; known once it is done."""


class Lane(Protocol):
    """Runs tasks one at a time, in the order of `submit`, each after the marks it is given."""

    @property
    def resource(self) -> Resource:
        """What the lane stands for."""

    @property
    def is_synchronous(self) -> bool:
        """A call that returned has done its work; false where it has only enqueued it."""

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> Mark:
        """Queue `call`, which does the work of `task`; returns at once.

        A task whose call raises, or one of whose marks is cancelled, ends cancelled; the lane goes
        on with the next one.

        Args:
            task: What is done, for lanes that go by it (names, durations).
            call: Runs in the lane's own thread.
            after: Marks of tasks, of any lane, that must be done before.
        """

    def close(self) -> None:
        """Finish what was submitted and end the lane's thread; may be called again."""


class HostMark:
    """The end of a task that a host thread runs.

    Waiters block on a raw lock that the owner holds until the end and that each waiter passes on:
    a third of the cost of `threading.Event`, and a step has thousands of them.
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
        """Whether `wait` would return or raise at once."""
        return self._is_done

    def wait(self) -> None:
        """Block until the task is done.

        Raises:
            Cancelled: The task failed or was not started.
        """
        if not self._is_done:
            with self._lock:
                pass
        if self._is_cancelled:
            raise Cancelled("the task was cancelled") from self._error

    def finish(self, start_s: float, end_s: float) -> None:
        """Say that the task ran; once, by the lane that runs it."""
        self.start_s = start_s
        self.end_s = end_s
        self._is_done = True
        self._lock.release()

    def cancel(self, error: BaseException) -> None:
        """Say that the task will not be done; once, instead of `finish`."""
        # A chain of cancelled tasks need not keep every link of it.
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
        """Start the thread.

        Args:
            resource: What the lane stands for.
            perform: Runs a call; its whole time counts as the task's.
            context: Entered by the lane's thread; see `Worker`.
        """
        self.resource = resource
        self._perform = perform
        self._worker = Worker(f"raymoe-lane-{resource}", context)

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> HostMark:
        """Queue `call` behind what was submitted before; see `Lane.submit`."""
        mark = HostMark()
        self._worker.put(partial(self._run, task, call, after, mark))
        return mark

    def close(self) -> None:
        """Finish what was submitted and end the thread; may be called again."""
        self._worker.close()

    def _run(self, task: Task, call: Call, after: Sequence[Mark], mark: HostMark) -> None:
        try:
            for before in after:
                before.wait()
            start_s = time.perf_counter()
            self._perform(task, call)
            end_s = time.perf_counter()
        except BaseException as error:  # whatever it is belongs to those who wait for the mark
            mark.cancel(error)
        else:
            mark.finish(start_s, end_s)
