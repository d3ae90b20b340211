"""Loads the parts of a decoder from host memory or from pages; sums over ranks.

T tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight, as_tensor, is_in_order
from raymoe.errors import CheckpointError
from raymoe.kernels.cpu_experts import (
    SIGMOID_GATES,
    Biases,
    Clamp,
    Experts,
    ExpertsInGroups,
    GatedFfn,
    PlainExperts,
    PlainGatedFfn,
    RowMajorExperts,
    gated_product,
    make_experts,
    make_gated_ffn,
    packed_experts_are_used,
    packed_experts_bytes,
    row_major_experts_are_used,
)
from raymoe.kernels.cpu_linear import (
    Allocate,
    Linear,
    PackedGroups,
    PlainLinear,
    SideBySide,
    joined_int8,
    make_linear,
    multiply_groups,
    packed_groups_bytes,
    packed_linear_bytes,
    packed_linear_is_used,
)
from raymoe.kernels.elementwise import triton_runs_on, weigh_norm
from raymoe.kernels.gpu_experts_layout import ExpertMatrices, TileTable
from raymoe.kernels.latent_heads import (
    LatentHeads,
    PackedLatentHeads,
    PlainLatentHeads,
    packed_shapes,
)
from raymoe.kernels.ngrams import fill_table, table_view
from raymoe.model.device_experts import make_device_experts
from raymoe.specs.attention.compressed import CompressedAttentionSpec
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.attention.kind import AttentionKind
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.attention.ngrams import NGRAM_TABLE, NGRAMS, NgramSpec
from raymoe.specs.attention.recurrent import RECURRENT, RecurrentSpec
from raymoe.specs.layer_weights import (
    EMBEDDING,
    HEAD,
    LATENT_IN,
    LATENT_OUT,
    MERGE,
    MIXERS,
    layer_prefix,
)
from raymoe.specs.layers import projections_of
from raymoe.specs.model import DenseSpec, LayerSpec, ModelSpec, MoeSpec
from raymoe.specs.streams import GatedStreamsSpec
from raymoe.specs.weight_format import Int8Channel, WeightFormat
from raymoe.specs.weight_names import model_weights

Reduce = Callable[[Tensor], Tensor]
"""All-reduce: sums a tensor over the ranks, with the same bits on each; may work in place."""


def keep(tensor: Tensor) -> Tensor:
    """The all-reduce of a single rank."""
    return tensor


class NormOverRanks:
    """RMS norms of queries and keys over the heads of all ranks."""

    def __init__(self, reduce: Reduce, count: int, eps: float, offset: float | None) -> None:
        self._reduce, self._count, self._eps, self._offset = reduce, count, eps, offset

    def __call__(self, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Norm matrices [T, ...], each by its weight, in place; rounded as `rms_norm` does.

        A head that several ranks have counts as often in the sum as in the number of elements.
        """
        squares_PT = torch.stack([part.float().square().sum(-1) for part in parts])
        for part, weight, sum_T in zip(parts, weights, self._reduce(squares_PT), strict=True):
            mean_T1 = sum_T[:, None] / (self._count * part.shape[-1])
            normed = part.float() * torch.rsqrt(mean_T1 + self._eps)
            part.copy_(weigh_norm(normed, weight, self._offset, part.dtype))


ALIGNMENT = 64

GetWeight = Callable[[str], Weight]
GroupedProjection = Callable[[Tensor], Tensor]  # [T, groups, inputs] -> [T, groups, outputs]


