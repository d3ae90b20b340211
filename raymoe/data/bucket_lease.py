"""The lease of a place in a bucket, which lets one driver at a time use it.

    leases/000001.json    JSON: run, host, process, when it began, a counter that grows

The latest lease counts. Each is made by a put that fails where there is one of its number, so that
of two drivers at once one gets it; only its driver writes it again. A driver refuses a place
whose lease is alive, and takes the next number when it has ended: when it says so, when its process
of this machine is gone, or when its counter has not moved for `STALE_S`, by this machine's clock
alone. A driver that finds another lease in the place of its own stops.
"""

import dataclasses
import json
import logging
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass

from raymoe.data.bucket import Bucket, BucketError
from raymoe.data.holder import Holder
from raymoe.errors import ConfigError, ExecutionError
from raymoe.specs.files import from_plain

HEARTBEAT_S, STALE_S, LOOK_EVERY_S = 10.0, 60.0, 1.0

DIRECTORY = "leases"
_NAME = re.compile(rf"{DIRECTORY}/(\d{{6,}})\.json", re.ASCII)

logger = logging.getLogger(__name__)


def is_lease(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    holder: Holder
    has_ended: bool = False


class BucketLease:
    """The right of a driver to a journal, or to an output."""

    def __init__(self, bucket: Bucket, what: str = "", *, run: str | None = None) -> None:
        """Make one that is not taken.

        Args:
            bucket: Where the leases are.
            what: Is leased, for people; by default the journal there.
            run: Id of the driver.
        """
        self._bucket, self._what = bucket, what or f"journal_dir {bucket}"
        self._holder = Holder.here(run or uuid.uuid4().hex[:8])
        self._number = 0
        self._is_lost = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="raymoe-lease", daemon=True)

    def take(self) -> None:
        """Take the lease.

        Raises:
            ConfigError: Another driver has it, or the bucket cannot be used.
        """
        try:
            number = self._wait_for_end()
            self._number = number + 1
            self._bucket.create(self._name(self._number), self._data(self._holder))
            found = self._read(self._number)  # mine too if the store was asked twice
        except BucketError as error:
            raise ConfigError(
                f"{self._what}: its lease cannot be taken: {error}; the bucket must be listed, "
                "read and written, with puts that fail where there is an object already "
                "(If-None-Match)"
            ) from error
        if found is None or found.holder.run != self._holder.run:
            raise self._refusal(found)
        self._thread.start()

    def check_free(self) -> None:
        """Make sure that no driver has it.

        Raises:
            ConfigError: One has, or the bucket cannot be used.
        """
        try:
            self._wait_for_end()
        except BucketError as error:
            raise ConfigError(f"the journal cannot be used: {error}") from error

    def is_held(self) -> bool:
        """Whether a driver took it and has not given it back.

        Raises:
            BucketError: It cannot be read.
        """
        found = self._read(self._latest())
        return found is not None and not found.has_ended

    def check(self) -> None:
        """Make sure that it is still this driver's.

        Raises:
            ExecutionError: It is another's.
        """
        if self._is_lost:
            raise ExecutionError(
                f"{self._what} is another run's by now: this one was paused or cut off for longer "
                f"than {STALE_S:g} s; end that run, or leave the rest to it"
            )

    def release(self, *, removes: bool = False) -> None:
        """Give it back; what cannot be said now is known when the counter has stood still.

        Args:
            removes: The leases too; a run that comes back does not find its own then.
        """
        self._ends.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        try:
            if not self._is_lost:
                data = self._data(self._holder, has_ended=True)
                self._bucket.put(self._name(self._number), data)
                if removes:
                    self._bucket.delete(self._bucket.sizes(DIRECTORY))
        except BucketError as error:
            logger.warning("%s; the next run waits %g s", error, STALE_S)

    def _wait_for_end(self) -> int:
        """Return the number of the latest lease when no other run is alive; 0 without any.

        Raises:
            BucketError: It cannot be read.
            ConfigError: A run is alive.
        """
        number = self._latest()
        first = self._read(number)
        if first is None or first.has_ended or first.holder.has_ended:
            return number
        logger.warning("waiting up to %g s: is the run of %s alive?", STALE_S, self._bucket)
        deadline_s = time.monotonic() + STALE_S
        while time.monotonic() < deadline_s:
            time.sleep(min(LOOK_EVERY_S, HEARTBEAT_S / 4))
            now = self._read(number)
            if now is None or now.has_ended:
                break
            if now != first:
                raise self._refusal(now)
        latest = self._latest()
        if latest != number:  # somebody else waited too, and was faster
            raise self._refusal(self._read(latest))
        return number

    def _renew(self) -> None:
        beat = 0
        while not self._ends.wait(HEARTBEAT_S):
            try:
                found = self._read(self._latest())
                if found is None or found.holder.run != self._holder.run:
                    self._is_lost = True
                    return
                beat += 1
                holder = dataclasses.replace(self._holder, beat=beat)
                self._bucket.put(self._name(self._number), self._data(holder))
            except BucketError as error:  # away for a while; the next beat may succeed
                logger.warning("the lease cannot be renewed: %s", error)

    def _latest(self) -> int:
        found = [_NAME.fullmatch(name) for name in self._bucket.sizes(DIRECTORY)]
        return max((int(match[1]) for match in found if match), default=0)

    def _read(self, number: int) -> _Content | None:
        if not number:
            return None
        try:
            data = self._bucket.read(self._name(number))
            return from_plain(_Content, json.loads(data), where=self._name(number))
        except (FileNotFoundError, ValueError, RecursionError):  # or of another raymoe
            return None

    @staticmethod
    def _name(number: int) -> str:
        return f"{DIRECTORY}/{number:06d}.json"

    @staticmethod
    def _data(holder: Holder, *, has_ended: bool = False) -> bytes:
        return json.dumps(asdict(_Content(holder=holder, has_ended=has_ended))).encode()

    def _refusal(self, found: _Content | None) -> ConfigError:
        who = "another run" if found is None else str(found.holder)
        return ConfigError(
            f"{self._what}: {who} uses it; wait for its end or end it (what is left of a run that "
            f"was killed is free after {STALE_S:g} s), or choose another place"
        )
