"""Grouped products of humming-kernels with packed matrices: configurations, compiling, launches.

Of the package only three things are used: `HummingKernel.prepare_kernels`, which writes, compiles
and registers kernels for a layer and tiles that are given; `ops.launch_kernel`; and the path of the
compiler's library. Its modules ask for a GPU, so they are imported where one is.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from raymoe.kernels.humming.packing import BITS, OUTPUTS, PackedLayout, PackedMatrices
from raymoe.kernels.triton_support import OLDEST_CAPABILITY
from raymoe.specs.hardware import AMPERE, HOPPER

PACKAGE, VERSION = "humming-kernels", "0.1.19"
# Its launcher is made for torch's stable interface of C++, which begins here.
OLDEST_TORCH = Version("2.11")
CAPABILITIES = (
    OLDEST_CAPABILITY,
    AMPERE,
    (8, 6),
    (8, 9),
    HOPPER,
)  # those whose machine code was counted
_CODES = {"int4": "uint4", "e2m1": "float4e2m1", "e4m3": "float8e4m3"}
_TYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8e4m3",
    torch.uint8: "float8e8m0",
}

# Neither the number of rows nor that of processors changes the order of a sum: no partial sums in
# memory (stream-K). Rows of an expert follow one another.
COMPUTE_CONFIG = {"gemm_type": "grouped_contiguous", "use_batch_invariant": True}
# Up to so many rows of an expert on average, the tile of that place; the last for all others.
ROWS_OF_TILES = (20, 96)
_ALL_ROWS = 1 << 30
# Tiles that share a block of outputs before the next block: each expert's weights are read once
# from memory for so many tiles.
_TOGETHER = 4


def why_not_here(capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why no product runs on a GPU of this capability with this installation, or None."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install 'raymoe[cuda]'"
    if found != VERSION:
        return f"{PACKAGE} is {found}; this version of raymoe calls {VERSION}"
    if Version(torch.__version__) < OLDEST_TORCH:
        return f"torch is {torch.__version__}; the launcher of {PACKAGE} needs {OLDEST_TORCH}"
    if capability not in CAPABILITIES:
        return f"tiles are known for other compute capabilities than {capability}"
    if dtype == torch.bfloat16 and capability == OLDEST_CAPABILITY:
        return "Turing has no bfloat16"
    return None


def layer_config(
    layout: PackedLayout, num_experts: int, capability: tuple[int, int]
) -> dict[str, object]:
    """Return `LayerConfig` of the package for one matrix of each expert."""
    outputs, inputs = layout.shape
    dtype = _TYPES[layout.dtype]
    config: dict[str, object] = {
        "sm_version": 10 * capability[0] + capability[1],
        "shape_n": layout.padded_outputs,
        "shape_k": inputs,
        "pad_shape_n": layout.padded_outputs - outputs,
        "num_experts": num_experts,
        "a_dtype": dtype,
        "b_dtype": _CODES[layout.kind],
        "bs_dtype": _TYPES[layout.scales],
        "c_dtype": dtype,
        "weight_scale_group_size": layout.group_size,
        "has_zero_point": layout.has_zeros,
        "has_bias": layout.has_bias,
    }
    if layout.block_rows > 1:
        config["weight_scale_group_size_n"] = layout.block_rows
    if layout.has_tensor_scale:
        config["weight_scale_2_type"] = "tensor"
    return config


def tile_configs(layout: PackedLayout, capability: tuple[int, int]) -> list[dict[str, object]]:
    """Return three `TuningConfig` of the package, for few, some and many rows of an expert.

    Each is one that its heuristics choose for such rows, but for the order of tiles.
    """
    outputs = 2 * OUTPUTS if layout.padded_outputs % (2 * OUTPUTS) == 0 else OUTPUTS
    if capability == HOPPER:
        return [_hopper_tile(rows, outputs) for rows in (24, 80, 144)]
    if capability == OLDEST_CAPABILITY:
        return [_turing_tile(rows, outputs, layout) for rows in (16, 32, 64)]
    stages = 5 if capability == AMPERE else 3  # 163 and 99 KiB of shared memory
    return [_tile(rows, outputs, num_stages=stages) for rows in (16, 32, 96)]


def _tile(rows: int, outputs: int, **others: object) -> dict[str, object]:
    """Up to 32 rows every warp has all of them, so that each code is decoded once."""
    warp = (rows, 32) if rows <= 32 else (min(rows, 48), 64)
    return {
        "mma_type": "mma",
        "block_shape": (rows, outputs, 32),
        "warp_shape": (*warp, 32),
        "use_stream_k": False,
        "raster_group_m": _TOGETHER,
        **others,
    }


def _turing_tile(rows: int, outputs: int, layout: PackedLayout) -> dict[str, object]:
    is_wide = BITS[layout.kind] > 4 and rows > 16
    tile = _tile(rows, outputs, num_stages=2 if is_wide else 3)
    if rows > 32:
        tile["warp_shape"] = (rows, 64, 32)
    return {**tile, "num_ctas_per_sm": 2, "output_chunk_rows": 32}


def _hopper_tile(rows: int, outputs: int) -> dict[str, object]:
    """Four warps of their own load with TMA."""
    return {
        "mma_type": "wgmma",
        "block_shape": (rows, outputs, 64),
        "warp_shape": (rows, 32, 64),
        "use_stream_k": False,
        "raster_group_m": _TOGETHER,
        "num_stages": 4,
        "use_warp_spec": True,
        "use_tma": True,
    }


def intervals(tiles: list[dict[str, object]], num_experts: int) -> list[list[object]]:
    """Return which tile multiplies how many rows: above the first number, up to the second."""
    ends = [rows * num_experts for rows in ROWS_OF_TILES]
    begins = [0, *ends]
    return [
        [*bounds, tile] for *bounds, tile in zip(begins, [*ends, _ALL_ROWS], tiles, strict=True)
    ]


def product_arguments(
    packed: PackedMatrices, input_RI: Tensor, offsets_E1: Tensor, out_RO: Tensor
) -> dict[str, Tensor | None]:
    """Return the tensors of a launch by their names in `ops.launch_kernel`.

    Args:
        input_RI: Rows of expert 0, then of expert 1, ...
        offsets_E1: int32, the first row of each expert and the end of the last.
        out_RO: Those rows of results; others are not written.
    """
    layout = packed.layout
    outputs, inputs = layout.shape
    padded, num_experts = layout.padded_outputs, len(packed.codes)
    groups = -(-inputs // layout.group_size)
    sizes: Mapping[str, tuple[Tensor | None, torch.dtype, tuple[int, ...]]] = {
        "inputs": (input_RI, layout.dtype, (len(input_RI), inputs)),
        "outputs": (out_RO, layout.dtype, (len(input_RI), outputs)),
        "expert_layout": (offsets_E1, torch.int32, (num_experts + 1,)),
        "weight": (
            packed.codes,
            torch.int32,
            (num_experts, inputs // 16, padded * BITS[layout.kind] // 2),
        ),
        "weight_scale": (
            packed.scales,
            layout.scales,
            (num_experts, groups, padded // layout.block_rows),
        ),
        "zero_point": (packed.zeros, torch.int32, (num_experts, groups, padded // 8)),
        "weight_scale_2": (packed.tensor_scale_E, torch.float32, (num_experts,)),
        "bias": (packed.bias_EP, layout.dtype, (num_experts, padded)),
    }
    for name, (tensor, dtype, size) in sizes.items():
        if tensor is not None:
            assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
            assert tensor.shape == size, f"{name} is {[*tensor.shape]}, not {[*size]}"
            assert tensor.is_contiguous(), f"{name} has strides {tensor.stride()}"
    arguments = {name: tensor for name, (tensor, _, _) in sizes.items()}
    if layout.scales == torch.uint8:
        arguments["weight_scale"] = packed.scales.view(torch.float8_e8m0fnu)
    return arguments


class GroupedProduct:
    """Products of rows with the matrices of their experts, in the type of the rows.

    Sums are in float32. Scales are rounded to 16 bits and multiplied into the weights, which are
    rounded again: exact for MXFP4 and NVFP4. A float32 of the whole matrix multiplies the sum.
    """

    def __init__(self, packed: PackedMatrices) -> None:
        """Compile three kernels, or find them in the package's cache; seconds each."""
        device = packed.codes.device
        capability = torch.cuda.get_device_capability(device)
        num_experts = len(packed.codes)
        self._packed = packed
        self._kernels = _prepared(
            layer_config(packed.layout, num_experts, capability),
            intervals(tile_configs(packed.layout, capability), num_experts),
            device,
        )

    def __call__(
        self, input_RI: Tensor, offsets_E1: Tensor, expected_rows: int, out_RO: Tensor
    ) -> None:
        """Write the products; nothing waits for the device.

        Args:
            expected_rows: About how many rows there are, from which the tile is chosen.
        """
        from humming import ops  # noqa: PLC0415 - needs a GPU

        ops.launch_kernel(
            configs=self._kernels,
            valid_shape_m=max(expected_rows, 1),
            **product_arguments(self._packed, input_RI, offsets_E1, out_RO),
        )


def _prepared(layer: Mapping[str, object], tiles: list[list[object]], device: torch.device) -> Any:
    with _variable("HUMMING_DISABLE_PARALLEL_BUILD", "1"):  # importing starts no processes
        from humming.kernel.humming import HummingKernel  # noqa: PLC0415 - needs a GPU
        from humming.utils.nvrtc import get_nvrtc_library_path  # noqa: PLC0415 - needs a GPU
    folder = str(Path(get_nvrtc_library_path()).parent)
    with _variable("LD_LIBRARY_PATH", folder, separator=os.pathsep):
        return HummingKernel.prepare_kernels(layer, COMPUTE_CONFIG, tiles, device)


@contextmanager
def _variable(name: str, value: str, separator: str = "") -> Iterator[None]:
    """Set a variable of the environment for processes that are started meanwhile.

    The compiler is such a process. NVIDIA's libnvrtc 13 does not look for the second half of itself
    where it lies; the linker of this process read its path when it started.
    """
    variables = os.environ  # noqa: TID251 - of the compiler and the linker, no settings of ours
    before = variables.get(name)
    variables[name] = value + separator + before if separator and before else value
    try:
        yield
    finally:
        if before is None:
            del variables[name]
        else:
            variables[name] = before
