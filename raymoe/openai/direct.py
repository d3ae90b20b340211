"""Requests that are answered at once, by an engine in the server that all of them share.

It is there only while there are such requests: it takes the memory that the process of a batch
needs, so the server runs either.
"""

import json
import logging
import queue
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import pyarrow as pa

from raymoe.errors import ExecutionError
from raymoe.openai.batch import BATCH_COLUMNS, CHAT, ID_COLUMN, read_requests, write_responses
from raymoe.openai.store import ApiError

REQUEST_ERROR_COLUMN = "__request_error__"
MAX_CALLS = 256  # requests in the engine; others wait
IDLE_S, IDLE_BEFORE_A_BATCH_S, LOOK_EVERY_S = 300.0, 2.0, 0.2

logger = logging.getLogger(__name__)


class Generator(Protocol):
    """A `MoEGenerator` with the columns of batches, `ID_COLUMN` and `REQUEST_ERROR_COLUMN`."""

    def __call__(self, batch: pa.Table) -> pa.Table: ...

    def close(self) -> None: ...


class DirectRequests:
    """Takes requests from any thread; `run` answers them in the one that has the machine."""

    def __init__(self, make_generator: Callable[[], Generator]) -> None:
        self._make_generator = make_generator
        self._queue: queue.SimpleQueue[tuple[pa.Table, Future[pa.Table]]] = queue.SimpleQueue()

    @property
    def is_waiting(self) -> bool:
        return not self._queue.empty()

    def submit(self, row: pa.Table) -> "Future[pa.Table]":
        """Return the future row with its answer."""
        future: Future[pa.Table] = Future()
        self._queue.put((row, future))
        return future

    def run(self, *, is_stopping: Callable[[], bool], has_batch: Callable[[], bool]) -> None:
        """Load the engine, and answer until no request has come for a while."""
        begin_s = time.monotonic()
        logger.info("a request arrived while no batch runs: loading the model")
        try:
            generator = self._make_generator()
        except Exception as error:
            logger.exception("the model cannot be loaded; requests without a batch are refused")
            self._refuse_all(error)
            return
        logger.info("loaded the model in %.1f s", time.monotonic() - begin_s)
        try:
            with ThreadPoolExecutor(MAX_CALLS, "direct") as pool:
                num_rows = self._answer_all(generator, pool, is_stopping, has_batch)
            logger.info("answered %s requests; freeing the memory of the model", f"{num_rows:,}")
        finally:
            generator.close()

    def _answer_all(
        self,
        generator: Generator,
        pool: ThreadPoolExecutor,
        is_stopping: Callable[[], bool],
        has_batch: Callable[[], bool],
    ) -> int:
        """Return the number of requests that were answered."""
        num_rows = 0
        running: set[Future[bool]] = set()
        last_s = time.monotonic()
        while True:
            done = {future for future in running if future.done()}
            running -= done
            num_rows += len(done)
            if is_stopping() or any(future.result() for future in done):
                return num_rows
            idle_s = IDLE_BEFORE_A_BATCH_S if has_batch() else IDLE_S
            if running or done:
                last_s = time.monotonic()
            elif time.monotonic() - last_s > idle_s:
                return num_rows
            try:
                row, future = self._queue.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            running.add(pool.submit(_answer, generator, row, future))

    def stop(self) -> None:
        """Refuse what is left."""
        self._refuse_all(ApiError(503, "the server is shutting down; send the request again later"))

    def _refuse_all(self, error: Exception) -> None:
        while self.is_waiting:
            future = self._queue.get()[1]
            if future.set_running_or_notify_cancel():  # else nobody waits for it any more
                future.set_exception(error)


def _answer(generator: Generator, row: pa.Table, future: "Future[pa.Table]") -> bool:
    """Answer one request; True if the engine is broken."""
    if not future.set_running_or_notify_cancel():
        return False  # nobody waits for it any more
    try:
        future.set_result(generator(row))
    except Exception as error:
        future.set_exception(error)
        return isinstance(error, ExecutionError)
    return False


def as_row(url: str, body: Mapping[str, Any]) -> pa.Table:
    """Return a request as a row.

    Raises:
        ApiError: A field of the body is not supported.
    """
    # The id seeds random numbers: a request with a seed has the same answer each time.
    custom_id = "" if body.get("seed") is not None else uuid.uuid4().hex
    line = {ID_COLUMN: custom_id, "method": "POST", "url": url, "body": json.dumps(body)}
    columns = {name: pa.array([line[name]], pa.string()) for name in BATCH_COLUMNS}
    table = pa.table({**columns, REQUEST_ERROR_COLUMN: pa.array([None], pa.string())})
    row = read_requests(table, error_column=REQUEST_ERROR_COLUMN)
    error = row.column(REQUEST_ERROR_COLUMN)[0].as_py()
    if error:
        raise ApiError(400, error.removeprefix("column 'body' "))
    return row


def as_answer(row: pa.Table, url: str) -> tuple[dict[str, Any], int]:
    """Return the body and the status of the answer that a row has got."""
    (line,) = write_responses(row)
    body, status = line["response"]["body"], line["response"]["status_code"]
    if status == 200:
        body["id"] = f"{'chatcmpl' if url == CHAT else 'cmpl'}-{uuid.uuid4().hex}"
    return body, status
