"""Activation buffers of a step on the device and on the host, allocated once.

T tokens of a step, W tokens of a micro-batch, H hidden size (of all streams in hidden states and
embeddings), F factors of the streams, K experts per token, L width of what experts read: their
latent, or the hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from raymoe.kernels.elementwise import Projected, Routing
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.specs.attention.kind import TokenShapes, largest_sizes
from raymoe.specs.model import ModelSpec, MoeSpec

Allocate = Callable[[int], Tensor]  # bytes -> uint8 tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSizes:
    """Sizes of the activation buffers.

    Attributes:
        max_num_batched_tokens: Most tokens of a step (T).
        micro_batch_tokens: Most tokens of a micro-batch (W).
        ring: Micro-batches whose attention is in progress at once.
        staged_micro_batches: Micro-batches whose KV is on the device at once.
        staged_blocks: KV blocks of one micro-batch on the device; 0 if the device never attends.
        staged_slots: States of sequences that are staged with their KV, of one micro-batch.
        has_sums: Whether sums of expert outputs are kept between tasks of a layer.
        launch_tokens: Most tokens of a launch of the experts, where cores compute some; else 0.
        returned_sums: Launches for which the cores' sums are on the device at once.
    """

    max_num_batched_tokens: int
    micro_batch_tokens: int
    ring: int
    staged_micro_batches: int
    staged_blocks: int
    staged_slots: int = 0
    has_sums: bool = False
    launch_tokens: int = 0
    returned_sums: int = 0


class _TwoForms:
    def __init__(self, memory: Tensor, first: tuple[int, ...], rest: tuple[int, ...]) -> None:
        self._memory, self._first, self._rest = memory, first, rest
        self._stride = max(prod(first), prod(rest))

    def first(self, end: int) -> Tensor:
        return self._memory[: end * prod(self._first)].view(end, *self._first)

    def rest(self, begin: int, end: int) -> Tensor:
        count, offset = end - begin, begin * self._stride
        return self._memory[offset : offset + count * prod(self._rest)].view(count, *self._rest)


class LayerActivations:
    """Attention inputs and outputs of one micro-batch in one layer.

    The host attends to the first tokens, in absorbed form, and the device to the others. Both use
    the same rows of keys and values.
    """

    def __init__(self, tokens: int, shapes: TokenShapes, memory: Sequence[Tensor]) -> None:
        query, key, value, result = memory
        self.has_one_form = (shapes.query, shapes.output) == (
            shapes.absorbed_query,
            shapes.absorbed_output,
        )
        self._query = _TwoForms(query, shapes.absorbed_query, shapes.query)
        self._key, self._value = (
            part[: tokens * prod(shape)].view(tokens, *shape)
            for part, shape in ((key, shapes.key), (value, shapes.value))
        )
        self._result = _TwoForms(result, (shapes.absorbed_output,), (shapes.output,))

    def absorbed(self, end: int) -> Projected:
        return Projected(self._query.first(end), *self.cached(0, end))

    def projected(self, begin: int, end: int) -> Projected:
        return Projected(self._query.rest(begin, end), *self.cached(begin, end))

    def cached(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return self._key[begin:end], self._value[begin:end]

    def absorbed_result(self, end: int) -> Tensor:
        return self._result.first(end)

    def result(self, begin: int, end: int) -> Tensor:
        return self._result.rest(begin, end)


class MicroBatchActivations:
    """Memory of one micro-batch, which every layer uses in its own shapes."""

    def __init__(
        self, spec: ModelSpec, tokens: int, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        self.num_tokens = tokens
        shapes = [layer.attention.token_shapes for layer in spec.layers]
        memory = [_tensor((tokens * size,), dtype, allocate) for size in largest_sizes(set(shapes))]
        kinds = {each: LayerActivations(tokens, each, memory) for each in set(shapes)}
        self._layers = [kinds[each] for each in shapes]

    def layer(self, i: int) -> LayerActivations:
        return self._layers[i]


class HostActivations:
    """Pinned memory: embeddings of all micro-batches, and a ring of attention buffers.

    Where cores compute experts, also their input, routing and float32 sums.
    """

    def __init__(
        self, spec: ModelSpec, sizes: ActivationSizes, *, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        tokens, width = sizes.max_num_batched_tokens, spec.expert_input_size
        self.embedded_TH = _tensor((tokens, spec.residual_size), dtype, allocate)
        rows = tokens if sizes.launch_tokens else 0
        self.rows_TL = _tensor((rows, width), dtype, allocate)
        self.sum_TL = _tensor((rows, width), torch.float32, allocate)
        self.topk_ids_TK, self.topk_weights_TK = _routing(spec, rows, allocate)
        self.ring = [
            MicroBatchActivations(spec, sizes.micro_batch_tokens, dtype, allocate)
            for _ in range(sizes.ring)
        ]

    def routing(self, rows: slice, top_k: int) -> Routing:
        """Experts of some tokens in a layer that chooses `top_k`."""
        return _routing_of(self.topk_ids_TK[rows], self.topk_weights_TK[rows], top_k)


class DeviceActivations:
    """Device memory: hidden states of all micro-batches, and a ring of attention buffers."""

    def __init__(
        self,
        spec: ModelSpec,
        sizes: ActivationSizes,
        layouts: Sequence[CacheLayout],
        *,
        dtype: torch.dtype,
        allocate: Allocate,
    ) -> None:
        tokens, hidden = sizes.max_num_batched_tokens, spec.hidden_size
        width = spec.expert_input_size
        self.hidden_TH = _tensor((tokens, spec.residual_size), dtype, allocate)
        self.normed_TH = _tensor((tokens, hidden), dtype, allocate)
        self.latent_TL: Tensor | None = None
        if spec.has_latent_experts:
            self.latent_TL = _tensor((tokens, width), dtype, allocate)
        self.factors_TF: Tensor | None = None
        if spec.streams is not None:
            size = (tokens, spec.streams.num_factors)
            self.factors_TF = _tensor(size, torch.float32, allocate)
        self.topk_ids_TK, self.topk_weights_TK = _routing(spec, tokens, allocate)
        rows = tokens if sizes.has_sums else 0
        self.expert_sum_TL = _tensor((rows, width), torch.float32, allocate)
        self._returned_sums = [
            _tensor((sizes.launch_tokens, width), torch.float32, allocate)
            for _ in range(sizes.returned_sums)
        ]
        self.ring = [
            MicroBatchActivations(spec, sizes.micro_batch_tokens, dtype, allocate)
            for _ in range(sizes.ring)
        ]
        self._layouts, self._staged_blocks = layouts, sizes.staged_blocks
        self._staged_slots = sizes.staged_slots
        num_bytes = max(map(self._staged_bytes, layouts))
        self._staged_kv = [allocate(num_bytes) for _ in range(sizes.staged_micro_batches)]

    def _staged_bytes(self, layout: CacheLayout) -> int:
        of_slots = self._staged_slots * layout.sequence_bytes
        return self._staged_blocks * layout.block_bytes + of_slots

    def routing(self, rows: slice, top_k: int) -> Routing:
        """Experts of some tokens in a layer that chooses `top_k`."""
        return _routing_of(self.topk_ids_TK[rows], self.topk_weights_TK[rows], top_k)

    def returned_sum(self, number: int, tokens: int) -> Tensor:
        """Float32 sums of the cores' experts for the tokens of a launch."""
        return self._returned_sums[number][:tokens]

    def staged_kv(self, micro_batch: int, layer: int) -> Tensor:
        """KV blocks of a micro-batch in a layer, [N, *block_shape]; bytes with those of states."""
        layout = self._layouts[layer]
        memory = self._staged_kv[micro_batch][: self._staged_bytes(layout)]
        if layout.sequence_bytes:
            return memory
        return memory.view(layout.dtype).view(self._staged_blocks, *layout.block_shape)


def _routing(spec: ModelSpec, tokens: int, allocate: Allocate) -> Routing:
    top_k = max(
        (layer.ffn.top_k for layer in spec.layers if isinstance(layer.ffn, MoeSpec)), default=0
    )
    ids_TK = _tensor((tokens, top_k), torch.int32, allocate)
    return Routing(ids_TK, _tensor((tokens, top_k), torch.float32, allocate))


def _routing_of(ids_TK: Tensor, weights_TK: Tensor, top_k: int) -> Routing:
    if top_k == ids_TK.shape[1]:
        return Routing(ids_TK, weights_TK)
    return Routing(ids_TK[:, :top_k], weights_TK[:, :top_k])


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocate) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return allocate(num_bytes).view(dtype).view(shape)
