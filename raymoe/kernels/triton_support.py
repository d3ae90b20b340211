"""The GPUs that kernels in Triton run on. This module does not import Triton."""

OLDEST_CAPABILITY = (7, 5)  # compute capability of Turing
# Triton no longer uses the tensor cores of Turing and Volta (3.9 warns).
TENSOR_CORES_SINCE = (8, 0)
