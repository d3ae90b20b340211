"""How many threads the kernels use; set explicitly, since Ray sets OMP_NUM_THREADS to 1."""

import functools
import os

import torch

from raymoe import _native


def set_num_threads(num_threads: int, num_torch_threads: int | None = None) -> None:
    """Let the native kernels and torch use this many threads.

    Torch keeps the number for each thread of Python: call this in the thread that computes.

    Args:
        num_threads: Of the native kernels.
        num_torch_threads: Of torch; the same by default.
    """
    _forget_threads_in_forks()
    torch.set_num_threads(num_torch_threads or num_threads)
    if _native.num_threads() != num_threads:
        _native.set_num_threads(num_threads)


@functools.cache
def _forget_threads_in_forks() -> None:
    """Let a fork end: torch joins threads that are not there unless it is asked for its pool."""
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
