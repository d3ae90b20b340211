"""Shared memory of all processes of a user on a machine, for as long as one of them uses it.

A file in `/dev/shm` is found by its name and mapped by every process. The state is in its lock
(flock), which the kernel releases when a process dies:

- exclusive: the holder fills the file, and other processes wait. If the holder dies, the file lacks
  the mark at its end, and the next process fills it again.
- shared: the holder uses the file. The last user removes it. A file without a holder (all users
  were killed) is reused by the next process with the same key, and removed by the next with another
  key.

    data       from the begin, a whole number of pages
    mark       one page: magic, bytes of data, bytes of the note, the note
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor

from raymoe.errors import CapacityError, CheckpointError, ExecutionError
from raymoe.specs.files import open_regular
from raymoe.units import ceil_div, format_bytes

DIRECTORY = Path("/dev/shm")
PREFIX = "raymoe-"
MAGIC = b"raymoes1"
POLL_S, SAY_EVERY_S = 0.2, 60.0

_MARK = struct.Struct("<8sQQ")

logger = logging.getLogger(__name__)


class SharedFile:
    """A file that this process fills, or that is whole.

    Attributes:
        is_whole: Whether the file is filled.
        note: Data from the process that filled it.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file
        self.num_bytes, self.note, self.is_whole = _read_mark(file)
        self._memory: Tensor | None = None

    @classmethod
    def open(cls, key: str, directory: Path | None = None) -> "SharedFile":
        """Open the file of a key; wait while another process fills it.

        Args:
            key: Letters and digits that identify the contents.
            directory: A file system in memory; `DIRECTORY` by default.

        Raises:
            ExecutionError: The name belongs to something else.
        """
        directory = directory or DIRECTORY
        prefix = f"{PREFIX}{os.geteuid()}-"
        path = directory / f"{prefix}{key}"
        for other in directory.glob(f"{prefix}*"):
            if other != path:
                _remove_unused(other)
        while True:
            file = _open(path)
            # Shared first: a whole file needs no more. The kernel releases a lock before it takes
            # another kind, so the state is checked again after each.
            _lock(file, fcntl.LOCK_SH, path)
            if not _read_mark(file)[2]:
                _lock(file, fcntl.LOCK_EX, path)
                if _read_mark(file)[2]:
                    _lock(file, fcntl.LOCK_SH, path)
            if _is_same(file, path):
                return cls(path, file)
            os.close(file)  # the last user has removed it

    def create(self, num_bytes: int) -> Tensor:
        """Allocate zeroed memory to be filled, uint8."""
        length = ceil_div(num_bytes, mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
        os.ftruncate(self._file, 0)
        status = os.fstatvfs(self._file)
        free = status.f_bavail * status.f_frsize
        try:
            if length > free:
                raise OSError("too small")
            os.posix_fallocate(self._file, 0, length)  # else a write beyond it is a SIGBUS
        except OSError as error:
            os.ftruncate(self._file, 0)
            total = status.f_blocks * status.f_frsize
            raise CapacityError(
                f"{self._path.parent} has {format_bytes(free)} of {format_bytes(total)} free, and "
                f"{format_bytes(length)} are needed for weights that actors share ({error}): make "
                "it larger (docker: --shm-size; Kubernetes: an emptyDir with medium Memory), or "
                "set shared_weights=False"
            ) from error
        self.num_bytes = num_bytes
        self._memory = _map(self._file, num_bytes, is_writable=True)
        return self._memory

    def publish(self, note: bytes, *, is_writable: bool = False) -> None:
        """Mark the file as whole and let other processes use it.

        Args:
            note: At most a page less 24 bytes.
            is_writable: Keep this process's mapping writable; otherwise a write ends the process.
        """
        assert self._memory is not None
        mark = _MARK.pack(MAGIC, self.num_bytes, len(note)) + note
        if len(mark) > mmap.PAGESIZE:
            raise ExecutionError(f"a note of {len(note)} bytes is longer than a page")
        if not is_writable:
            _protect(self._memory)
        os.pwrite(self._file, mark, _mark_offset(self._file))
        self.note, self.is_whole = note, True
        _lock(self._file, fcntl.LOCK_SH, self._path)

    def memory(self, *, is_writable: bool = False) -> Tensor:
        if self._memory is None:
            self._memory = _map(self._file, self.num_bytes, is_writable=is_writable)
        return self._memory

    def close(self) -> None:
        """Release the lock; the last user removes the file. Its last tensor frees the memory."""
        if self._file < 0:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(self._file, self._path):
                self._path.unlink()
        # Closing is not enough: a mapping keeps a copy of the descriptor, and the lock with it.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        self._file, self._memory = -1, None


def _open(path: Path) -> int:
    try:
        file = open_regular(path, os.O_RDWR | os.O_CREAT)
    except (OSError, CheckpointError) as error:
        raise ExecutionError(f"{path} cannot be opened for weights to share: {error}") from error
    status = os.fstat(file)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(file)
        raise ExecutionError(
            f"{path} belongs to another user or can be written by one (mode "
            f"{status.st_mode & 0o777:o}); weights are not shared with strangers: remove it"
        )
    return file


def _lock(file: int, kind: int, path: Path) -> None:
    say_s = time.monotonic()
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= say_s:
                logger.info("waiting for another process, which loads %s", path)
                say_s = time.monotonic() + SAY_EVERY_S
            time.sleep(POLL_S)
        else:
            return


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> None:
    try:
        file = open_regular(path, os.O_RDWR)
    except (OSError, CheckpointError):  # removed, or not ours
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same(file, path):
            logger.info("%s is of processes that have ended; removed", path)
            path.unlink()
    except BlockingIOError:
        pass  # in use
    finally:
        os.close(file)


def _mark_offset(file: int) -> int:
    return os.fstat(file).st_size - mmap.PAGESIZE


def _read_mark(file: int) -> tuple[int, bytes, bool]:
    offset = _mark_offset(file)
    page = os.pread(file, mmap.PAGESIZE, offset) if offset >= 0 else b""
    if not page.startswith(MAGIC):
        return 0, b"", False
    _, num_bytes, note_bytes = _MARK.unpack_from(page)
    return num_bytes, page[_MARK.size : _MARK.size + note_bytes], True


def _map(file: int, num_bytes: int, *, is_writable: bool) -> Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
    mapping = mmap.mmap(file, num_bytes, access=access)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns once; nothing writes to shared ones.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _protect(memory: Tensor) -> None:
    if not memory.nbytes:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    if libc.mprotect(address, length, mmap.PROT_READ):
        reason = os.strerror(ctypes.get_errno())
        raise ExecutionError(f"weights that are shared cannot be made read-only: {reason}")
