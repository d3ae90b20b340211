"""Compile the kernels of states ahead, for GPUs that are not there; a line of JSON for each.

A program of its own: Triton either interprets or compiles in one process.
Usage: python -m tests.unit.kernels.compile_state CAPABILITY [SHAPE ...]
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymoe.kernels.gpu_common import Launch
from raymoe.kernels.gpu_state.kernels import causal_conv_launches, scan_launch
from tests.unit.kernels.compile_experts import compile_ahead, resources


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """Heads of a published model; no heads where there is a convolution alone."""

    heads: tuple[int, int, int, int] | None  # groups, heads, K, V
    taps: int = 4
    channels: int = 0
    has_channel_decays: bool = False
    is_delta: bool = True
    has_bias: bool = False


SHAPES = {
    "qwen3.5": StateShape(heads=(16, 32, 128, 128)),
    "kimi-linear": StateShape(heads=(32, 32, 128, 128), has_channel_decays=True),
    "granite-4": StateShape(heads=(1, 48, 128, 64), is_delta=False, has_bias=True),
    "nemotron-3": StateShape(heads=(8, 64, 128, 64), is_delta=False, has_bias=True),
    "lfm2": StateShape(heads=None, taps=3, channels=2048),
    "256 x 256": StateShape(heads=(4, 4, 256, 256)),
    "256 x 256 channels": StateShape(heads=(4, 4, 256, 256), has_channel_decays=True),
    "24 x 40": StateShape(heads=(1, 2, 24, 40)),
}


def launches(shape: StateShape, dtype: torch.dtype) -> Iterator[Launch]:
    sequences_SF = torch.zeros(1, 3, dtype=torch.int32)
    channels = shape.channels
    if shape.heads is not None:
        groups, heads, key_dim, value_dim = shape.heads
        decays = (1, heads, key_dim) if shape.has_channel_decays else (1, heads)
        key, value = (
            torch.zeros(1, *size, dtype=dtype) for size in ((groups, key_dim), (heads, value_dim))
        )
        for stored in (torch.float32, torch.bfloat16):
            yield scan_launch(
                key,
                key,
                value,
                torch.zeros(decays),
                torch.zeros(1, heads),
                torch.zeros(1, heads, key_dim, value_dim, dtype=stored),
                sequences_SF,
                value,
                scale=0.1,
                delta=shape.is_delta,
                normalize=shape.is_delta,
            )
        channels = 2 * groups * key_dim + heads * value_dim
    inputs = torch.zeros(1, channels, dtype=dtype)
    yield from causal_conv_launches(
        inputs,
        torch.zeros(shape.taps, channels).t(),
        torch.zeros(channels) if shape.has_bias else None,
        torch.zeros(1, shape.taps - 1, channels, dtype=dtype),
        (sequences_SF, torch.zeros(1, dtype=torch.int32)),
        inputs,
        is_silu=shape.heads is not None,
    )


def main(arguments: list[str]) -> None:
    capability, names = int(arguments[0]), arguments[1:] or list(SHAPES)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for name in names:
        for dtype in dtypes if capability >= 80 else (torch.float16, torch.float32):
            for launch in launches(SHAPES[name], dtype):
                line = {
                    "shape": name,
                    "kernel": launch.kernel.__name__.removesuffix("_kernel"),
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": launch.constants["C"].rows.value if "C" in launch.constants else 1,
                    **launch.options,
                    **resources(compile_ahead(launch, capability)),
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
