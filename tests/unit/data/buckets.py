"""A bucket in memory, which can be away, slow to answer or watched."""

import threading
import uuid
from collections import Counter

from fsspec.implementations.memory import MemoryFileSystem

from raymoe.data.bucket import Bucket


class Store(MemoryFileSystem):
    """Of one test.

    Attributes:
        failures: How often the next requests of a kind fail: "put" before, "answer" after it.
        asked: How often a kind of request was made.
        num_read_bytes: Of all reads.
    """

    store = {}  # noqa: RUF012 - as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False

    def __init__(self):
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.failures, self.asked = Counter(), Counter()
        self.num_read_bytes = 0
        self.guard = threading.RLock()

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        with self.guard:
            self._ask("put")
            super().pipe_file(path, value, mode=mode, **kwargs)
            self._ask("answer")

    def cat_file(self, path, *, start=None, end=None, **kwargs):  # s3fs has them elsewhere
        with self.guard:
            self._ask("read")
            data = super().cat_file(path, start, end, **kwargs)
            self.num_read_bytes += len(data)
            return data

    def find(self, path, **kwargs):
        with self.guard:
            self._ask("list")
            return super().find(path, **kwargs)

    def _ask(self, kind):
        self.asked[kind] += 1
        if self.failures[kind]:
            self.failures[kind] -= 1
            raise TimeoutError(f"{kind}: the store is away")


def make_bucket():
    path = f"/jobs/{uuid.uuid4().hex}"
    return Bucket(Store(), path, f"s3:/{path}")
