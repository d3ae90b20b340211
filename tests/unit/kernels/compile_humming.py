"""Compile products of humming-kernels ahead, for GPUs that are not there; a line of JSON for each.

A program of its own, because the package asks for a GPU: of its device, of torch for the current
one, of the launcher to load what was compiled. Those questions are answered here; the rest is as
with a GPU, from the configuration to the compiler's process.
Usage: python -m tests.unit.kernels.compile_humming CAPABILITY
"""

import contextlib
import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from raymoe.kernels.humming import products
from raymoe.kernels.humming.packing import PackedLayout
from tests.unit.kernels.machine_code import LANES, MULTIPLY_ADDS, loops

NUM_EXPERTS = 8
_CU13 = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include/nvrtc.h"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def layouts(dtype: torch.dtype) -> dict[str, PackedLayout]:
    common = {"dtype": dtype, "has_zeros": False, "has_tensor_scale": False, "has_bias": False}
    four_bits = {"block_rows": 1, **common}
    wide, narrow = (1536, 2048), (2880, 2880)
    return {
        "fp8": PackedLayout(
            kind="e4m3", shape=wide, scales=F32, group_size=128, block_rows=128, **common
        ),
        "mxfp4": PackedLayout(
            kind="e2m1",
            shape=narrow,
            scales=torch.uint8,
            group_size=32,
            **four_bits | {"has_bias": True},
        ),
        "nvfp4": PackedLayout(
            kind="e2m1",
            shape=wide,
            scales=torch.float8_e4m3fn,
            group_size=16,
            **four_bits | {"has_tensor_scale": True},
        ),
        "int4": PackedLayout(kind="int4", shape=wide, scales=dtype, group_size=32, **four_bits),
        "int4 zeros": PackedLayout(
            kind="int4",
            shape=wide,
            scales=dtype,
            group_size=128,
            **four_bits | {"has_zeros": True},
        ),
    }


def pretend(capability: int) -> list[Any]:
    """Answer the package's questions; kernels are kept in the list that is returned."""
    torch.version.cuda = "13.0" if _CU13.is_file() else "12.9"
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda _: contextlib.nullcontext()
    import humming.utils.device  # noqa: PLC0415 - asks torch for its version of CUDA

    info = SimpleNamespace(
        index=0,
        is_ppu=False,
        sm_version=capability,
        sm_major=capability // 10,
        max_registers_per_sm=65536,
    )
    humming.utils.device._extension = SimpleNamespace(_DeviceInfo=lambda _: info)
    from humming.kernel.humming import HummingKernel  # noqa: PLC0415

    kernels: list[Any] = []

    def keep(kernel: Any) -> None:
        kernel.kernel_id = len(kernels)
        kernels.append(kernel)

    HummingKernel.register_kernel = keep
    return kernels


def main(capability: int) -> None:
    kernels = pretend(capability)
    dtype = F16 if capability < 80 else BF16
    pair = divmod(capability, 10)
    for name, layout in layouts(dtype).items():
        tiles = products.tile_configs(layout, pair)
        found = products._prepared(
            products.layer_config(layout, NUM_EXPERTS, pair),
            products.intervals(tiles, NUM_EXPERTS),
            torch.device("cuda", 0),
        )
        for (_, _, number, _), tile in zip(found.view(-1, 4).tolist(), tiles, strict=True):
            line = {"format": name, **_counted(kernels[number], tile, capability)}
            sys.stdout.write(json.dumps(line) + "\n")


def _counted(kernel: Any, tile: dict[str, Any], capability: int) -> dict[str, object]:
    """Instructions and clocks of an iteration of all warps that multiply; loading ones are few."""
    rows, outputs, inputs = tile["block_shape"]
    warp_rows, warp_outputs, _ = tile["warp_shape"]
    warps = rows // warp_rows * (outputs // warp_outputs)
    stages = tile["num_stages"]
    found = [
        (each, each.multiply_adds * warps / (rows * outputs))
        for each in loops(Path(kernel.kernel_filename))
    ]
    loop, steps = next(each for each in found if each[1] in {stages * inputs, inputs, 2 * inputs})
    issue, tensor, shared = loop.busy_clocks(warps, MULTIPLY_ADDS[capability])
    return {
        "rows": rows,
        "shared_bytes": kernel.estimated_smem_size,
        "alu_per_weight": round(loop.alu * LANES / (warp_outputs * steps), 2),
        "issue_clocks": issue,
        "tensor_clocks": tensor,
        "shared_clocks": shared,
        "local": loop.local,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
