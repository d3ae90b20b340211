"""Compile the expert kernels ahead, for GPUs that are not there; a line of JSON for each.

A program of its own: Triton either interprets or compiles in one process.
Usage: python -m tests.unit.kernels.compile_experts CAPABILITY [SHAPE ...]
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from raymoe.kernels.cpu_experts import ExpertGroup
from raymoe.kernels.gpu_common import EXACT, Launch
from raymoe.kernels.gpu_experts import DecodedExperts, GroupedExperts
from raymoe.kernels.gpu_experts_kernels import add_launch, in_planes
from raymoe.kernels.gpu_experts_layout import Compute, TileTable
from tests.unit.kernels.expert_shapes import NUM_EXPERTS, SHAPES, ExpertShape

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TOKENS_PER_EXPERT = (1, 64, 128)  # decoding little, and each larger default tile
PRODUCTS = re.compile(r"\b(wgmma\.mma_async\S*|mma\.sync\S*|fma\.rn\.f32)")


def compile_ahead(launch: Launch, capability: int) -> Any:
    """As `Launch.run` would compile it for a GPU of this capability (75: Turing)."""
    tensors = {name: each for name, each in launch.arguments.items() if isinstance(each, Tensor)}
    signature = dict.fromkeys(launch.arguments, "i32")
    signature |= {name: POINTERS[tensor.dtype] for name, tensor in tensors.items()}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    names = launch.kernel.arg_names
    source = ASTSource(
        fn=launch.kernel,
        signature={name: signature[name] for name in names},
        constexprs=dict(launch.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in tensors},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={**launch.options, **EXACT})


def resources(compiled: Any) -> dict[str, int]:
    """Registers, spilled bytes and the like of a compiled kernel, as NVIDIA's tool reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return {
        "registers": found["REG"],
        "spilled_bytes": found["LOCAL"] + found["STACK"],
        "shared_bytes": compiled.metadata.shared,
    }


def launches(shape: ExpertShape, capability: int, tokens_per_expert: int) -> Iterator[Launch]:
    """All launches of a layer."""
    tiles = TileTable(capability=divmod(capability, 10))
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    matrices, compute = shape.matrices(dtype), Compute.on(tiles, dtype)
    experts = GroupedExperts(matrices, compute=compute, clamp=shape.clamp)
    num_tokens = max(tokens_per_expert * NUM_EXPERTS // shape.top_k, 1)
    ids_TK = torch.zeros(num_tokens, shape.top_k, dtype=torch.int32)
    routing = (ids_TK, torch.zeros(ids_TK.shape))
    align, groups = experts.align(routing)
    hidden_TH = torch.zeros(num_tokens, shape.hidden, dtype=dtype)
    rows = range(ids_TK.numel())
    hidden_TX = in_planes(hidden_TH, matrices.layouts()[0].unit_inputs)
    gate_up, product_BX = experts.gate_up(hidden_TX, groups, rows)
    down, rows_RH = experts.down(product_BX, groups, rows)
    group = ExpertGroup(range(NUM_EXPERTS), torch.zeros(num_tokens, shape.hidden))
    add = add_launch(rows_RH, rows, routing, groups.places_TK, group)
    yield from (align, gate_up, down, experts.combine(rows_RH, groups)[0], add)
    if shape.stored is not None:
        one_by_one = DecodedExperts(matrices, compute=compute, activation="silu")
        yield one_by_one.ffns[0].gate.launch(0, shape.wide)[0]


def main(arguments: list[str]) -> None:
    capability, names = int(arguments[0]), arguments[1:] or list(SHAPES)
    for name in names:
        for tokens in TOKENS_PER_EXPERT:
            for launch in launches(SHAPES[name], capability, tokens):
                compiled = compile_ahead(launch, capability)
                line = {
                    "shape": name,
                    "kernel": launch.kernel.__name__,
                    "rows": launch.constants.get("ROWS", 0),
                    **launch.options,
                    **resources(compiled),
                    "products": sorted(set(PRODUCTS.findall(compiled.asm["ptx"]))),
                    "copies": "cp.async" in compiled.asm["ptx"],
                }
                sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
