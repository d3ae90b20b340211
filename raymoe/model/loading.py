"""From stored weights to projections and experts, and what of that is kept in the arena.

Weights that the kernels read as they are stay views of the checkpoint. What is packed, converted to
another type, or fused with its neighbours is copied into memory that `allocate` gives; a copy made
only to be packed is freed at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raymoe.kernels.cpu_experts import (
    Biases,
    Clamp,
    Experts,
    GatedFfn,
    make_experts,
    make_gated_ffn,
    packed_experts_are_used,
    packed_experts_bytes,
)
from raymoe.kernels.cpu_linear import (
    Allocate,
    Linear,
    make_linear,
    packed_linear_bytes,
    packed_linear_is_used,
)
from raymoe.specs.model import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
)
from raymoe.specs.weight_names import EMBEDDING, HEAD, layer_prefix

ALIGNMENT = 64

GetWeight = Callable[[str], Tensor]


class Loader:
    """Builds the parts of one decoder.

    Attributes:
        dtype: Type that the decoder computes in; weights of another type are converted.
        device: Where it computes.
    """

    device = torch.device("cpu")

    def __init__(self, weights: GetWeight, allocate: Allocate, dtype: torch.dtype) -> None:
        self._weights, self._allocate, self.dtype = weights, allocate, dtype

    def linear(self, names: Sequence[str], *, has_bias: bool = False) -> Linear:
        """One projection whose outputs are those of the named modules, side by side."""
        is_packed = packed_linear_is_used(self.dtype)
        weight_OI = self._matrix([f"{name}.weight" for name in names], is_packed=is_packed)
        bias_O = None
        if has_bias:
            bias_O = torch.cat([self.vector(f"{name}.bias") for name in names])
        return make_linear(weight_OI, bias_O, self._allocate)

    def tied_linear(self, weight_OI: Tensor, bias: str | None) -> Linear:
        """A projection by a matrix that was loaded already, and the bias of this name."""
        bias_O = None if bias is None else self.vector(bias)
        return make_linear(weight_OI, bias_O, self._allocate)

    def experts(self, prefix: str, moe: MoeSpec) -> Experts:
        """The routed experts of a layer."""
        is_packed = packed_experts_are_used(self.dtype, moe.activation)
        gate, up, down = (
            [
                self._matrix([f"{prefix}{expert}.{part}_proj.weight"], is_packed=is_packed)
                for expert in range(moe.num_experts)
            ]
            for part in ("gate", "up", "down")
        )
        return make_experts(
            gate,
            up,
            down,
            activation=moe.activation,
            allocate=self._allocate,
            biases=self.expert_biases(prefix, moe),
            clamp=clamp_of(moe),
        )

    def expert_biases(self, prefix: str, moe: MoeSpec) -> list[Biases] | None:
        """Of the projections of all experts; None where they have none."""
        if not moe.has_bias:
            return None
        return [
            Biases(
                *(
                    self.vector(f"{prefix}{expert}.{part}_proj.bias")
                    for part in ("gate", "up", "down")
                )
            )
            for expert in range(moe.num_experts)
        ]

    def gated_ffn(self, prefix: str, activation: str) -> GatedFfn:
        """A gated network without biases."""
        is_packed = packed_experts_are_used(self.dtype, activation)
        gate, up, down = (
            self._matrix([f"{prefix}{part}_proj.weight"], is_packed=is_packed)
            for part in ("gate", "up", "down")
        )
        return make_gated_ffn(gate, up, down, activation=activation, allocate=self._allocate)

    def table(self, name: str) -> Tensor:
        """A matrix that is read by row: a view of the checkpoint, or converted in the arena."""
        return self._matrix([name], is_packed=False)

    def head_matrices(self, name: str, num_heads: int) -> Tensor:
        """One projection as a matrix of each head, [heads, outputs of a head, inputs].

        A view of the checkpoint where other matrices are; a copy where they are packed.
        """
        if packed_linear_is_used(self.dtype):
            stored_OI = self._weights(f"{name}.weight")
            memory = self._allocate(stored_OI.numel() * self.dtype.itemsize)
            weight_OI = memory.view(self.dtype).view(stored_OI.shape).copy_(stored_OI)
        else:
            weight_OI = self._matrix([f"{name}.weight"], is_packed=False)
        return weight_OI.view(num_heads, -1, weight_OI.shape[1])

    def vector(self, name: str) -> Tensor:
        """A norm weight or a bias, copied: it is small and shares its page with large ones."""
        return self._weights(name).to(self.dtype, copy=True)

    def score_vector(self, name: str, *, is_on_host: bool = False) -> Tensor:
        """What is added to scores, in float32, and where they are computed for as long as we live.

        Args:
            name: Of few elements, whatever the size of the model.
            is_on_host: Whether the host computes these scores, wherever the decoder computes.
        """
        del is_on_host
        return self._weights(name).to(torch.float32, copy=True)

    def _matrix(self, names: Sequence[str], *, is_packed: bool) -> Tensor:
        parts = [self._weights(name) for name in names]
        if len(parts) == 1 and _is_read_as_stored(parts[0], self.dtype):
            return parts[0]
        rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
        if is_packed:
            out_OI = torch.empty(rows, columns, dtype=self.dtype)
        else:
            memory = self._allocate(rows * columns * self.dtype.itemsize)
            out_OI = memory.view(self.dtype).view(rows, columns)
        begin = 0
        for part_OI in parts:
            out_OI[begin : begin + len(part_OI)].copy_(part_OI)
            begin += len(part_OI)
        return out_OI


def clamp_of(moe: MoeSpec) -> Clamp | None:
    """The limits of the gated product, as the kernels read them."""
    return None if moe.clamp is None else Clamp(moe.clamp.gain, moe.clamp.limit)


def decoder_arena_bytes(
    spec: ModelSpec, dtype: torch.dtype, weights: GetWeight | None = None
) -> int:
    """Bytes that `Decoder.load` asks its arena for, each request rounded up to 64.

    Args:
        spec: The model.
        dtype: Type to compute in.
        weights: As `Decoder.load` gets them; None: everything is stored as it is read.
    """
    return _ArenaPlan(spec, dtype, weights).num_bytes()


class _ArenaPlan:
    """Mirrors `Loader`: what each of its parts asks for."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, weights: GetWeight | None) -> None:
        self._spec, self._dtype, self._weights = spec, dtype, weights

    def num_bytes(self) -> int:
        spec = self._spec
        vocabulary = (spec.vocab_size, spec.hidden_size)
        total = self._matrix([EMBEDDING], *vocabulary)
        if packed_linear_is_used(self._dtype):
            total += _aligned(packed_linear_bytes(*vocabulary))
        elif not spec.tie_word_embeddings:
            total += self._matrix([HEAD], *vocabulary)
        for i, layer in enumerate(spec.layers):
            total += self._layer(layer_prefix(i), layer)
        return total

    def _layer(self, prefix: str, layer: LayerSpec) -> int:
        hidden_size, ffn = self._spec.hidden_size, layer.ffn
        total = self._attention(f"{prefix}self_attn.", layer.attention)
        if isinstance(ffn, DenseSpec):
            return total + self._network(f"{prefix}mlp.", ffn)
        total += self._linear([f"{prefix}mlp.gate"], ffn.num_experts, hidden_size)
        experts = [f"{prefix}mlp.experts.{expert}." for expert in range(ffn.num_experts)]
        total += self._gated(experts, ffn.expert_hidden, ffn.activation)
        if ffn.shared is not None:
            shared = f"{prefix}mlp.shared_expert"
            total += self._network(f"{shared}.", ffn.shared.network(ffn.activation))
            if ffn.shared.is_gated:
                total += self._linear([f"{shared}_gate"], 1, hidden_size)
        return total

    def _attention(self, prefix: str, attention: AttentionSpec | LatentAttentionSpec) -> int:
        hidden_size, output = self._spec.hidden_size, attention.token_shapes.output
        total = self._linear([f"{prefix}o_proj"], hidden_size, output)
        if isinstance(attention, LatentAttentionSpec):
            return total + self._latent(prefix, attention)
        qkv = [f"{prefix}{part}_proj" for part in "qkv"]
        width = attention.query_width + 2 * attention.kv_width
        return total + self._linear(qkv, width, hidden_size)

    def _latent(self, prefix: str, attention: LatentAttentionSpec) -> int:
        hidden_size, rank = self._spec.hidden_size, attention.q_lora_rank
        query_width = attention.num_heads * attention.query_head_dim
        if rank is None:
            total = self._linear([f"{prefix}q_proj"], query_width, hidden_size)
        else:
            total = self._linear([f"{prefix}q_a_proj"], rank, hidden_size)
            total += self._linear([f"{prefix}q_b_proj"], query_width, rank)
        row = [f"{prefix}kv_a_proj_with_mqa"]
        total += self._linear(row, attention.cache_width, hidden_size)
        unfolded = attention.num_heads * (attention.nope_head_dim + attention.value_head_dim)
        if packed_linear_is_used(self._dtype):
            return total + _aligned(unfolded * attention.kv_lora_rank * self._dtype.itemsize)
        return total + self._matrix([f"{prefix}kv_b_proj.weight"], unfolded, attention.kv_lora_rank)

    def _network(self, prefix: str, dense: DenseSpec) -> int:
        if not dense.has_bias:
            return self._gated([prefix], dense.hidden, dense.activation)
        wide = (dense.hidden, self._spec.hidden_size)
        total = sum(self._linear([f"{prefix}{part}_proj"], *wide) for part in ("gate", "up"))
        return total + self._linear([f"{prefix}down_proj"], wide[1], wide[0])

    def _gated(self, prefixes: Sequence[str], hidden: int, activation: str) -> int:
        hidden_size = self._spec.hidden_size
        if packed_experts_are_used(self._dtype, activation):
            return _aligned(packed_experts_bytes(len(prefixes), hidden_size, hidden))
        return sum(
            self._matrix([f"{prefix}{part}_proj.weight"], hidden, hidden_size)
            for prefix in prefixes
            for part in ("gate", "up", "down")
        )

    def _linear(self, names: Sequence[str], outputs: int, inputs: int) -> int:
        if packed_linear_is_used(self._dtype):
            return _aligned(packed_linear_bytes(outputs, inputs))
        return self._matrix([f"{name}.weight" for name in names], outputs, inputs)

    def _matrix(self, names: Sequence[str], outputs: int, inputs: int) -> int:
        if len(names) == 1 and (
            self._weights is None or _is_read_as_stored(self._weights(names[0]), self._dtype)
        ):
            return 0
        return _aligned(outputs * inputs * self._dtype.itemsize)


def _is_read_as_stored(weight_OI: Tensor, dtype: torch.dtype) -> bool:
    return weight_OI.dtype == dtype and weight_OI.is_contiguous()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
