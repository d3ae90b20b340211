"""One named thread that runs jobs in the order in which they come."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue

from raymoe.errors import ExecutionError

ThreadContext = Callable[[], AbstractContextManager[object]]


class Worker:
    """Owns a thread and its queue; `close` ends the thread after the jobs that were put before.

    A job must not raise: whoever puts it says what becomes of its errors.
    """

    def __init__(self, name: str, context: ThreadContext = nullcontext) -> None:
        """Start the thread; returns when it is in its context, so that no run pays for that.

        Args:
            name: Of the thread, as debuggers and profilers show it.
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
