"""Tells others how an engine does: a file, the metrics of Ray, a line of the log.

The engine knows nothing of it, and none of its passes waits.
"""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from raymoe.data.metrics import RayMetrics
from raymoe.data.status.files import (
    ACTOR_PREFIX,
    PASS_PREFIX,
    make_status_directory,
    write_record,
)
from raymoe.data.status.periodic import Periodic
from raymoe.data.status.probe import ActorProbe
from raymoe.data.status.record import ENDED, FAILED, RUNNING, ActorStatus, PassRecord
from raymoe.data.status.row_counter import RowCounter
from raymoe.data.status.text import actor_line

if TYPE_CHECKING:
    from raymoe.engine.engine import Engine

SAMPLE_EVERY_S = 1.0
WRITE_EVERY_S = 3.0
LOG_EVERY_S = 60.0
FIRST_PASS_S = 10.0  # until a typical pass is written; then after twice as long, and so on
LAST_WRITE_S = 10.0  # a slow disk must not keep a broken process from being replaced

logger = logging.getLogger(__name__)


class Observer:
    """Watches one engine, from before it is loaded until it ends."""

    def __init__(self, model: str, rows: RowCounter, *, status_dir: str | Path | None) -> None:
        """Start the thread.

        Args:
            model: Name for people.
            rows: What the operator counts.
            status_dir: Where files are written; None writes none.

        Raises:
            ConfigError: The directory cannot be used.
        """
        self._directory = None if status_dir is None else make_status_directory(status_dir)
        self._model, self._probe = model, ActorProbe(model, rows)
        self._metrics: RayMetrics | None = None
        self._written_s = self._logged_s = self._pass_s = time.monotonic() - WRITE_EVERY_S
        self._pass_every_s = FIRST_PASS_S
        self._cannot_write = self._is_broken = False
        self._thread = Periodic(self._look, SAMPLE_EVERY_S, name="raymoe-status")

    def attach(self, engine: "Engine") -> None:
        """Say that the engine is loaded."""
        self._metrics = RayMetrics.in_actor(self._model, self._probe.actor)
        self._probe.attach(engine)

    def fail(self, reason: str) -> None:
        """Say that the engine broke; returns soon, whatever the disk does."""
        self._probe.state, self._probe.reason = FAILED, reason
        self._thread.close(LAST_WRITE_S)

    def close(self) -> None:
        """Say that the engine ends, before it does; more than once is fine."""
        if self._probe.state != FAILED:
            self._probe.state = ENDED
        self._thread.close(LAST_WRITE_S)

    def _look(self) -> None:
        if self._is_broken:
            return
        try:
            self._probe.sample()
            self._tell(time.monotonic(), is_last=self._probe.state in {ENDED, FAILED})
        except Exception:  # rows matter more than what is said of them
            logger.exception("the status of this actor is not told from here on")
            self._is_broken = True

    def _tell(self, now_s: float, *, is_last: bool) -> None:
        if not is_last and now_s - self._written_s < WRITE_EVERY_S:
            return
        status = self._probe.status()
        self._written_s = now_s
        if self._metrics is not None:
            self._metrics.publish(status)
        self._write(ACTOR_PREFIX, status)
        if self._directory is not None and (is_last or self._is_time_for_a_pass(now_s)):
            typical = self._probe.typical_pass()
            if typical is not None:
                self._write(PASS_PREFIX, typical)
        if status.state == RUNNING and now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            logger.info("%s", actor_line(status))

    def _is_time_for_a_pass(self, now_s: float) -> bool:
        """Seldom, for it takes a simulation; a process that is killed leaves what there was."""
        if now_s - self._pass_s < self._pass_every_s:
            return False
        self._pass_s = now_s
        self._pass_every_s *= 2
        return True

    def _write(self, prefix: str, record: ActorStatus | PassRecord) -> None:
        if self._directory is None:
            return
        try:
            write_record(self._directory / f"{prefix}{record.actor}.json", record)
            self._cannot_write = False
        except OSError as error:
            if not self._cannot_write:
                logger.warning("the status in %s cannot be written: %s", self._directory, error)
            self._cannot_write = True
