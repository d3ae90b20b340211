"""Decodes finished rows in a thread of its own, so that no step waits for it."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from raymoe.engine.generation import Generation
from raymoe.engine.request import Request
from raymoe.engine.stopping import DecodeAll

MAX_ROWS = 256  # at once

logger = logging.getLogger(__name__)


class Detokenizer:
    """Takes rows whose samples are all over and hands them on with their texts.

    Args:
        decode_all: Texts of token ids.
        finish: Called from the thread with each row and its answer.
    """

    def __init__(
        self, decode_all: DecodeAll, finish: Callable[[Request, Generation], None]
    ) -> None:
        self._decode_all, self._finish = decode_all, finish
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="raymoe-detokenizer", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Whether it is this thread that asks: a callback of a future."""
        return threading.current_thread() is self._thread

    def put(self, request: Request) -> None:
        """Take a row whose samples are over."""
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
        wanted = [(request, index) for request in requests for index in request.undecoded]
        texts = self._decode([request.undecoded[index] for request, index in wanted])
        for (request, index), text in zip(wanted, texts, strict=True):
            generation = request.finished[index]
            assert generation is not None
            request.finished[index] = (
                Generation.from_error(text, generation.num_input_tokens)
                if isinstance(text, Exception)
                else dataclasses.replace(generation, text=text)
            )
        for request in requests:
            try:
                self._finish(request, request.generation)
            except BaseException:  # SystemExit, say: other rows wait for this thread
                logger.exception("a callback of a row's future raised")

    def _decode(self, sequences: Sequence[Sequence[int]]) -> Sequence[str | Exception]:
        try:
            return self._decode_all(sequences)
        except Exception as error:  # the rows say what
            return [error] * len(sequences)
