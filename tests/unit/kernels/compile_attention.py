"""Compile the attention kernels ahead, for GPUs that are not there; a line of JSON for each.

A program of its own: Triton either interprets or compiles in one process.
Usage: python -m tests.unit.kernels.compile_attention CAPABILITY [SHAPE ...]
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gpu_attention import Attending, DeviceCache, Scoring, append_launch
from raymoe.kernels.gpu_attention_batch import SPLIT_POSITIONS, AttentionCompute, Tiles
from raymoe.kernels.gpu_common import Launch
from raymoe.kernels.paged_kv import KvLayout, LatentLayout
from tests.unit.kernels.compile_experts import PRODUCTS, compile_ahead, resources


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of a published model.

    Attributes:
        heads: Of queries.
        kv_heads: Of the cache; 0 for latents.
        dim: Of a head; of latents their rank.
        rope_dim: Of latents.
        up-projected: Dimensions of keys and values of the plain form.
    """

    heads: int
    kv_heads: int = 0
    dim: int = 128
    rope_dim: int = 0
    window: int | None = None
    has_sinks: bool = False
    up_projected: tuple[int, int] = (0, 0)


SHAPES = {
    "mixtral": AttentionShape(heads=32, kv_heads=8),
    "phi-3.5-moe, window": AttentionShape(heads=32, kv_heads=8, window=2047),
    "gpt-oss": AttentionShape(heads=64, kv_heads=8, dim=64, window=128, has_sinks=True),
    "glm-4.5-air": AttentionShape(heads=96, kv_heads=8),
    "96 dimensions": AttentionShape(heads=16, kv_heads=16, dim=96),
    "256 dimensions": AttentionShape(heads=16, kv_heads=2, dim=256),
    "512 dimensions": AttentionShape(heads=16, kv_heads=2, dim=512),
    "deepseek-v3": AttentionShape(heads=128, dim=512, rope_dim=64, up_projected=(192, 128)),
}


def launches(shape: AttentionShape, compute: AttentionCompute) -> Iterator[Launch]:
    """All launches of a layer: tokens alone, cut and not, and neighbours."""
    dtype = compute.dtype
    table_SM = torch.zeros(1, 64, dtype=torch.int32)
    tiles_NF = torch.zeros(1, 4, dtype=torch.int32)
    scoring = Scoring(
        scale=0.1,
        sliding_window=shape.window,
        sinks_H=torch.zeros(shape.heads) if shape.has_sinks else None,
    )
    if shape.kv_heads:
        layout = KvLayout(num_kv_heads=shape.kv_heads, head_dim=shape.dim, dtype=dtype)
        memory = torch.zeros(2, *layout.block_shape, dtype=dtype)
        new = torch.zeros(1, shape.kv_heads, shape.dim, dtype=dtype)
        slots = torch.zeros(1, dtype=torch.int64)
        yield append_launch(Projected(new, new, new), slots, memory, layout)
        cache = DeviceCache.of_blocks(memory, layout, table_SM)
        together = cache
    else:
        latent = LatentLayout(rank=shape.dim, rope_dim=shape.rope_dim, dtype=dtype)
        memory = torch.zeros(2, *latent.block_shape, dtype=dtype)
        cache = DeviceCache.of_latents(memory, latent, table_SM)
        keys, values = (torch.zeros(8, shape.heads, dim, dtype=dtype) for dim in shape.up_projected)
        together = DeviceCache.of_rows(keys, values, table_SM[:, :1])
    alone = [Tiles(tiles_NF, 1, positions) for positions in (1, SPLIT_POSITIONS + 1)]
    for tiles in alone if shape.window is None or shape.window > SPLIT_POSITIONS else alone[:1]:
        yield from attending(shape, cache, compute, scoring).launches(tiles)
    yield from attending(shape, together, compute, scoring).launches(
        Tiles(tiles_NF, compute.tile_tokens, 100)
    )


def attending(
    shape: AttentionShape, cache: DeviceCache, compute: AttentionCompute, scoring: Scoring
) -> Attending:
    query, out = (torch.zeros(1, shape.heads, dim, dtype=compute.dtype) for dim in cache.dims)
    return Attending(query_THD=query, cache=cache, out_THV=out, compute=compute, scoring=scoring)


def main(arguments: list[str]) -> None:
    capability, names = int(arguments[0]), arguments[1:] or list(SHAPES)
    dtypes = (torch.float16,) if capability < 80 else (torch.bfloat16, torch.float16)
    for name in names:
        for dtype in (*dtypes, torch.float32):
            dim = SHAPES[name].dim if SHAPES[name].kv_heads else 0
            compute = AttentionCompute.on(divmod(capability, 10), dtype, dim)
            for launch in launches(SHAPES[name], compute):
                compiled = compile_ahead(launch, capability)
                queries = launch.constants.get("Q")
                line = {
                    "shape": name,
                    "kernel": launch.kernel.__name__,
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": 0 if queries is None else queries.rows.value,
                    **launch.options,
                    **resources(compiled),
                    "products": sorted(set(PRODUCTS.findall(compiled.asm["ptx"]))),
                    "copies": "cp.async" in compiled.asm["ptx"],
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
