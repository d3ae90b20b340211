"""What the processes of a node download together: one of them does it, and the log says how far."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from raymoe.periodic import Periodic
from raymoe.units import format_bytes, format_seconds

SAY_EVERY_S = 30.0

# Actors show INFO of Ray Data's loggers, and of no others.
logger = logging.getLogger("ray.data.raymoe")


@contextlib.contextmanager
def once_a_node(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock that only one process of this node has at a time; it ends with its process.

    Args:
        lock: A file in the directory that the processes share; made if it is missing.
        what: Is downloaded, for people.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process of this node, which downloads %s", what)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # of a file system without locks: each process downloads
            logger.warning("%s: cannot be locked (%s)", lock, error.strerror)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def progress_in_log(
    what: str, num_done: Callable[[], int], num_bytes: int | None, every_s: float = SAY_EVERY_S
) -> Iterator[None]:
    """Say how much is downloaded: when that begins, periodically, and when it ends.

    Args:
        num_done: Bytes that are here.
        num_bytes: Of all of it, with what was here before; None if that is not known.
    """
    of_all = "" if num_bytes is None else f" of {format_bytes(num_bytes)}"
    begin_s, begin_bytes = time.monotonic(), num_done()

    def say() -> None:
        elapsed_s, done = time.monotonic() - begin_s, num_done()
        here = f"{format_bytes(done)}{of_all}"
        rate = format_bytes((done - begin_bytes) / max(elapsed_s, 1e-3))
        logger.info("%s: %s here after %s, %s/s", what, here, format_seconds(elapsed_s), rate)

    told = Periodic(say, every_s, name="raymoe-download")
    try:
        yield
    finally:
        told.close()
