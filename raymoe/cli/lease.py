"""Who writes an output: one run at a time, known by a file next to it.

    answers.lease    JSON: run, host, process, when it began, a counter that grows while it lives

A run refuses an output whose lease is alive, and takes over one whose run has ended: at once if the
kernel of this machine says so (a lock on the local file is free and the process is gone), else when
the counter has not moved for `STALE_S`, by this machine's clock alone. A run that finds another's
lease in the place of its own stops before it writes again.

Object stores cannot compare and write in one step everywhere: two runs that begin within
`READ_BACK_S` of each other may both see their own lease for as long as a heartbeat. Their parts
have different names, so that even then none replaces another's.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from raymoe.cli.storage import Location
from raymoe.errors import ConfigError, ExecutionError, RaymoeError

HEARTBEAT_S, STALE_S, READ_BACK_S = 10.0, 60.0, 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What a lease says of its run."""

    run: str
    host: str
    pid: int
    process_start: str
    began: str
    beat: int = 0


class Lease:
    """The right to write an output; a context manager.

    Attributes:
        run: Id of this run, in the names of its parts.
    """

    def __init__(self, output: Location) -> None:
        self.run = uuid.uuid4().hex[:8]
        self._output = output
        self._file = output.sibling(f"{output.name}.lease")
        self._lock: int | None = None
        self._is_lost = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="raymoe-lease", daemon=True)
        self._mine = Holder(
            run=self.run,
            host=_host(),
            pid=os.getpid(),
            process_start=_process_start(os.getpid()),
            began=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    def __enter__(self) -> Self:
        """Take the lease.

        Raises:
            ConfigError: Another run writes the output, or nothing can be written there.
        """
        if self._output.is_local:
            self._file.local_path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_file(self._file.local_path)
        try:
            self._wait_for_end()
            self._write(self._mine)
            if not self._output.is_local:
                time.sleep(READ_BACK_S)
            found = self._read()
            if found is None or found.run != self.run:
                raise self._refusal(found)
        except BaseException:
            self._unlock()
            raise
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(RaymoeError):  # then it becomes stale
            found = self._read()
            if found is not None and found.run == self.run:
                self._file.delete()
        self._unlock()

    def check(self) -> None:
        """Make sure that nothing is written any more once another run has the lease.

        Raises:
            ExecutionError: It has.
        """
        if self._is_lost:
            raise ExecutionError(
                f"{self._file} is another run's by now: this run was paused or cut off for longer "
                f"than {STALE_S:g} s; it writes nothing more. What is missing comes with --resume"
            )

    def _lock_file(self, path: Path) -> int:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise self._refusal(self._read()) from None
        except OSError as error:  # a file system without locks: the counter tells
            logger.info("%s cannot be locked (%s)", path, error)
        if not os.path.samestat(os.fstat(lock), path.stat()):  # a run that ended has removed it
            os.close(lock)
            return self._lock_file(path)
        return lock

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _wait_for_end(self) -> None:
        """Return when no other run is alive.

        Raises:
            ConfigError: One is.
        """
        first = self._read()
        if first is None or _has_ended(first):
            return
        logger.warning("waiting up to %g s: is the run of %s alive?", STALE_S, self._file)
        deadline_s = time.monotonic() + STALE_S
        while time.monotonic() < deadline_s:
            time.sleep(min(1.0, HEARTBEAT_S / 4))
            now = self._read()
            if now is None:
                return
            if now != first:
                raise self._refusal(now)

    def _renew(self) -> None:
        beat = 0
        while not self._ends.wait(HEARTBEAT_S):
            try:
                found = self._read()
                if found is not None and found.run != self.run:
                    self._is_lost = True
                    return
                beat += 1
                self._write(Holder(**asdict(self._mine) | {"beat": beat}))
            except (RaymoeError, OSError) as error:  # away for a while; the next beat may succeed
                logger.warning("%s cannot be renewed: %s", self._file, error)

    def _read(self) -> Holder | None:
        """The lease that is there, if it can be understood: what cannot is nobody's."""
        if not self._file.exists():
            return None
        try:
            with self._file.explained("read"):
                return Holder(**json.loads(self._file.read_bytes()))
        except (ValueError, TypeError):
            return None

    def _write(self, holder: Holder) -> None:
        data = json.dumps(asdict(holder)).encode()
        if self._lock is not None:  # in place: the lock is on this file
            os.pwrite(self._lock, data.ljust(os.fstat(self._lock).st_size), 0)
        else:
            with self._file.replacing(retry_after_s=()) as file:
                file.write(data)

    def _refusal(self, holder: Holder | None) -> ConfigError:
        who = "another run"
        if holder is not None:
            who = (
                f"run {holder.run} of process {holder.pid} on {holder.host}, since {holder.began},"
            )
        return ConfigError(
            f"--output {self._output}: {who} writes it; wait for its end or end it, then --resume "
            f"(what is left of a run that was killed is free after {STALE_S:g} s), or choose "
            "another --output"
        )


def _has_ended(holder: Holder) -> bool:
    """Whether this machine knows that the run has ended."""
    return holder.host == _host() and _process_start(holder.pid) != holder.process_start


def _host() -> str:
    """This machine since it was started: process ids count within it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def _process_start(pid: int) -> str:
    """When a process began, in ticks of the kernel; "" if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rsplit(")", 1)[1].split()[19]
