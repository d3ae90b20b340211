"""Jobs of the expert kernels on codes, in the formats that checkpoints are stored in.

The codes are random bits: what they stand for takes no part in the time.
"""

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix
from raymoe.codecs.stored import TORCH_DTYPES
from raymoe.kernels.cpu_experts import Experts, make_experts
from raymoe.kernels.packed_experts import packed_experts_bytes
from raymoe.measure.experts import (
    MIN_WEIGHT_BYTES,
    ExpertsShape,
    allocate_huge_pages,
    experts_job,
)
from raymoe.measure.timing import KernelJob
from raymoe.specs.weight_format import Awq, Fp8Block, Mxfp4, PackedInt4, Piece, WeightFormat
from raymoe.units import ceil_div

# The formats of GLM and MiniMax, Kimi, Qwen's AWQ and gpt-oss.
FORMATS: tuple[WeightFormat, ...] = (Fp8Block(), PackedInt4(32), Awq(128), Mxfp4())
SCALE, EXPONENT = 0.01, 120  # as float and as E8M0


def quantised_experts_job(shape: ExpertsShape, num_tokens: int, stored: WeightFormat) -> KernelJob:
    """The job of `measure.experts.experts_job` with experts in a stored format.

    Args:
        shape: Sizes.
        num_tokens: Tokens of a call.
        stored: The format.
    """
    return experts_job(
        shape,
        num_tokens,
        make_quantised_layers(shape, stored),
        kernel=f"experts in {stored.name}",
        expert_bytes=_expert_bytes(shape, stored),
    )


def make_quantised_layers(shape: ExpertsShape, stored: WeightFormat) -> list[Experts]:
    """Layers of random experts, each in memory of its own; together no cache holds them."""
    layer_bytes = shape.num_experts * _expert_bytes(shape, stored)
    wide, high = (shape.expert_size, shape.hidden_size), (shape.hidden_size, shape.expert_size)
    gate_up, down = _random_matrix(stored, wide), _random_matrix(stored, high)
    return [
        make_experts(
            [gate_up] * shape.num_experts,
            [gate_up] * shape.num_experts,
            [down] * shape.num_experts,
            activation="silu",
            allocate=allocate_huge_pages,
            dtype=torch.bfloat16,
        )
        for _ in range(ceil_div(MIN_WEIGHT_BYTES, layer_bytes))
    ]


def _expert_bytes(shape: ExpertsShape, stored: WeightFormat) -> int:
    sizes = (shape.hidden_size, shape.expert_size)
    return packed_experts_bytes(1, *sizes, gate_up=stored, down=stored)


def _random_matrix(stored: WeightFormat, shape: tuple[int, int]) -> StoredMatrix:
    pieces = {piece.name: _random_piece(piece) for piece in stored.pieces(*shape)}
    return StoredMatrix(format=stored, shape=shape, pieces=pieces)


def _random_piece(piece: Piece) -> Tensor:
    dtype = TORCH_DTYPES[piece.dtypes[0]]
    if piece.name == "scales":
        value = SCALE if dtype.is_floating_point else EXPONENT
        return torch.full(piece.shape, value, dtype=dtype)
    # Bytes below 127 are numbers in every format; in FP8 the one above is NaN.
    size = (*piece.shape[:-1], piece.shape[-1] * dtype.itemsize)
    return torch.randint(0, 127, size, dtype=torch.uint8).view(dtype)
