"""Which row ends processes? What the deaths of a job say about its rows.

When a process ends, every row inside of it may be the reason, and so may a machine that was taken
away. A row is told from its neighbours by running it with fewer and fewer of them:

- A row that was inside at one death is run again like any other: most deaths are no row's fault.
- One that was inside at two or more *unexplained* deaths is a suspect. Of those that were inside at
  n or more, at most an eighth run at once for n = 2, an eighth of that for n = 3, and so on, of the
  most rows that were inside at any of these deaths; once that is one, the row runs alone. So one
  guilty row among 512 is alone after four deaths. Rows that are not suspected run meanwhile.
- A row that is alone when its process ends gets a *strike*, and with two it is guilty: it becomes
  an error row. Deaths among others never make a row guilty, however many they are. For an innocent
  row to be taken for guilty, machines must be taken away from it twice in those moments in which it
  is alone, after it was inside at two deaths at least; a job that lives on machines so short-lived
  would hardly end without this either.
- All deaths at which a guilty row was inside are explained by it; its neighbours are free at once.

Where row after row turns out guilty and none is finished in between, the engine ends whatever it is
given; then the job fails (`check_engine`).
"""

import logging
import threading
import time
from collections import Counter
from pathlib import Path

from raymoe.data.inside import DEATH, SUFFIX, Death, keep_deaths, read_death
from raymoe.errors import CheckpointError, ExecutionError

STRIKES = 2  # deaths alone that make a row guilty
SUSPECT_AFTER = 2  # unexplained deaths
DIVISOR = 8
MAX_GUILTY_IN_A_ROW = 3
LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class Strikes:
    """The deaths of a job, from all its processes and runs. Thread-safe.

    Args:
        directory: Of the journal. Removing the files `death-*` from it acquits all rows.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # guards everything below
        self._deaths: dict[str, Death] = {}
        self._num_strikes: Counter[bytes] = Counter()
        self._num_deaths: Counter[bytes] = Counter()  # unexplained
        self._most_inside = 0
        self._next_look_s = 0.0

    def look(self, own_name: str) -> None:
        """Notice processes that have ended since; at most once a second.

        Args:
            own_name: File of this process.
        """
        with self._lock:
            if time.monotonic() < self._next_look_s:
                return
            self._next_look_s = time.monotonic() + LOOK_EVERY_S
            try:
                keep_deaths(self._directory, own_name)
            except (OSError, CheckpointError) as error:
                logger.warning("%s cannot be searched for deaths: %s", self._directory, error)
            self._read()

    def num_deaths(self, key: bytes) -> int:
        """Unexplained deaths at which a row was inside."""
        with self._lock:
            return self._num_deaths[key]

    def is_guilty(self, key: bytes) -> bool:
        """Whether a row has ended its process too often, alone."""
        with self._lock:
            return self._num_strikes[key] >= STRIKES

    def most_at_once(self, num_deaths: int) -> int | None:
        """Rows with so many unexplained deaths or more that may run at once; None for no limit."""
        if num_deaths < SUSPECT_AFTER:
            return None
        with self._lock:
            divisor: int = DIVISOR ** (num_deaths - SUSPECT_AFTER + 1)
            return max(1, self._most_inside // divisor)

    def check_engine(self) -> None:
        """Refuse to blame rows for an engine that finishes none.

        Raises:
            ExecutionError: Several rows in turn were guilty, and none was finished in between.
        """
        with self._lock:
            deaths = self._deaths.values()
            last_s = max((death.when_ns for death in deaths if death.has_finished), default=0)
            since = [death for death in deaths if death.when_ns > last_s and death.was_alone]
            keys = {key for death in since for key in death.inside}
            guilty = [key for key in keys if self._num_strikes[key] >= STRIKES]
        if len(guilty) >= MAX_GUILTY_IN_A_ROW:
            raise ExecutionError(
                f"{len(guilty)} rows in turn, each alone, have ended their process {STRIKES} times "
                "and none was finished in between: the engine or its machine is at fault and not "
                f"the rows. Find the reason in the logs of the actors, remove "
                f"{self._directory / DEATH}*, and start again"
            )

    def _read(self) -> None:
        found = {path.name: path for path in self._directory.glob(f"{DEATH}*{SUFFIX}")}
        if found.keys() == self._deaths.keys():
            return
        known = {name: self._deaths[name] for name in found if name in self._deaths}
        for name in found.keys() - known.keys():
            try:
                known[name] = read_death(found[name])
            except (OSError, CheckpointError) as error:
                logger.warning("%s cannot be read: %s", found[name], error)
        self._deaths = known
        self._num_strikes = Counter(
            key for death in known.values() if death.was_alone for key in death.inside
        )
        guilty = {key for key, count in self._num_strikes.items() if count >= STRIKES}
        unexplained = [death for death in known.values() if not death.inside & guilty]
        self._num_deaths = Counter(key for death in unexplained for key in death.inside)
        self._most_inside = max((len(death.inside) for death in unexplained), default=0)
        logger.info(
            "%s: %d processes have ended, %d of them unexplained; %d rows are guilty",
            self._directory,
            len(known),
            len(unexplained),
            len(guilty),
        )
