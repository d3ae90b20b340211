"""Layers of real models, for which the kernels are compiled; with two experts, whatever they have.

Their memory is never activated: it costs addresses only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe.codecs import TORCH_DTYPES, StoredMatrix, Weight
from raymoe.kernels.cpu_experts import Biases, Clamp
from raymoe.kernels.gpu_experts_layout import ExpertMatrices
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Gptq,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)

NUM_EXPERTS = 2


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Experts of one layer: H hidden, F wide, K per token."""

    hidden: int
    wide: int
    top_k: int
    stored: WeightFormat | None = None
    clamp: Clamp | None = None
    has_bias: bool = False

    def matrices(self, dtype: torch.dtype) -> ExpertMatrices:
        """Weights with unspecified contents."""
        outer, inner = (self.wide, self.hidden), (self.hidden, self.wide)
        gate, up, down = (
            [self._matrix(size, dtype) for _ in range(NUM_EXPERTS)]
            for size in (outer, outer, inner)
        )
        biases = [
            Biases(*(torch.empty(size[0], dtype=dtype) for size in (outer, outer, inner)))
            for _ in range(NUM_EXPERTS)
        ]
        return ExpertMatrices(
            gate, up, down, biases=biases if self.has_bias else None, are_reordered=False
        )

    def _matrix(self, shape: tuple[int, int], dtype: torch.dtype) -> Weight:
        if self.stored is None:
            return torch.empty(shape, dtype=dtype)
        pieces: dict[str, Tensor] = {
            piece.name: torch.empty(piece.shape, dtype=TORCH_DTYPES[piece.dtypes[0]])
            for piece in self.stored.pieces(*shape)
        }
        return StoredMatrix(format=self.stored, shape=shape, pieces=pieces)


SHAPES: Mapping[str, ExpertShape] = {
    "Mixtral-8x7B": ExpertShape(hidden=4096, wide=14336, top_k=2),
    "Qwen3-30B-A3B": ExpertShape(hidden=2048, wide=768, top_k=8),
    "Qwen3-30B-A3B FP8": ExpertShape(hidden=2048, wide=768, top_k=8, stored=Fp8Block()),
    "Qwen3-30B-A3B GPTQ": ExpertShape(hidden=2048, wide=768, top_k=8, stored=Gptq(group_size=128)),
    "Mixtral-8x7B AWQ": ExpertShape(hidden=4096, wide=14336, top_k=2, stored=Awq(group_size=128)),
    "Kimi-K2 INT4": ExpertShape(hidden=7168, wide=2048, top_k=8, stored=PackedInt4(group_size=32)),
    "gpt-oss-20b": ExpertShape(
        hidden=2880, wide=2880, top_k=4, stored=Mxfp4(), clamp=Clamp(1.702, 7.0, 7.0), has_bias=True
    ),
    "MiniMax-M3 MXFP8": ExpertShape(
        hidden=6144, wide=3072, top_k=4, stored=Mxfp8(), clamp=Clamp(1.702, 7.0, 7.0, 1.0)
    ),
    "Qwen3-30B-A3B NVFP4": ExpertShape(hidden=2048, wide=768, top_k=8, stored=Nvfp4()),
    "Mixtral-8x7B NVFP4": ExpertShape(
        hidden=4096, wide=14336, top_k=2, stored=Nvfp4(is_divided=True)
    ),
}
