"""Count the machine code of the expert kernels with default tiles; a line of JSON for each.

A program of its own: Triton either interprets or compiles in one process. Expert sizes are those of
DeepSeek-V3 in every format.
Usage: python -m tests.unit.kernels.count_experts CAPABILITY [TOKENS_PER_EXPERT]
"""

import json
import sys

from raymoe.specs.weight_format import Fp8Block, Mxfp4, Mxfp8, Nvfp4, PackedInt4
from tests.unit.kernels.compile_experts import compile_ahead, launches, resources
from tests.unit.kernels.expert_shapes import ExpertShape
from tests.unit.kernels.machine_code import count_loop

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
            compiled, warps = compile_ahead(launch, capability), launch.options["num_warps"]
            loop = count_loop(compiled.asm["cubin"], capability, warps)
            line = {
                "shape": name,
                "kernel": launch.kernel.__name__,
                "outputs": launch.constants["OUTPUTS"],
                "rows": launch.constants["ROWS"],
                **launch.options,
                **resources(compiled),
                "clocks": [round(each) for each in (loop.issue, loop.tensor, loop.shared)],
                "barriers": loop.barriers,
                "spilled_in_loop": loop.local,
                "alu_per_weight": round(loop.alu_per_weight(launch.constants["ROWS"]), 1),
                "tensor_share": round(loop.tensor_share, 2),
            }
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
