"""The driver's part of a status: the job in a file, and what its actors say, every few seconds."""

import logging
import time
from pathlib import Path

from raymoe.cli.progress import Tally
from raymoe.data.status.files import JOB_FILE, read_status, write_record
from raymoe.data.status.periodic import Periodic
from raymoe.data.status.record import ENDED, FAILED, RUNNING, JobStatus, Pairs
from raymoe.data.status.view import JobView, node_rates

WRITE_EVERY_S = 5.0
LAST_WRITE_S = 10.0
LAST_WORDS_S, LOOK_EVERY_S = 10.0, 0.05

logger = logging.getLogger(__name__)


class JobWatch:
    """Writes how a job does while it runs, and how it ended; a context manager.

    Attributes:
        node_rates: What each machine generates, as its actors said last.
        cost_per_million_tokens: So far; None without a price.
    """

    def __init__(
        self,
        directory: Path,
        tally: Tally,
        *,
        model: str,
        settings: Pairs = (),
        num_written_before: int = 0,
        price_per_hour: float | None = None,
    ) -> None:
        """Watch a job.

        Args:
            directory: Of the status; there already.
            tally: What comes out.
            model: Name for people.
            settings: Names and values, for people.
            num_written_before: Rows that former runs had written.
            price_per_hour: Of a node.
        """
        self._directory, self._tally, self._model = directory, tally, model
        self._settings, self._num_written_before = settings, num_written_before
        self._price_per_hour = price_per_hour
        self._started_s = time.time()
        self._state, self._reason = RUNNING, ""
        self.node_rates = ""
        self.cost_per_million_tokens: float | None = None
        self._is_failing = False
        self._thread: Periodic | None = None

    def wait_for_actors(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Let actors say how they ended, before Ray ends their processes; those that do not, don't.

        Args:
            timeout_s: Wait no longer.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            actors = JobView.of(read_status(self._directory), time.time()).actors
            if not any(actor.is_alive for actor in actors):
                return
            time.sleep(LOOK_EVERY_S)

    def __enter__(self) -> "JobWatch":
        self._thread = Periodic(self._look, WRITE_EVERY_S, name="raymoe-job")
        return self

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        self._state = ENDED if kind is None else FAILED
        if error is not None:
            self._reason = str(error) or type(error).__name__
        if self._thread is not None:
            self._thread.close(LAST_WRITE_S)

    def _look(self) -> None:
        tally = self._tally
        status = JobStatus(
            name=self._directory.name.removesuffix(".status"),
            model=self._model,
            state=self._state,
            reason=self._reason,
            started_unix_s=self._started_s,
            updated_unix_s=time.time(),
            elapsed_s=tally.elapsed_s,
            total_rows=tally.total_rows,
            num_written_before=self._num_written_before,
            num_rows=tally.num_rows,
            num_error_rows=tally.num_errors,
            num_input_tokens=tally.num_input_tokens,
            num_generated_tokens=tally.num_generated_tokens,
            errors=tuple(tally.kinds.most_common()),
            price_per_hour=self._price_per_hour,
            settings=self._settings,
        )
        try:
            write_record(self._directory / JOB_FILE, status)
        except OSError as error:
            if not self._is_failing:
                logger.warning("the status in %s cannot be written: %s", self._directory, error)
            self._is_failing = True
        view = JobView.of(read_status(self._directory), time.time())
        self.node_rates = node_rates(view.nodes)
        self.cost_per_million_tokens = view.cost_per_million_tokens
