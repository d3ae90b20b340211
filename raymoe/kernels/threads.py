"""How many threads the kernels use; set explicitly, since Ray sets OMP_NUM_THREADS to 1."""

import torch

from raymoe import _native


def set_num_threads(num_threads: int) -> None:
    """Let torch and the native kernels use this many threads.

    Torch keeps the number for each thread of Python: call this in the thread that computes.
    """
    torch.set_num_threads(num_threads)
    if _native.num_threads() != num_threads:
        _native.set_num_threads(num_threads)
