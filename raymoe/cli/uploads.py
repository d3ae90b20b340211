"""A file of an object store: sent from its start to its end, or not there."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import pyarrow as pa
from pyarrow import fs

from raymoe.errors import ExecutionError

CHUNK_BYTES = 16 << 20
# A job of days must outlive a store that is busy or away for a minute.
RETRY_AFTER_S = (1.0, 4.0, 15.0, 40.0)

Chunks = Callable[[], Iterable[bytes]]

logger = logging.getLogger(__name__)


def upload(
    filesystem: fs.FileSystem,
    path: str,
    chunks: Chunks,
    *,
    explain: Callable[[Exception], str],
    retry_after_s: Sequence[float] = RETRY_AFTER_S,
) -> None:
    """Write a file; try again when that fails.

    Args:
        filesystem: Of the file.
        path: Of the file; what is there is replaced.
        chunks: Gives the content, from its start, each time it is called.
        explain: Turns the error of the file system into a message.
        retry_after_s: How long to wait before each further try.

    Raises:
        ExecutionError: All tries failed.
    """
    for delay_s in (*retry_after_s, None):
        try:
            _send(filesystem, path, chunks())
        except (pa.ArrowException, OSError) as error:
            if delay_s is None:
                raise ExecutionError(explain(error)) from error
            logger.warning("%s; trying again in %g s", explain(error), delay_s)
            time.sleep(delay_s)
        else:
            return


def chunks_of(file: IO[bytes] | Any) -> Iterator[bytes]:
    """Yield the rest of an open file piece by piece."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _send(filesystem: fs.FileSystem, path: str, chunks: Iterable[bytes]) -> None:
    stream = filesystem.open_output_stream(path)
    try:
        for chunk in chunks:
            stream.write(chunk)
    except BaseException:
        # Closing makes a file of what was sent so far, and so would forgetting to.
        with contextlib.suppress(pa.ArrowException, OSError):
            stream.close()
        with contextlib.suppress(pa.ArrowException, OSError):
            filesystem.delete_file(path)
        raise
    stream.close()
