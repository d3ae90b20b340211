"""Compile attention to compressed entries ahead, for GPUs that are not there; lines of JSON.

A program of its own: Triton either interprets or compiles in one process.
Usage: python -m tests.unit.kernels.compile_compressed CAPABILITY [SHAPE ...]
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymoe.kernels.gpu_attention_batch import (
    COMPRESSED_FIELDS,
    AttentionCompute,
    CompressedTokens,
)
from raymoe.kernels.gpu_common import Launch
from raymoe.kernels.gpu_compressed import attend_launch
from raymoe.kernels.paged_kv import CompressedLayout
from tests.unit.kernels.compile_experts import PRODUCTS, compile_ahead, resources


@dataclass(frozen=True, kw_only=True)
class CompressedShape:
    heads: int
    width: int
    window: int = 128
    ratio: int | None = None
    num_chosen: int = 0


SHAPES = {
    "v4-flash, window": CompressedShape(heads=64, width=512),
    "v4-flash, 4": CompressedShape(heads=64, width=512, ratio=4),
    "v4-flash, chosen": CompressedShape(heads=64, width=512, ratio=4, num_chosen=512),
    "v4-flash, 128": CompressedShape(heads=64, width=512, ratio=128),
    "v4-pro, 4": CompressedShape(heads=128, width=512, ratio=4),
    "narrow": CompressedShape(heads=8, width=72, ratio=4),
}


def launches(shape: CompressedShape, compute: AttentionCompute) -> Iterator[Launch]:
    layout = CompressedLayout(
        width=shape.width, window=shape.window, ratio=shape.ratio, num_sums=0, dtype=compute.dtype
    )
    size = 64 * layout.block_bytes + layout.sequence_bytes
    entries_NEW, rows_MRW, _ = layout.views(torch.zeros(size, dtype=torch.uint8))
    query_THW = torch.zeros(1, shape.heads, shape.width, dtype=compute.dtype)
    chosen_TK = torch.zeros(1, shape.num_chosen, dtype=torch.int32)
    yield attend_launch(
        query_THW,
        query_THW[:, 0],
        (entries_NEW, rows_MRW),
        CompressedTokens(
            compute=compute,
            tokens_TF=torch.zeros(1, COMPRESSED_FIELDS, dtype=torch.int32),
            table_SM=torch.zeros(1, 64, dtype=torch.int32),
        ),
        query_THW,
        layout=layout,
        scale=0.1,
        sinks_H=torch.zeros(shape.heads),
        chosen_TK=chosen_TK if shape.num_chosen else None,
    )


def main(arguments: list[str]) -> None:
    capability, names = int(arguments[0]), arguments[1:] or list(SHAPES)
    for name in names:
        for dtype in (torch.bfloat16, torch.float16):
            compute = AttentionCompute.on(divmod(capability, 10), dtype)
            for launch in launches(SHAPES[name], compute):
                compiled = compile_ahead(launch, capability)
                line = {
                    "shape": name,
                    "kernel": launch.kernel.__name__.removesuffix("_kernel"),
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": launch.constants["K"].rows.value,
                    **launch.options,
                    **resources(compiled),
                    "products": sorted(set(PRODUCTS.findall(compiled.asm["ptx"]))),
                    "copies": "cp.async" in compiled.asm["ptx"],
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
