"""Compile the kernels of several streams ahead, for GPUs that are not there; JSON lines.

A program of its own: Triton either interprets or compiles in one process.
Usage: python -m tests.unit.kernels.compile_streams CAPABILITY
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton.language as tl

from raymoe.kernels import gpu_gated_streams as gated
from raymoe.kernels import gpu_streams as kernels
from raymoe.kernels.gpu_common import TRITON_TYPES, Launch
from raymoe.kernels.streams import MixerWeights
from raymoe.specs.streams import StreamsSpec
from tests.unit.kernels.compile_experts import compile_ahead, resources

SPEC = StreamsSpec(count=4, eps=1e-6, norm_eps=1e-5, sinkhorn_iterations=20)


def launches(hidden: int, dtype: torch.dtype) -> Iterator[Launch]:
    hidden_TX, delta_TH = (torch.zeros(1, size, dtype=dtype) for size in (4 * hidden, hidden))
    matrix_FX, vector_F = torch.zeros(24, 4 * hidden, dtype=dtype), torch.zeros(24)
    weights, logits_TF = MixerWeights(matrix_FX, vector_F, vector_F), torch.zeros(1, 24)
    launch = kernels.stream_logits(hidden_TX, matrix_FX, weights, logits_TF, 1e-5)
    dot = TRITON_TYPES[dtype] if dtype != torch.float32 else tl.float32
    launch.constants["DOT"] = dot  # as on a GPU
    yield launch
    yield kernels.read_streams(hidden_TX, logits_TF, delta_TH, SPEC)
    yield kernels.add_to_streams(hidden_TX, delta_TH, logits_TF, SPEC)
    weight_X, gates_TX = hidden_TX[0], torch.zeros_like(hidden_TX)
    yield gated.norm_streams(hidden_TX, weight_X, gates_TX, 4, 1e-6)
    yield gated.read_gated(hidden_TX, gates_TX, delta_TH, 4)
    yield gated.add_gated(hidden_TX, delta_TH, logits_TF, 4)
    unmixed = replace(SPEC, sinkhorn_iterations=None)
    yield kernels.add_to_streams(hidden_TX, delta_TH, logits_TF, unmixed)


def main(capability: int) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for dtype in dtypes if capability >= 80 else (torch.float16, torch.float32):
        for launch in launches(4096, dtype):
            line = {
                "shape": "streams of 4,096",
                "kernel": launch.kernel.__name__.removesuffix("_kernel"),
                "dtype": str(dtype).removeprefix("torch."),
                "rows": 1,
                **launch.options,
                **resources(compile_ahead(launch, capability)),
            }
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
