"""Experts with random weights in any stored format, their routing, and what they should give."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight, as_tensor
from raymoe.kernels.cpu_experts import SQUARES, Biases, Clamp, PlainExperts, gated_product
from raymoe.kernels.gpu_experts_layout import ExpertMatrices
from raymoe.specs.weight_format import WeightFormat
from tests.quantisers import quantise

CLAMP = Clamp(1.702, 0.8, 0.6, 0.5)


@dataclass(kw_only=True)
class ExpertCase:
    """T tokens for E experts with random weights.

    Attributes:
        stored: Format of the weights; None for tensors of `dtype`.
        routes: Experts of each token, [T][K]; None for random ones.
    """

    dtype: torch.dtype = torch.float16
    device: str = "cpu"
    num_tokens: int = 7
    num_experts: int = 3
    top_k: int = 2
    hidden: int = 72
    wide: int = 40
    stored: WeightFormat | None = None
    scale_dtype: torch.dtype = torch.float16
    has_bias: bool = False
    activation: str = "silu"
    clamp: Clamp | None = None
    routes: Sequence[Sequence[int]] | None = None
    seed: int = 0
    are_reordered: bool = True
    matrices: ExpertMatrices = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        gate, up = ([self._matrix(self.wide, self.hidden) for _ in self._experts] for _ in range(2))
        if self.activation in SQUARES:
            gate = up
        down = [self._matrix(self.hidden, self.wide) for _ in self._experts]
        self.matrices = ExpertMatrices(
            gate, up, down, biases=self._biases(), are_reordered=self.are_reordered
        )
        self.hidden_TH = self._normal(self.num_tokens, self.hidden).to(self.device, self.dtype)
        self.ids_TK = self._routes().to(self.device)
        weights_TK = torch.rand(self.ids_TK.shape, generator=self._random) + 0.1
        self.weights_TK = weights_TK.to(self.device)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of `Experts`."""
        return self.hidden_TH, self.ids_TK, self.weights_TK

    def plain(self) -> PlainExperts:
        """The reference in the type of the case."""
        return PlainExperts(
            *self.matrices[:3],
            activation=self.activation,
            biases=self.matrices.biases,
            clamp=self.clamp,
        )

    def exact(self) -> Tensor:
        """In float64, from elements rounded to the type of the case."""
        out_TH = torch.zeros(self.num_tokens, self.hidden, dtype=torch.float64)
        for token in range(self.num_tokens):
            for slot, expert in enumerate(self.ids_TK[token].tolist()):
                out_TH[token] += self.weights_TK[token, slot].double().cpu() * self._ffn(
                    self.hidden_TH[token].double().cpu(), expert
                )
        return out_TH

    def _ffn(self, hidden_H: Tensor, expert: int) -> Tensor:
        gate_FH, up_FH, down_HF = (
            as_tensor(each[expert], self.dtype).double().cpu() for each in self.matrices[:3]
        )
        biases = (0.0, 0.0, 0.0)
        if self.matrices.biases is not None:
            biases = tuple(bias.double().cpu() for bias in self.matrices.biases[expert])
        product_F = gated_product(
            gate_FH @ hidden_H + biases[0],
            up_FH @ hidden_H + biases[1],
            self.activation,
            self.clamp,
        )
        return down_HF @ product_F + biases[2]

    @property
    def _experts(self) -> range:
        return range(self.num_experts)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._random)

    def _matrix(self, outputs: int, inputs: int) -> Weight:
        weight_OI = self._normal(outputs, inputs) / inputs**0.5
        if self.stored is None:
            return weight_OI.to(self.device, self.dtype)
        seed = int(torch.randint(1 << 20, (), generator=self._random)) * 2 + self.are_reordered
        matrix = quantise(self.stored, weight_OI, scale_dtype=self.scale_dtype, seed=seed).matrix
        pieces = {name: piece.to(self.device) for name, piece in matrix.pieces.items()}
        return StoredMatrix(format=matrix.format, shape=matrix.shape, pieces=pieces)

    def _biases(self) -> list[Biases] | None:
        if not self.has_bias:
            return None
        sizes = (self.wide, self.wide, self.hidden)
        biases = [
            Biases(*(self._normal(size).to(self.device, self.dtype) for size in sizes))
            for _ in self._experts
        ]
        if self.activation in SQUARES:
            return [each._replace(gate_F=each.up_F) for each in biases]
        return biases

    def _routes(self) -> Tensor:
        if self.routes is not None:
            return torch.tensor(self.routes, dtype=torch.int32)
        scores_TE = torch.rand(self.num_tokens, self.num_experts, generator=self._random)
        return scores_TE.topk(self.top_k).indices.int()
