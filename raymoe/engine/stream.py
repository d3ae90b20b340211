"""Rows of an iterable on their way through an engine, returned as they finish."""

import functools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any

from raymoe.engine.outputs import Generation


class RowStream:
    """Reads prompts in a thread of its own, which submits them while there is room.

    Args:
        prompts: May be slow, and need not end.
        submit: Called with each prompt and its index.
        drop: Called when this is closed, to let go of the rows that are in the engine.
        max_rows: That were read and not returned.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        submit: Callable[[Any, int], Future[Generation]],
        drop: Callable[[], None],
        max_rows: int,
    ) -> None:
        self._prompts, self._submit, self._drop = prompts, submit, drop
        self._room = threading.Semaphore(max_rows)
        self._read: dict[int, Any] = {}  # prompts of rows that were not returned
        self._done: queue.SimpleQueue[tuple[int, Future[Generation]] | None] = queue.SimpleQueue()
        self._num_rows: int | None = None  # until the prompts end
        self._error: BaseException | None = None  # that ended them
        self._num_returned = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="raymoe-stream", daemon=True)
        self._thread.start()

    def next(self) -> tuple[int, Any, Generation] | None:
        """Wait for a row: its index, prompt and generation; None after the last one.

        Raises:
            ExecutionError: The engine failed or was closed.
            BaseException: What the prompts raised, after all rows before.
        """
        while self._num_returned != self._num_rows and not self._is_closed:
            found = self._done.get()
            if found is None:
                continue
            index, future = found
            generation = future.result()
            self._num_returned += 1
            self._room.release()
            return index, self._read.pop(index), generation
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """Read no more, and let go of the rows that were not returned."""
        self._is_closed = True
        self._drop()
        self._room.release()
        self._done.put(None)

    def _run(self) -> None:
        num_rows = 0
        try:
            for prompt in self._prompts:
                self._room.acquire()
                if self._is_closed:
                    return
                self._read[num_rows] = prompt
                future = self._submit(prompt, num_rows)
                future.add_done_callback(functools.partial(self._put, num_rows))
                num_rows += 1
        except CancelledError:  # of rows that were dropped
            return
        except BaseException as error:
            self._error = error
        self._num_rows = num_rows
        self._done.put(None)

    def _put(self, index: int, future: Future[Generation]) -> None:
        self._done.put((index, future))
