"""Compile norms, rotations and routers ahead, for GPUs that are not there; a line of JSON for each.

A program of its own: Triton either interprets or compiles in one process.
Usage: python -m tests.unit.kernels.compile_elementwise CAPABILITY [SHAPE ...]
"""

import json
import sys
from collections.abc import Callable, Iterator

import torch

from raymoe.kernels import gpu_elementwise as kernels
from raymoe.kernels.elementwise import Steps
from raymoe.kernels.gpu_common import Launch
from raymoe.kernels.gpu_experts import gated_product_launch
from tests.unit.kernels.compile_experts import compile_ahead, resources


def norms(hidden: int, dtype: torch.dtype) -> Iterator[Launch]:
    hidden_TH, weight_H = torch.zeros(1, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    yield kernels.rms_norm(hidden_TH, None, weight_H, 1e-6, 1.0, hidden_TH)
    yield kernels.rms_norm(hidden_TH, hidden_TH, weight_H, 1e-6, None, hidden_TH)


def rope(
    sizes: tuple[int, int, int, int], half: int, norm: int, steps: Steps, dtype: torch.dtype
) -> Iterator[Launch]:
    heads, kv_heads, dim, value_dim = sizes
    qkv_TX = torch.zeros(1, heads * dim + kv_heads * (dim + value_dim), dtype=dtype)
    table_PR = torch.zeros(8, half)
    angles = (torch.zeros(1, dtype=torch.int32), table_PR, table_PR)
    norms = (None, None)
    if norm:
        sides = (heads, kv_heads) if norm > 1 else (1, 1)
        norms = tuple(torch.zeros(side * dim, dtype=dtype) for side in sides)
    out = tuple(torch.zeros(1, *size, dtype=dtype) for size in ((heads, dim), (kv_heads, dim)))
    value = torch.zeros(1, kv_heads, value_dim, dtype=dtype)
    yield kernels.qkv_rope(qkv_TX, angles, norms, (*out, value), sizes=sizes, steps=steps)


def latents(dtype: torch.dtype) -> Iterator[Launch]:
    query, row = torch.zeros(1, 128, 192, dtype=dtype), torch.zeros(1, 576, dtype=dtype)
    table_PR = torch.zeros(8, 32)
    angles = (torch.zeros(1, dtype=torch.int32), table_PR, table_PR)
    out = (query, row[:, None], row[:, None, :0])
    norm = torch.zeros(512, dtype=dtype)
    yield kernels.latent_rope(query, row, angles, norm, out, eps=1e-6, is_interleaved=True)


def routers(dtype: torch.dtype) -> Iterator[Launch]:
    for num_experts, top_k in ((8, 2), (128, 8), (512, 10)):
        ids, weights = torch.zeros(1, top_k, dtype=torch.int32), torch.zeros(1, top_k)
        yield kernels.route(torch.zeros(1, num_experts, dtype=dtype), None, ids, weights)
    ids, weights = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(1, 8)
    logits_TE, bias_E = torch.zeros(1, 256, dtype=dtype), torch.zeros(256)
    yield kernels.route(
        logits_TE, bias_E, ids, weights, scoring="sigmoid", scale=2.5, groups=(8, 4), sums_two=True
    )
    yield kernels.route(logits_TE, None, ids, weights, min_sum=0.1, groups=(8, 3))
    yield kernels.route(logits_TE, bias_E, ids, weights, scoring="sigmoid", chooses_by_logits=True)


def choices(dtype: torch.dtype) -> Iterator[Launch]:
    ids_R, draws_R4 = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int64)
    for size in (32_000, 151_936):
        yield kernels.choose(torch.zeros(1, size, dtype=dtype), draws_R4, ids_R)


def products(dtype: torch.dtype) -> Iterator[Launch]:
    gate_TF = torch.zeros(1, 2048, dtype=dtype)
    for gate in ((1.0, 0.0), (1.6, 0.04)):
        yield gated_product_launch(gate_TF, gate_TF, gate)


SHAPES: dict[str, Callable[[torch.dtype], Iterator[Launch]]] = {
    "norm of 2,048": lambda dtype: norms(2048, dtype),
    "norm of 7,168": lambda dtype: norms(7168, dtype),
    "mixtral": lambda dtype: rope((32, 8, 128, 128), 64, 0, Steps(), dtype),
    "qwen3": lambda dtype: rope((32, 4, 128, 128), 64, 1, Steps(), dtype),
    "olmoe": lambda dtype: rope((16, 16, 128, 128), 64, 2, Steps(clip=8.0), dtype),
    "glm-4.5": lambda dtype: rope((96, 8, 128, 128), 32, 0, Steps(), dtype),
    "ernie": lambda dtype: rope((20, 4, 128, 128), 64, 0, Steps(is_interleaved=True), dtype),
    "hunyuan": lambda dtype: rope(
        (32, 8, 128, 128), 64, 1, Steps(is_norm_after_rope=True), dtype
    ),
    "gemma-4": lambda dtype: rope(
        (16, 2, 512, 512), 256, 1, Steps(norms_values=True, norm_offset=0.0), dtype
    ),
    "no rotation": lambda dtype: rope((64, 8, 128, 128), 0, 0, Steps(), dtype),
    "deepseek-v3": latents,
    "routers": routers,
    "products": products,
    "choices": choices,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    capability, names = int(arguments[0]), arguments[1:] or list(SHAPES)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for name in names:
        for dtype in dtypes if capability >= 80 else (torch.float16, torch.float32):
            for launch in SHAPES[name](dtype):
                line = {
                    "shape": name,
                    "kernel": launch.kernel.__name__.removesuffix("_kernel"),
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": 1,
                    **launch.options,
                    **resources(compile_ahead(launch, capability)),
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
