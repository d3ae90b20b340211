"""Jobs that measure CPU kernels, and states on a GPU too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raymoe.codecs import TORCH_DTYPES, StoredMatrix, as_tensor
from raymoe.kernels.compressed import CompressedScoring
from raymoe.kernels.cpu_attention import AttentionBatch, append_and_attend, append_and_attend_latent
from raymoe.kernels.cpu_compressed import append_and_attend_rows
from raymoe.kernels.cpu_experts import Experts, make_experts
from raymoe.kernels.cpu_linear import Linear, make_linear
from raymoe.kernels.gpu_state.scan import StateBatch
from raymoe.kernels.paged_kv import (
    BLOCK_TOKENS,
    CacheLayout,
    CompressedLayout,
    KvLayout,
    LatentLayout,
)
from raymoe.kernels.state import scan
from raymoe.kernels.tensors import to_device
from raymoe.measure.timing import KernelJob
from raymoe.memory.arena import HostArena
from raymoe.specs.weight_format import Gptq, PackedInt4, Piece, WeightFormat
from raymoe.units import ceil_div

MIN_CACHE_BYTES = 512 << 20
STATE = 0.01  # every number of a state before it is updated


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    has_int8_kv: bool = False

    @property
    def layout(self) -> KvLayout:
        dtype = torch.int8 if self.has_int8_kv else self.dtype
        return KvLayout(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.block_bytes // BLOCK_TOKENS

    def __str__(self) -> str:
        int8 = " of int8" if self.has_int8_kv else ""
        return f"{self.num_heads}/{self.num_kv_heads} heads x {self.head_dim}{int8}"


def decode_job(
    shape: AttentionShape,
    batch: int,
    context: int,
    layers: Sequence[Tensor] | None = None,
    *,
    shared_tokens: int = 0,
) -> KernelJob:
    """One new token for each of `batch` sequences of `context` tokens, the new one included.

    Args:
        shared_tokens: The first tokens, which are the same blocks in all sequences.
    """
    case = f"{shape}, {batch} x {context}"
    distinct_tokens = shared_tokens + batch * (context - shared_tokens)
    return KernelJob(
        kernel="decode attention",
        case=f"{case}, {shared_tokens} of them shared" if shared_tokens else case,
        calls=_calls(shape, batch, 1, context, layers, shared_tokens),
        bytes_per_call=distinct_tokens * shape.kv_bytes_per_token,
        flop_per_call=4 * batch * context * shape.num_heads * shape.head_dim,
    )


def prefill_job(
    shape: AttentionShape, batch: int, prompt_tokens: int, layers: Sequence[Tensor] | None = None
) -> KernelJob:
    """Causal attention of whole prompts; work above the diagonal is not counted."""
    pairs = batch * prompt_tokens * (prompt_tokens + 1) / 2
    return KernelJob(
        kernel="prefill attention",
        case=f"{shape}, {batch} x {prompt_tokens}",
        calls=_calls(shape, batch, prompt_tokens, prompt_tokens, layers),
        bytes_per_call=batch * prompt_tokens * shape.kv_bytes_per_token,
        flop_per_call=4 * pairs * shape.num_heads * shape.head_dim,
    )


def make_layers(shape: AttentionShape, batch: int, context: int) -> list[Tensor]:
    """KV cache of sequences, in enough layers to exceed the CPU caches."""
    return cache_layers(shape.layout, batch * ceil_div(context, BLOCK_TOKENS))


def cache_layers(layout: CacheLayout, num_blocks: int) -> list[Tensor]:
    """Enough layers of `num_blocks` blocks to exceed the CPU caches."""
    layer_bytes = num_blocks * layout.block_bytes
    num_layers = ceil_div(MIN_CACHE_BYTES, layer_bytes)
    layers = HostArena(num_layers * layer_bytes).allocate(num_layers * layer_bytes)
    shaped = layers.view(layout.dtype).view(num_layers, num_blocks, *layout.block_shape)
    return list(shaped.fill_(1 if layout.dtype == torch.int8 else 0.5))


def _calls(  # noqa: PLR0917 - of two public functions above
    shape: AttentionShape,
    batch: int,
    new_tokens: int,
    context: int,
    layers: Sequence[Tensor] | None,
    shared_tokens: int = 0,
) -> list[partial[Tensor]]:
    tokens = batch * new_tokens
    query_THD = torch.randn(tokens, shape.num_heads, shape.head_dim).to(shape.dtype)
    key_TGD = torch.randn(tokens, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
    step_batch = AttentionBatch(
        query_start=torch.arange(0, tokens + 1, new_tokens, dtype=torch.int32),
        context_tokens=torch.full((batch,), context, dtype=torch.int32),
        block_table=shuffled_table(batch, ceil_div(context, BLOCK_TOKENS)),
    )
    shared_blocks = shared_tokens // BLOCK_TOKENS
    step_batch.block_table[:, :shared_blocks] = step_batch.block_table[0, :shared_blocks]
    return [
        partial(
            append_and_attend,
            query_THD, key_TGD, key_TGD, layer, step_batch, scale=shape.head_dim**-0.5,
        )
        for layer in layers or make_layers(shape, batch, context)
    ]  # fmt: skip


def shuffled_table(batch: int, blocks_each: int) -> Tensor:
    """Block table of sequences whose blocks lie anywhere, [batch, blocks_each] int32."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * blocks_each, generator=generator)
    return order.to(torch.int32).reshape(batch, blocks_each)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    num_heads: int = 128
    rank: int = 512
    rope_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    def __str__(self) -> str:
        return f"{self.num_heads} heads, latent {self.rank} + {self.rope_dim}"


