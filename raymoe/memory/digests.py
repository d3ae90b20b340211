"""Full digests of weight files: computed once by all cores, kept while a file stays as it is.

A digest is the sha256 of a file's bytes. The hub cache names its blobs by it, which costs nothing;
other files are read once. One core hashes 1 to 2 GB/s, so reading files that are in memory already
takes their size over that rate and the number of cores; files on a disk take what the disk takes.
The caller decides whether to wait: a thread can hash while the same files are loaded, and the
operating system reads each byte from the disk once for both.

What was computed is kept next to the model (elsewhere if that cannot be written) under device,
inode, size, and the times of the last change of contents and of inode, which the kernel sets.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raymoe.errors import CheckpointError
from raymoe.specs.files import open_regular
from raymoe.units import MIB

CACHE_NAME = ".raymoe-digests.json"
MAX_ENTRIES = 4096
READ_BYTES = 16 * MIB
# A file that has just changed may change again within the resolution of its times.
SETTLED_NS = 2_000_000_000

_SHA256 = re.compile("[0-9a-f]{64}")


def file_state(path: Path) -> str:
    """What the kernel knows of a file: equal only if nobody has changed it in between."""
    status = path.stat()
    fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return "-".join(map(str, fields))


def known_digests(paths: Sequence[Path], caches: Sequence[Path]) -> dict[Path, str]:
    """Digests that need no reading: names of blobs, and what was computed before.

    Args:
        paths: Resolved paths of files.
        caches: Files that `read_digests` wrote, or that are not there.
    """
    entries = {state: digest for cache in caches for state, digest in _read_cache(cache).items()}
    known = {}
    for path in paths:
        digest = path.name if _is_blob(path) else entries.get(file_state(path))
        if digest is not None:
            known[path] = digest
    return known


def read_digests(paths: Sequence[Path], caches: Sequence[Path]) -> dict[Path, str]:
    """Digests of files, read where they are not known. Of several processes only one reads.

    Args:
        paths: Resolved paths of files.
        caches: Where digests are kept: the first that can be written.

    Raises:
        CheckpointError: A file cannot be read, or changes while it is read.
    """
    with _locked(caches) as cache:
        known = known_digests(paths, caches)
        missing = [path for path in paths if path not in known]
        states = [file_state(path) for path in missing]
        now_ns = time.time_ns()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "raymoe-digest") as pool:
            digests = list(pool.map(_digest, missing))
        settled = {}
        for path, state, digest in zip(missing, states, digests, strict=True):
            if file_state(path) != state:
                raise CheckpointError(f"{path}: has changed while it was read; load it again")
            status = path.stat()
            if max(status.st_mtime_ns, status.st_ctime_ns) + SETTLED_NS < now_ns:
                settled[state] = digest
        if settled and cache is not None:
            _write_cache(cache, settled)
    return known | dict(zip(missing, digests, strict=True))


def _is_blob(path: Path) -> bool:
    is_in_cache = path.parent.name == "blobs" and path.parent.parent.name.startswith("models--")
    return is_in_cache and _SHA256.fullmatch(path.name) is not None


def _digest(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _read_cache(path: Path) -> dict[str, str]:
    """Entries of a file that nobody but its owner, us or root, can have written."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o022
            if not (is_ours and stat.S_ISREG(status.st_mode)):
                return {}
            entries = json.loads(file.read(MIB))
    except (OSError, ValueError, RecursionError):
        return {}  # it is read again, and written anew
    if not isinstance(entries, Mapping):
        return {}
    pairs = [(str(state), digest) for state, digest in entries.items() if isinstance(digest, str)]
    return {state: digest for state, digest in pairs if _SHA256.fullmatch(digest)}


def _write_cache(path: Path, entries: dict[str, str]) -> None:
    """Add entries, the latest last; what is too much goes from the front."""
    kept = list((_read_cache(path) | entries).items())[-MAX_ENTRIES:]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # without it, the next process reads the files again
        try:
            with os.fdopen(os.open(temporary, flags, 0o644), "w") as file:
                json.dump(dict(kept), file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(caches: Sequence[Path]) -> Iterator[Path | None]:
    """Hold a lock on the folder of the first cache that can be written; yields that cache."""
    for cache in caches:
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
        if os.access(cache.parent, os.W_OK):
            folder = os.open(cache.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with contextlib.suppress(OSError):  # a file system without locks: both read
                    fcntl.flock(folder, fcntl.LOCK_EX)
                yield cache
            finally:
                os.close(folder)
            return
    yield None
