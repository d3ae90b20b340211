"""How calls come to a generator, and advice where they keep its rows from running together."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from raymoe.engine.engine import Engine

ENOUGH_CALLS = 2  # one after the other; the next one says so
FULL_BATCHES = 4  # rows of a call for each sequence that runs: the last rows of a call run alone
MAX_ADVISED_CALLS = 32

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class CallerThread:
    """In the place of a `ThreadPoolExecutor`: runs a function in the thread that submits it."""

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class SerialCalls:
    """Notices that calls come one after another with few rows. Thread-safe.

    Args:
        num_expected: Calls that come at once, where somebody has said it.
    """

    def __init__(self, num_expected: int | None) -> None:
        self._lock = threading.Lock()  # guards all following attributes
        self._is_over = num_expected is not None and num_expected > 1
        self._num_inside = self._num_calls = self._num_rows = 0

    @contextlib.contextmanager
    def count(self, num_rows: int, engine: "Engine") -> Iterator[None]:
        """Count a call while it is inside."""
        with self._lock:
            if self._num_inside:
                self._is_over = True  # several come at once
            is_serial = not self._is_over and self._num_calls >= ENOUGH_CALLS
            self._is_over |= is_serial
            self._num_inside += 1
        if is_serial:
            self._say(engine)
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                self._num_calls += 1
                self._num_rows += num_rows

    def _say(self, engine: "Engine") -> None:
        if engine.expected_calls is None:
            engine.expected_calls = 1  # no other rows come: it need not wait for them
        each, at_once = self._num_rows / self._num_calls, engine.policy.max_num_seqs
        if each >= at_once:
            return
        calls = min(MAX_ADVISED_CALLS, -(-FULL_BATCHES * at_once // max(1, round(each))))
        logger.warning(
            "rows come %.3g at a time, one call after another, while this engine runs %d at once: "
            "give map_batches batch_size=%d, or compute=ray.data.ActorPoolStrategy(size=1, "
            "max_concurrent_calls_per_actor=%d), or **raymoe.map_batches_kwargs(model), which "
            "chooses both",
            each, at_once, FULL_BATCHES * at_once, calls,
        )  # fmt: skip