def latent_decode_job(shape: LatentShape, batch: int, context: int) -> KernelJob:
    layout = LatentLayout(rank=shape.rank, rope_dim=shape.rope_dim, dtype=shape.dtype)
    blocks_each = ceil_div(context, BLOCK_TOKENS)
    query_THW = torch.randn(batch, shape.num_heads, shape.width).to(shape.dtype)
    latent_TW = torch.randn(batch, shape.width).to(shape.dtype)
    tokens = AttentionBatch(
        query_start=torch.arange(batch + 1, dtype=torch.int32),
        context_tokens=torch.full((batch,), context, dtype=torch.int32),
        block_table=shuffled_table(batch, blocks_each),
    )
    scale = shape.width**-0.5
    return KernelJob(
        kernel="decode attention",
        case=f"{shape}, {batch} x {context}",
        calls=[
            partial(
                append_and_attend_latent,
                query_THW, latent_TW, layer, tokens, rank=shape.rank, scale=scale,
            )
            for layer in cache_layers(layout, batch * blocks_each)
        ],
        bytes_per_call=batch * context * shape.width * shape.dtype.itemsize,
        flop_per_call=2 * batch * context * shape.num_heads * (shape.width + shape.rank),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedShape:
    """Heads that attend to the last rows and to entries of `ratio` tokens each."""

    num_heads: int = 64
    width: int = 512
    window: int = 128
    ratio: int = 4
    rope_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    def seen(self, position: int) -> int:
        """Rows and entries that the token at this position attends to."""
        return min(position + 1, self.window) + (position + 1) // self.ratio

    def __str__(self) -> str:
        kinds = f"last {self.window} and entries of {self.ratio}"
        return f"{self.num_heads} heads x {self.width}, {kinds}"


def compressed_job(shape: CompressedShape, batch: int, new_tokens: int, context: int) -> KernelJob:
    """`new_tokens` of each of `batch` sequences of `context` tokens: a step if one, else prompts.

    A prompt reads little but what the step computed, so one layer will do.
    """
    layout = CompressedLayout(
        width=shape.width, window=shape.window, ratio=shape.ratio, num_sums=2, dtype=shape.dtype
    )
    tokens, blocks_each = batch * new_tokens, ceil_div(context, BLOCK_TOKENS)
    layer_bytes = batch * (blocks_each * layout.block_bytes + layout.sequence_bytes)
    num_layers = ceil_div(MIN_CACHE_BYTES, layer_bytes) if new_tokens == 1 else 1
    layers = HostArena(num_layers * layer_bytes).allocate(num_layers * layer_bytes)
    query_THW = torch.randn(tokens, shape.num_heads, shape.width).to(shape.dtype)
    row_TW = torch.randn(tokens, shape.width).to(shape.dtype)
    angles_PR = torch.randn(context, shape.rope_dim // 2)
    step = AttentionBatch(
        query_start=torch.arange(0, tokens + 1, new_tokens, dtype=torch.int32),
        context_tokens=torch.full((batch,), context, dtype=torch.int32),
        block_table=shuffled_table(batch, blocks_each),
        slots=shuffled_table(batch, 1).flatten(),
    )
    seen = batch * sum(shape.seen(position) for position in range(context - new_tokens, context))
    scoring = CompressedScoring(
        scale=shape.width**-0.5, sinks_H=torch.zeros(shape.num_heads), pooling=None
    )
    tables = (angles_PR.cos(), angles_PR.sin())
    return KernelJob(
        kernel="decode attention" if new_tokens == 1 else "prefill attention",
        case=f"{shape}, {batch} x {context}",
        calls=[
            partial(
                append_and_attend_rows,
                query_THW, row_TW, layer, step, layout=layout, tables=tables, scoring=scoring,
            )
            for layer in layers.fill_(0x3F).view(num_layers, layer_bytes)
        ],
        bytes_per_call=batch * (shape.seen(context - 1) + new_tokens - 1)
        * shape.width * shape.dtype.itemsize,
        flop_per_call=4 * seen * shape.num_heads * shape.width,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """A layer of states: Gated DeltaNet, Kimi Delta Attention (per channel), Mamba-2 (no delta)."""

    num_groups: int = 16
    num_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    per_channel: bool = False
    delta: bool = True
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.num_heads, self.key_dim, self.value_dim)

    def __str__(self) -> str:
        kind = "kimi" if self.per_channel else "deltanet" if self.delta else "mamba"
        size = f"{self.num_heads}/{self.num_groups} x {self.key_dim} x {self.value_dim}"
        return f"{kind} {size} {str(self.state_dtype).removeprefix('torch.')}"


def scan_job(
    shape: StateShape, batch: int, new_tokens: int, device: torch.device | None = None
) -> KernelJob:
    """`new_tokens` of each of `batch` sequences: a step if one, else whole prompts.

    The states are read and written once. A token takes 7 operations for each element of
    a state (decay, update, two products), 5 without the delta rule.

    Args:
        device: Measures its kernels instead of those of the CPU.
    """
    tokens, elements = batch * new_tokens, math.prod(shape.state_shape)
    decays = (tokens, shape.num_heads) + ((shape.key_dim,) if shape.per_channel else ())
    past = 100 if new_tokens == 1 else 0
    query_TGK, key_TGK = torch.randn(2, tokens, shape.num_groups, shape.key_dim, device=device).to(
        shape.dtype
    )
    value_THV = torch.randn(tokens, shape.num_heads, shape.value_dim, device=device).to(shape.dtype)
    log_decay = -torch.rand(decays, device=device) / 10
    gain_TH = torch.rand(tokens, shape.num_heads, device=device)
    sequences = AttentionBatch(
        query_start=torch.arange(0, tokens + 1, new_tokens, dtype=torch.int32),
        context_tokens=torch.full((batch,), past + new_tokens, dtype=torch.int32),
        block_table=torch.empty(0, 0, dtype=torch.int32),
        slots=shuffled_table(batch, 1).flatten(),
    )
    prepared: AttentionBatch | StateBatch = sequences
    if device is None:
        layers = _state_layers(shape, batch)
    else:
        size = (batch, *shape.state_shape)
        layers = [torch.full(size, STATE, dtype=shape.state_dtype, device=device)]
        indices = StateBatch.of(sequences, device, has_channel_decays=shape.per_channel)
        prepared = to_device(indices, device)
    return KernelJob(
        kernel="state step" if new_tokens == 1 else "state prefill",
        case=f"{shape}, {batch} x {new_tokens}",
        calls=[
            partial(
                scan, query_TGK, key_TGK, value_THV, log_decay, gain_TH, states, prepared,
                scale=shape.key_dim**-0.5, delta=shape.delta, normalize=shape.delta,
            )
            for states in layers
        ],
        bytes_per_call=2 * shape.state_dtype.itemsize * batch * elements,
        flop_per_call=(7 if shape.delta else 5) * tokens * elements,
        updates=True,
    )  # fmt: skip


def _state_layers(shape: StateShape, batch: int) -> list[Tensor]:
    layer_bytes = shape.state_dtype.itemsize * batch * math.prod(shape.state_shape)
    num_layers = ceil_div(MIN_CACHE_BYTES, layer_bytes)
    layers = HostArena(num_layers * layer_bytes).allocate(num_layers * layer_bytes)
    shaped = layers.view(shape.state_dtype).view(num_layers, batch, *shape.state_shape)
    return list(shaped.fill_(STATE))


MIN_WEIGHT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int

    @property
    def parameters(self) -> int:
        return 3 * self.hidden_size * self.expert_size

    def __str__(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size} x {self.expert_size}) top-{self.top_k}"


def experts_job(
    shape: ExpertsShape,
    num_tokens: int,
    layers: Sequence[Experts] | None = None,
    *,
    kernel: str = "experts",
    expert_bytes: int | None = None,
) -> KernelJob:
    """The experts of one layer, with random routing that is the same for all layers."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_TH = torch.randn(num_tokens, shape.hidden_size, generator=generator).bfloat16()
    logits_TE = torch.randn(num_tokens, shape.num_experts, generator=generator)
    topk_weights_TK, topk_ids_TK = logits_TE.softmax(-1).topk(shape.top_k)
    num_hit = int((torch.bincount(topk_ids_TK.reshape(-1)) > 0).sum())
    return KernelJob(
        kernel=kernel,
        case=f"{shape}, {num_tokens} tokens",
        calls=[
            partial(layer, hidden_TH, topk_ids_TK.int(), topk_weights_TK)
            for layer in layers or make_expert_layers(shape)
        ],
        bytes_per_call=(expert_bytes or 2 * shape.parameters) * num_hit,
        flop_per_call=2 * num_tokens * shape.top_k * shape.parameters,
    )


def linear_job(
    in_features: int, out_features: int, num_tokens: int, layers: Sequence[Linear] | None = None
) -> KernelJob:
    parameters = in_features * out_features
    hidden_TI = torch.randn(num_tokens, in_features).bfloat16()
    return KernelJob(
        kernel="projection",
        case=f"{in_features} x {out_features}, {num_tokens} tokens",
        calls=[
            partial(layer, hidden_TI)
            for layer in layers or make_linear_layers(in_features, out_features)
        ],
        bytes_per_call=2 * parameters,
        flop_per_call=2 * num_tokens * parameters,
    )


def make_expert_layers(shape: ExpertsShape) -> list[Experts]:
    """Layers of the same random experts, each in its own memory."""
    size = (shape.num_experts, shape.expert_size, shape.hidden_size)
    gate_EFH, up_EFH = _random_weights(size), _random_weights(size)
    down_EHF = _random_weights((size[0], size[2], size[1]))
    return [
        make_experts(
            gate_EFH.clone(),
            up_EFH.clone(),
            down_EHF.clone(),
            activation="silu",
            allocate=allocate_huge_pages,
        )
        for _ in range(ceil_div(MIN_WEIGHT_BYTES, 2 * shape.num_experts * shape.parameters))
    ]


def make_linear_layers(in_features: int, out_features: int) -> list[Linear]:
    weight_OI = _random_weights((out_features, in_features))
    return [
        make_linear(weight_OI.clone(), None, allocate_huge_pages)
        for _ in range(ceil_div(MIN_WEIGHT_BYTES, weight_OI.nbytes))
    ]


def allocate_huge_pages(num_bytes: int) -> Tensor:
    """Anonymous memory on huge pages; lives as long as the tensor."""
    return HostArena(num_bytes).allocate(num_bytes)


def _random_weights(size: tuple[int, ...]) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.03)


EXPONENT = 127  # of 1, as E8M0


def random_matrix(
    stored: WeightFormat, shape: tuple[int, int], generator: torch.Generator | None = None
) -> StoredMatrix:
    """A matrix of random codes and scales; products with it are about as large as the inputs."""
    pieces = stored.pieces(*shape)
    drawn = {piece.name: _random_piece(stored, piece, shape, generator) for piece in pieces}
    matrix = StoredMatrix(format=stored, shape=shape, pieces=drawn)
    factor = 1 / (float(as_tensor(matrix, torch.float32).norm()) / math.sqrt(shape[0]))
    if "tensor_scale" in drawn:
        drawn["tensor_scale"] *= factor
    elif drawn["scales"].dtype == torch.uint8:  # exponents
        drawn["scales"] += round(math.log2(factor))
    else:
        drawn["scales"] *= factor
    return matrix


def _random_piece(
    stored: WeightFormat, piece: Piece, shape: tuple[int, int], generator: torch.Generator | None
) -> Tensor:
    dtype, size = TORCH_DTYPES[piece.dtypes[0]], piece.shape
    if piece.name == "tensor_scale":
        return torch.ones(size, dtype=dtype)
    if piece.name == "shape":
        return torch.tensor(shape, dtype=dtype)
    if piece.name == "order":
        group_size = stored.group_size if isinstance(stored, Gptq | PackedInt4) else 0
        return torch.arange(shape[1], dtype=dtype) // (group_size or shape[1])
    if piece.name == "scales":
        if dtype == torch.uint8:
            return torch.randint(EXPONENT - 1, EXPONENT + 2, size, dtype=dtype, generator=generator)
        return (0.5 + torch.rand(size, generator=generator)).to(dtype)
    width = (*size[:-1], size[-1] * dtype.itemsize)
    codes = torch.randint(256, width, dtype=torch.uint8, generator=generator)
    if dtype == torch.float8_e4m3fn:
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    return codes.view(dtype)
