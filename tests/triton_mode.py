"""Where kernels in Triton are tested: in its interpreter without a GPU, on the GPU with one.

Triton decides when it is imported, for the whole process: `conftest` calls `choose` before
anything else can import it.
"""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# Parameters of a test: the interpreter works on host memory.
DEVICES = [
    pytest.param(
        "cpu",
        id="interpreter",
        marks=pytest.mark.skipif(HAS_GPU, reason="there is a GPU: -m gpu runs this test on it"),
    ),
    pytest.param(
        "cuda",
        id="gpu",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device"),
        ],
    ),
]


def choose() -> None:
    """Interpret kernels in this process if there is no GPU."""
    if not HAS_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