class Loader:
    """Loads the parts of one decoder, converting weights to the compute type `dtype`."""

    device = torch.device("cpu")

    def __init__(self, weights: GetWeight, allocate: Allocate, dtype: torch.dtype) -> None:
        self._weights, self._allocate, self.dtype = weights, allocate, dtype

    def linear(self, names: Sequence[str], *, has_bias: bool = False) -> Linear:
        """Load one projection whose outputs are those of the named modules, concatenated."""
        weights = [self._weights(f"{name}.weight") for name in names]
        biases = [self.vector(f"{name}.bias") for name in names] if has_bias else None
        if any(isinstance(weight, StoredMatrix) for weight in weights):
            return self._side_by_side(weights, biases)
        is_packed = packed_linear_is_used(self.dtype)
        bias_O = None if biases is None else torch.cat(biases)
        return make_linear(self._matrix(weights, is_packed=is_packed), bias_O, self._allocate)

    def float_matrix(self, name: str) -> Linear | Tensor:
        """Load a matrix whose products are float32: as a projection, where that writes them."""
        if packed_linear_is_used(self.dtype):
            return self.linear([name])
        return self.table(f"{name}.weight")

    def tied_linear(self, weight_OI: Tensor, bias: str | None) -> Linear:
        bias_O = None if bias is None else self.vector(bias)
        return make_linear(weight_OI, bias_O, self._allocate)

    def experts(self, prefix: str, moe: MoeSpec) -> Experts:
        is_packed = packed_experts_are_used(self.dtype, moe.activation)
        parts = projections_of(moe.activation)
        matrices = {
            part: [
                self._matrix(
                    [self._weights(f"{prefix}{expert}.{part}_proj.weight")], is_packed=is_packed
                )
                for expert in range(moe.num_experts)
            ]
            for part in dict.fromkeys(parts)
        }
        return make_experts(
            *(matrices[part] for part in parts),
            activation=moe.activation,
            allocate=self._allocate,
            biases=self.expert_biases(prefix, moe),
            clamp=clamp_of(moe),
            dtype=self.dtype,
        )

    def expert_biases(self, prefix: str, moe: MoeSpec) -> list[Biases] | None:
        if not moe.has_bias:
            return None
        return [
            Biases(
                *(
                    self.vector(f"{prefix}{expert}.{part}_proj.bias")
                    for part in projections_of(moe.activation)
                )
            )
            for expert in range(moe.num_experts)
        ]

    def gated_ffn(self, prefix: str, activation: str) -> GatedFfn:
        is_packed = packed_experts_are_used(self.dtype, activation)
        parts = projections_of(activation)
        matrices = {
            part: self._matrix([self._weights(f"{prefix}{part}_proj.weight")], is_packed=is_packed)
            for part in dict.fromkeys(parts)
        }
        return make_gated_ffn(
            *(matrices[part] for part in parts),
            activation=activation,
            allocate=self._allocate,
            dtype=self.dtype,
        )

    def table(self, name: str) -> Tensor:
        """Load a matrix that is read by row: a view of the checkpoint, or a converted copy."""
        table = self._matrix([self._weights(name)], is_packed=False)
        assert isinstance(table, Tensor), "tables are never quantised"
        return table

    def token_table(self, name: str, num_values: int) -> Tensor:
        """Return a table of integers below `num_values` by token id, [V, K] on the host.

        Raises:
            CheckpointError: A row holds other integers, or one of them twice.
        """
        table_VK = self.host_tensor(name)
        ordered_VK = table_VK.sort(dim=1).values
        is_repeated = bool((ordered_VK.diff(dim=1) == 0).any())
        if is_repeated or int(table_VK.min()) < 0 or int(table_VK.max()) >= num_values:
            raise CheckpointError(
                f"{name} has a row that does not name {table_VK.shape[1]} different experts of "
                f"{num_values}; the file is damaged or of another model"
            )
        return table_VK

    def ngram_table(self, prefix: str, spec: NgramSpec) -> Tensor:
        """Copy the table of n-grams of a layer to the arena, [R, D] in its own type."""
        memory = self._allocate(spec.table_bytes)
        return fill_table(memory, spec, lambda name: self._weights(prefix + name))

    def host_tensor(self, name: str) -> Tensor:
        """Return a tensor as it is stored, on the host."""
        found = self._stored_weight(name)
        assert isinstance(found, Tensor), "such tensors are never quantised"
        return found

    def _stored_weight(self, name: str) -> Weight:
        return self._weights(name)

    def latent_heads(self, name: str, spec: LatentAttentionSpec) -> Callable[[], LatentHeads]:
        """Load the projection of latents to keys and values of heads.

        torch multiplies bfloat16 by plain loops on cores without such products, so that matrices
        are packed for our own kernel if there is one.
        """
        weight_HXR = self._group_matrices(name, spec.num_heads)
        nope_dim, rope_dim = spec.nope_head_dim, spec.rope_head_dim
        heads: LatentHeads
        if packed_linear_is_used(self.dtype):
            heads = PackedLatentHeads(
                weight_HXR, nope_dim=nope_dim, rope_dim=rope_dim, allocate=self._allocate
            )
        else:
            heads = PlainLatentHeads(weight_HXR, nope_dim=nope_dim, rope_dim=rope_dim)
        return lambda: heads

    def grouped_linear(self, name: str, num_groups: int) -> GroupedProjection:
        """Load a projection that is one matrix for each group of its inputs and outputs."""
        weight_GYI = self._group_matrices(name, num_groups)
        if packed_linear_is_used(self.dtype):
            return PackedGroups.pack(weight_GYI, self._allocate)
        return lambda input_TGI: multiply_groups(input_TGI, weight_GYI)

    def _group_matrices(self, name: str, num_groups: int) -> Tensor:
        """Return the matrices of groups, to be packed or kept.

        Those that are kept are views of the checkpoint, or decoded ones.
        """
        stored = self._weights(f"{name}.weight")
        shape = (num_groups, -1, stored.shape[1])
        if packed_linear_is_used(self.dtype):
            return as_tensor(stored, self.dtype).view(shape)
        if not isinstance(stored, StoredMatrix):
            return self.table(f"{name}.weight").view(shape)
        outputs, inputs = stored.shape
        memory = self._allocate(outputs * inputs * self.dtype.itemsize)
        weight_OI = memory.view(self.dtype).view(outputs, inputs)
        return weight_OI.copy_(as_tensor(stored, self.dtype)).view(shape)

    def vector(self, name: str) -> Tensor:
        """Copy a norm weight or a bias: it is small and shares its page with large weights."""
        vector = self._weights(name)
        assert isinstance(vector, Tensor), "vectors are never quantised"
        return vector.to(self.dtype, copy=True)

    def score_vector(self, name: str, *, is_on_host: bool = False) -> Tensor:
        """Load a float32 vector that is added to scores, to the place where scores are computed."""
        del is_on_host
        vector = self._weights(name)
        assert isinstance(vector, Tensor), "vectors are never quantised"
        return vector.to(torch.float32, copy=True)

    def _side_by_side(self, weights: Sequence[Weight], biases: Sequence[Tensor] | None) -> Linear:
        is_packed = packed_linear_is_used(self.dtype)
        matrices = [weight for weight in weights if isinstance(weight, StoredMatrix)]
        is_int8 = all(isinstance(matrix.format, Int8Channel) for matrix in matrices)
        if is_packed and is_int8 and len(matrices) == len(weights) > 1:
            # Inputs are quantised once.
            bias_O = None if biases is None else torch.cat(list(biases))
            return make_linear(joined_int8(matrices), bias_O, self._allocate, self.dtype)
        parts = [
            make_linear(
                self._matrix([weight], is_packed=is_packed),
                None if biases is None else biases[i],
                self._allocate,
                self.dtype,
            )
            for i, weight in enumerate(weights)
        ]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def _matrix(self, weights: Sequence[Weight], *, is_packed: bool) -> Weight:
        """Concatenate weights into one matrix of the compute type; a quantised one stays."""
        if len(weights) == 1 and _is_read_as_stored(weights[0], self.dtype):
            return weights[0]
        parts = [weight for weight in weights if isinstance(weight, Tensor)]
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


