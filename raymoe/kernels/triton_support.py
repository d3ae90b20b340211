"""The GPUs that kernels in Triton run on. This module does not import Triton."""

from raymoe.specs.hardware import AMPERE

OLDEST_CAPABILITY = (7, 5)  # compute capability of Turing
# Triton no longer uses the tensor cores of Turing and Volta (3.9 warns).
TENSOR_CORES_SINCE = AMPERE


def shared_memory_kib(capability: tuple[int, int]) -> int:
    """Shared memory of a multiprocessor, for all programs on it.

    A program has 1 KiB less at most. Source: CUDA C++ Programming Guide, compute capabilities.
    """
    if capability[0] in (9, 10):  # Hopper, and Blackwell of data centres
        return 228
    if capability in ((8, 0), (8, 7)):
        return 164
    return 64 if capability == OLDEST_CAPABILITY else 100


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()
