"""Count the machine code of the expert kernels with default tiles; a line of JSON for each.

A program of its own: Triton either interprets or compiles in one process. Expert sizes are those of
DeepSeek-V3 in every format.
Usage: python -m tests.unit.kernels.count_experts CAPABILITY [TOKENS_PER_EXPERT]
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymoe.kernels.triton_support import TENSOR_CORES_SINCE
from raymoe.specs.weight_format import Fp8Block, Mxfp4, Mxfp8, Nvfp4, PackedInt4
from tests.unit.kernels.compile_experts import compile_ahead, launches, resources
from tests.unit.kernels.expert_shapes import ExpertShape
from tests.unit.kernels.machine_code import (
    FLOAT32_LANES,
    LANES,
    MULTIPLY_ADDS,
    main_loop,
)

FORMATS = {
    "bfloat16": None,
    "FP8": Fp8Block(),
    "MXFP8": Mxfp8(),
    "MXFP4": Mxfp4(),
    "NVFP4": Nvfp4(),
    "INT4": PackedInt4(group_size=32),
    "INT4, zero points": PackedInt4(group_size=128, has_zero_points=True),
}


def main(arguments: list[str]) -> None:
    capability, tokens = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 256
    for name, stored in FORMATS.items():
        shape = ExpertShape(hidden=7168, wide=2048, top_k=8, stored=stored)
        for launch in launches(shape, capability, tokens):
            if launch.kernel.__name__ not in ("gate_up_kernel", "down_kernel"):
                continue
            compiled = compile_ahead(launch, capability)
            line = {
                "shape": name,
                "kernel": launch.kernel.__name__,
                "outputs": launch.constants["OUTPUTS"],
                "rows": launch.constants["ROWS"],
                **launch.options,
                **resources(compiled),
                **_counted(compiled, capability, launch.constants["ROWS"], launch.options),
            }
            sys.stdout.write(json.dumps(line) + "\n")


def _counted(
    compiled: Any, capability: int, rows: Any, options: Mapping[str, int]
) -> dict[str, object]:
    has_tensor_cores = divmod(capability, 10) >= TENSOR_CORES_SINCE
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        loop = main_loop(Path(file.name), has_tensor_cores=has_tensor_cores)
    rate = MULTIPLY_ADDS[capability] if has_tensor_cores else FLOAT32_LANES
    clocks = loop.busy_clocks(options["num_warps"], rate)
    return {
        "clocks": [round(each) for each in clocks],
        "barriers": loop.barriers,
        "spilled_in_loop": loop.local,
        # A weight is multiplied once with each row.
        "alu_per_weight": round(loop.alu * LANES * rows / loop.multiply_adds, 1),
        "tensor_share": round(clocks[1] / max(clocks), 2),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