def clamp_of(ffn: MoeSpec | DenseSpec) -> Clamp | None:
    clamp = ffn.clamp
    if clamp is None:
        return None
    return Clamp(clamp.gain, clamp.limit, clamp.gate_limit, clamp.offset)


def decoder_arena_bytes(
    spec: ModelSpec, dtype: torch.dtype, weights: GetWeight | None = None
) -> int:
    """Return the bytes that `Decoder.load` requests, each request rounded up to 64.

    Without `weights`, the result assumes that everything is stored as it is read.
    """
    return _ArenaPlan(spec, dtype, weights).num_bytes()


class _ArenaPlan:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, weights: GetWeight | None) -> None:
        self._spec, self._dtype, self._weights = spec, dtype, weights
        self._shapes = model_weights(spec)

    def num_bytes(self) -> int:
        spec = self._spec
        vocabulary = (spec.vocab_size, spec.hidden_size)
        total = self._matrix([EMBEDDING], *vocabulary)
        if HEAD in self._shapes:
            total += self._linear([HEAD.removesuffix(".weight")], *spec.head_shape)
        elif spec.tie_word_embeddings and packed_linear_is_used(self._dtype):
            total += _aligned(packed_linear_bytes(*vocabulary))
        if isinstance(spec.streams, GatedStreamsSpec):
            total += self._gated_mixer(MERGE, ("down",))
        if f"{MERGE}.weight" in self._shapes:
            total += self._matrix([f"{MERGE}.weight"], *self._shapes[f"{MERGE}.weight"])
        for i, layer in enumerate(spec.layers):
            total += self._layer(layer_prefix(i), layer)
        return total

    def _layer(self, prefix: str, layer: LayerSpec) -> int:
        hidden_size, ffn = self._spec.hidden_size, layer.ffn
        is_recurrent = isinstance(layer.attention, RecurrentSpec)
        module = RECURRENT if is_recurrent else "self_attn."
        if layer.ngrams is not None:
            return self._ngrams(prefix, layer.ngrams)
        total = self._attention(prefix + module, layer.attention)
        for name in MIXERS if layer.streams is not None else ():
            if isinstance(layer.streams, GatedStreamsSpec):
                total += self._gated_mixer(prefix + name, ("inject", "down"))
            else:
                total += self._linear([prefix + name], *self._shapes[f"{prefix}{name}.weight"])
        if isinstance(ffn, DenseSpec):
            return total + (self._network(f"{prefix}mlp.", ffn) if layer.has_network else 0)
        total += self._linear([f"{prefix}mlp.gate"], ffn.num_experts, hidden_size)
        experts = [f"{prefix}mlp.experts.{expert}." for expert in range(ffn.num_experts)]
        input_size = ffn.input_size(hidden_size)
        total += self._experts(experts, ffn.expert_hidden, input_size, ffn.activation)
        if ffn.latent_size is not None:
            total += self._linear([prefix + LATENT_IN], ffn.latent_size, hidden_size)
            total += self._linear([prefix + LATENT_OUT], hidden_size, ffn.latent_size)
        if ffn.shared is not None:
            shared = f"{prefix}mlp.shared_expert"
            total += self._network(f"{shared}.", ffn.shared.network(ffn.activation))
            if ffn.shared.is_gated:
                total += self._linear([f"{shared}_gate"], 1, hidden_size)
        return total

    def _attention(self, prefix: str, attention: AttentionKind) -> int:
        hidden_size, output = self._spec.hidden_size, attention.token_shapes.output
        if isinstance(attention, RecurrentSpec):
            return self._recurrent(prefix, attention)
        if isinstance(attention, CompressedAttentionSpec):
            return self._compressed(prefix, attention)
        assert isinstance(attention, AttentionSpec | LatentAttentionSpec), "the others"
        total = self._linear([f"{prefix}o_proj"], hidden_size, output)
        if attention.gate is not None:
            total += self._linear([f"{prefix}g_proj"], attention.gate_width, hidden_size)
        if isinstance(attention, LatentAttentionSpec):
            return total + self._latent(prefix, attention)
        if attention.blocks is not None:
            both = [f"{prefix}indexer.{part}_proj" for part in "kq"]
            total += self._linear(both, attention.blocks.width, hidden_size)
        qkv = [f"{prefix}{part}_proj" for part in attention.projections]
        width = sum(attention.projections.values())
        return total + self._linear(qkv, width, hidden_size)

    def _gated_mixer(self, name: str, inputs: Sequence[str]) -> int:
        names = [f"{name}.{part}" for part in inputs]
        outputs = sum(self._shapes[f"{each}.weight"][0] for each in names)
        down = self._linear(names, outputs, self._shapes[f"{names[0]}.weight"][1])
        return down + self._linear([f"{name}.up"], *self._shapes[f"{name}.up.weight"])

    def _ngrams(self, prefix: str, ngrams: NgramSpec) -> int:
        names = [f"{prefix}{NGRAMS}{part}_proj" for part in "kv"]
        outputs = sum(self._shapes[f"{name}.weight"][0] for name in names)
        return self._linear(names, outputs, ngrams.width) + _aligned(ngrams.table_bytes)

    def _recurrent(self, prefix: str, attention: RecurrentSpec) -> int:
        hidden_size, output = self._spec.hidden_size, attention.output_width
        inputs = [f"{prefix}{part}_proj" for part in attention.inputs]
        total = self._linear(inputs, sum(attention.inputs.values()), hidden_size)
        latent = attention.latent_width
        if latent is None:
            total += self._linear([f"{prefix}g_proj"], attention.gate_width, hidden_size)
        else:
            total += self._linear([f"{prefix}g_a_proj"], latent, hidden_size)
            for part, width in attention.latent_outputs.items():
                total += self._linear([f"{prefix}{part}_proj"], width, latent)
        return total + self._linear([f"{prefix}o_proj"], hidden_size, output)

    def _compressed(self, prefix: str, attention: CompressedAttentionSpec) -> int:
        hidden_size, rank = self._spec.hidden_size, attention.q_lora_rank
        down = [f"{prefix}q_a_proj", f"{prefix}kv_proj"]
        total = self._linear(down, rank + attention.head_dim, hidden_size)
        total += self._linear([f"{prefix}q_b_proj"], attention.query_width, rank)
        if attention.ratio is not None:
            pooled = [f"{prefix}compressor.{part}_proj" for part in ("kv", "gate")]
            total += self._linear(pooled, 2 * attention.pooled_width, hidden_size)
        indexer = attention.indexer
        if indexer is not None:
            index = f"{prefix}indexer."
            total += self._linear([f"{index}wq_b"], indexer.num_heads * indexer.head_dim, rank)
            total += self._linear([f"{index}weights_proj"], indexer.num_heads, hidden_size)
            pooled = [f"{index}{part}_proj" for part in ("kv", "gate")]
            width = 2 * attention.num_sums * indexer.head_dim
            total += self._linear(pooled, width, hidden_size)
        count, group_rank = attention.num_groups, attention.group_rank
        shape = (group_rank, attention.output_width // count)
        total += self._groups(f"{prefix}o_a_proj.weight", count, shape, packed=[shape])
        latent = attention.num_groups * attention.group_rank
        return total + self._linear([f"{prefix}o_proj"], hidden_size, latent)

    def _groups(
        self,
        name: str,
        num_groups: int,
        shape: tuple[int, int],
        *,
        packed: Sequence[tuple[int, int]],
    ) -> int:
        """Bytes of a matrix [O, I] for each group, of which packed ones [O, I] are made."""
        if packed_linear_is_used(self._dtype):
            return sum(_aligned(packed_groups_bytes(num_groups, *each)) for each in packed)
        outputs, inputs = num_groups * shape[0], shape[1]
        if self._format(name) is not None:
            return _aligned(outputs * inputs * self._dtype.itemsize)
        return self._matrix([name], outputs, inputs)

    def _latent(self, prefix: str, attention: LatentAttentionSpec) -> int:
        hidden_size, rank = self._spec.hidden_size, attention.q_lora_rank
        query_width = attention.num_heads * attention.query_head_dim
        if rank is None:
            total = self._linear([f"{prefix}q_proj"], query_width, hidden_size)
        else:
            total = self._linear([f"{prefix}q_a_proj"], rank, hidden_size)
            total += self._linear([f"{prefix}q_b_proj"], query_width, rank)
        row = [f"{prefix}kv_a_proj_with_mqa"]
        total += self._linear(row, attention.row_width, hidden_size)
        indexer = attention.indexer
        if indexer is not None and not indexer.is_shared:
            width, inputs = indexer.num_heads * indexer.head_dim, rank or hidden_size
            total += self._linear([f"{prefix}indexer.wq_b"], width, inputs)
            total += self._linear([f"{prefix}indexer.wk"], indexer.head_dim, hidden_size)
            total += self._linear([f"{prefix}indexer.weights_proj"], indexer.num_heads, hidden_size)
            if indexer.pool is not None:
                total += self._linear([f"{prefix}indexer.pool_gate"], indexer.head_dim, hidden_size)
        dims = (attention.nope_head_dim, attention.value_head_dim, attention.kv_lora_rank)
        return total + self._groups(
            f"{prefix}kv_b_proj.weight",
            attention.num_heads,
            (attention.nope_head_dim + attention.value_head_dim, attention.kv_lora_rank),
            packed=packed_shapes(*dims),
        )

    def _network(self, prefix: str, dense: DenseSpec) -> int:
        hidden_size = self._spec.hidden_size
        if not dense.has_bias and dense.clamp is None:
            return self._experts([prefix], dense.hidden, hidden_size, dense.activation)
        wide = (dense.hidden, hidden_size)
        total = sum(self._linear([f"{prefix}{part}_proj"], *wide) for part in ("gate", "up"))
        return total + self._linear([f"{prefix}down_proj"], wide[1], wide[0])

    def _experts(
        self, prefixes: Sequence[str], hidden: int, input_size: int, activation: str
    ) -> int:
        if packed_experts_are_used(self._dtype, activation):
            gate_up, down = (
                self._format(f"{prefixes[0]}{part}_proj.weight") for part in ("gate", "down")
            )
            return _aligned(
                packed_experts_bytes(len(prefixes), input_size, hidden, gate_up=gate_up, down=down)
            )
        return sum(
            self._matrix([f"{prefix}{part}_proj.weight"], hidden, input_size)
            for prefix in prefixes
            for part in dict.fromkeys(projections_of(activation))
        )

    def _linear(self, names: Sequence[str], outputs: int, inputs: int) -> int:
        weights = [f"{name}.weight" for name in names]
        formats = [self._format(name) for name in weights]
        if packed_linear_is_used(self._dtype) and all(
            isinstance(each, Int8Channel) for each in formats
        ):
            return _aligned(packed_linear_bytes(outputs, inputs, formats[0]))
        if any(formats):
            return sum(self._part(name) for name in weights)
        if packed_linear_is_used(self._dtype):
            return _aligned(packed_linear_bytes(outputs, inputs))
        return self._matrix(weights, outputs, inputs)

    def _part(self, name: str) -> int:
        outputs, inputs = self._shapes[name]
        if packed_linear_is_used(self._dtype):
            return _aligned(packed_linear_bytes(outputs, inputs, self._format(name)))
        return self._matrix([name], outputs, inputs)

    def _format(self, name: str) -> WeightFormat | None:
        return self._spec.format_of(name, self._shapes[name])

    def _matrix(self, names: Sequence[str], outputs: int, inputs: int) -> int:
        if len(names) == 1 and (
            self._weights is None
            or self._format(names[0]) is not None
            or _is_read_as_stored(self._weights(names[0]), self._dtype)
        ):
            return 0
        return _aligned(outputs * inputs * self._dtype.itemsize)


def _is_read_as_stored(weight_OI: Weight, dtype: torch.dtype) -> bool:
    if isinstance(weight_OI, StoredMatrix):
        return True
    return weight_OI.dtype == dtype and weight_OI.is_contiguous()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


GetView = Callable[[str], Weight]


class PagedLoader(Loader):
    """Loads parts whose weights are views of pages; operations read their contents when they run.

    Weights that form one matrix (queries, keys, values) must be adjacent in memory, as
    `specs.layer_weights.layer_parts` orders them.
    """

    def __init__(
        self,
        view: GetView,
        stored: GetWeight,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tiles: TileTable | None = None,
    ) -> None:
        """Store where weights are.

        Args:
            view: Canonical name -> the weight where the decoder computes.
            stored: Canonical name -> the weight as it is stored, for the few that stay there.
            tiles: Measured tiles of the GPU's expert kernels.
        """
        super().__init__(view, _refuse_to_allocate, dtype)
        self._view, self._stored, self.device = view, stored, device
        self._tiles = tiles

    def linear(self, names: Sequence[str], *, has_bias: bool = False) -> Linear:
        weights = [self._view(f"{name}.weight") for name in names]
        biases = [self.vector(f"{name}.bias") for name in names] if has_bias else None
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(plain) == len(weights):
            return PlainLinear(_joined(plain), None if biases is None else _joined(biases))
        parts = [
            PlainLinear(weight, None if biases is None else biases[i])
            for i, weight in enumerate(weights)
        ]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def float_matrix(self, name: str) -> Linear | Tensor:
        return self.table(f"{name}.weight")

    def tied_linear(self, weight_OI: Tensor, bias: str | None) -> Linear:
        del weight_OI
        return PlainLinear(self._view(HEAD), None if bias is None else self.vector(bias))

    def latent_heads(self, name: str, spec: LatentAttentionSpec) -> Callable[[], LatentHeads]:
        matrices = self._matrices_of_groups(name, spec.num_heads)
        dims = {"nope_dim": spec.nope_head_dim, "rope_dim": spec.rope_head_dim}
        return lambda: PlainLatentHeads(matrices(), **dims)

    def grouped_linear(self, name: str, num_groups: int) -> GroupedProjection:
        matrices = self._matrices_of_groups(name, num_groups)
        return lambda input_TGI: multiply_groups(input_TGI, matrices())

    def _matrices_of_groups(self, name: str, num_groups: int) -> Callable[[], Tensor]:
        weight = self._view(f"{name}.weight")
        shape = (num_groups, -1, weight.shape[1])
        return lambda: as_tensor(weight, self.dtype).view(shape)

    def experts(self, prefix: str, moe: MoeSpec) -> Experts:
        return make_device_experts(
            self.expert_matrices(prefix, moe),
            activation=moe.activation,
            dtype=self.dtype,
            clamp=clamp_of(moe),
            tiles=self._tiles,
        )

    def host_experts(self, prefix: str, moe: MoeSpec) -> ExpertsInGroups:
        """Load experts that cores compute, where their weights lie in host memory."""
        matrices, clamp = self.expert_matrices(prefix, moe), clamp_of(moe)
        is_native = row_major_experts_are_used(moe.activation, clamp)
        make = RowMajorExperts if is_native else PlainExperts
        return make(
            matrices.gate_EFH,
            matrices.up_EFH,
            matrices.down_EHF,
            activation=moe.activation,
            biases=matrices.biases,
            clamp=clamp,
        )

    def expert_matrices(self, prefix: str, moe: MoeSpec) -> ExpertMatrices:
        parts = projections_of(moe.activation)
        matrices = {
            part: [
                self._view(f"{prefix}{expert}.{part}_proj.weight")
                for expert in range(moe.num_experts)
            ]
            for part in dict.fromkeys(parts)
        }
        return ExpertMatrices(
            matrices[parts[0]],
            matrices["up"],
            matrices["down"],
            biases=self.expert_biases(prefix, moe),
            are_reordered=self._are_reordered(prefix, moe),
        )

    def _are_reordered(self, prefix: str, moe: MoeSpec) -> bool:
        """Whether quantisation groups contain inputs that are not neighbours (act-order).

        The group tables are read from the checkpoint, because slots are still empty.
        """
        names = (
            f"{prefix}{expert}.{part}_proj.weight"
            for expert in range(moe.num_experts)
            for part in dict.fromkeys(projections_of(moe.activation))
        )
        with_tables = (name for name in names if _has_order(self._view(name)))
        return not all(_is_in_order(self._stored(name)) for name in with_tables)

    def gated_ffn(self, prefix: str, activation: str) -> GatedFfn:
        parts = projections_of(activation)
        views = {part: self._view(f"{prefix}{part}_proj.weight") for part in dict.fromkeys(parts)}
        return PlainGatedFfn(
            *(views[part] for part in parts), activation=activation, product=_device_product
        )

    def table(self, name: str) -> Tensor:
        return self.vector(name)

    def vector(self, name: str) -> Tensor:
        view = self._view(name)
        assert isinstance(view, Tensor), "tables and vectors are never quantised"
        return view

    def _stored_weight(self, name: str) -> Weight:
        return self._stored(name)

    def ngram_table(self, prefix: str, spec: NgramSpec) -> Tensor:
        memory = self._view(prefix + NGRAM_TABLE)
        assert isinstance(memory, Tensor), "bytes"
        return table_view(memory, spec)

    def score_vector(self, name: str, *, is_on_host: bool = False) -> Tensor:
        device = "cpu" if is_on_host else self.device
        stored = self._stored(name)
        assert isinstance(stored, Tensor), "vectors are never quantised"
        return stored.to(device, torch.float32, copy=True)


def _device_product(gate_TF: Tensor, up_TF: Tensor, activation: str, clamp: Clamp | None) -> Tensor:
    """Compute `gated_product` in one launch where Triton runs; it may change `gate_TF`."""
    if clamp is not None or activation not in SIGMOID_GATES or not triton_runs_on(gate_TF.device):
        return gated_product(gate_TF, up_TF, activation, clamp)
    from raymoe.kernels import gpu_experts  # noqa: PLC0415 - needs Triton

    gpu_experts.gated_product_launch(gate_TF, up_TF, SIGMOID_GATES[activation]).run()
    return gate_TF


def _has_order(weight: Weight) -> bool:
    return isinstance(weight, StoredMatrix) and "order" in weight.pieces


def _is_in_order(stored: Weight) -> bool:
    return isinstance(stored, StoredMatrix) and is_in_order(stored)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        assert part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        assert part.storage_offset() == offset, "weights of one projection are not neighbours"
        offset += part.numel()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _refuse_to_allocate(num_bytes: int) -> Tensor:
    raise AssertionError(f"{num_bytes} bytes asked for; paged parts are views")
