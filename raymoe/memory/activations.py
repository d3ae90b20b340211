"""What a step writes between its operations, on the device and on the host, allocated once.

T tokens of a step, W tokens of a micro-batch, H hidden, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from raymoe.kernels.cpu_elementwise import Projected
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.specs.model import ModelSpec, MoeSpec

Allocate = Callable[[int], Tensor]  # bytes -> uint8 tensor

STAGED_MICRO_BATCHES = 2  # KV of this many micro-batches is on the device at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSizes:
    """How much of everything.

    Attributes:
        max_num_batched_tokens: Most tokens of a step (T).
        micro_batch_tokens: Most tokens of a micro-batch (W).
        ring: Micro-batches whose attention is under way at once.
        staged_blocks: KV blocks of one micro-batch on the device; 0 if the device never attends.
    """

    max_num_batched_tokens: int
    micro_batch_tokens: int
    ring: int
    staged_blocks: int


class _TwoForms:
    def __init__(
        self,
        tokens: int,
        first: tuple[int, ...],
        rest: tuple[int, ...],
        *,
        dtype: torch.dtype,
        allocate: Allocate,
    ) -> None:
        self._first, self._rest = first, rest
        self._stride = max(prod(first), prod(rest))
        self._memory = _tensor((tokens * self._stride,), dtype, allocate)

    def first(self, end: int) -> Tensor:
        return self._memory[: end * prod(self._first)].view(end, *self._first)

    def rest(self, begin: int, end: int) -> Tensor:
        count, offset = end - begin, begin * self._stride
        return self._memory[offset : offset + count * prod(self._rest)].view(count, *self._rest)


class MicroBatchActivations:
    """Between the operations around attention, of one micro-batch.

    The first tokens are those that the host attends to, in absorbed form; the others are the
    device's. What goes into the cache is the same for both.
    """

    def __init__(
        self, spec: ModelSpec, tokens: int, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        self.num_tokens = tokens
        shapes = spec.layers[0].attention.token_shapes
        self._query = _TwoForms(
            tokens, shapes.absorbed_query, shapes.query, dtype=dtype, allocate=allocate
        )
        self._key = _tensor((tokens, *shapes.key), dtype, allocate)
        self._value = _tensor((tokens, *shapes.value), dtype, allocate)
        self._result = _TwoForms(
            tokens, (shapes.absorbed_output,), (shapes.output,), dtype=dtype, allocate=allocate
        )

    def absorbed(self, end: int) -> Projected:
        """Absorbed queries, keys and values of the tokens before `end`."""
        return Projected(self._query.first(end), *self.cached(0, end))

    def projected(self, begin: int, end: int) -> Projected:
        """Queries, keys and values of tokens from `begin` on."""
        return Projected(self._query.rest(begin, end), *self.cached(begin, end))

    def cached(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens from `begin` on."""
        return self._key[begin:end], self._value[begin:end]

    def absorbed_result(self, end: int) -> Tensor:
        """Absorbed results of attention for the tokens before `end`, [end, X]."""
        return self._result.first(end)

    def result(self, begin: int, end: int) -> Tensor:
        """Results of attention for tokens from `begin` on, [end - begin, X]."""
        return self._result.rest(begin, end)


class HostActivations:
    """In pinned memory: embedded tokens of all micro-batches, a ring of attention's data."""

    def __init__(
        self, spec: ModelSpec, sizes: ActivationSizes, *, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        self.embedded_TH = _tensor(
            (sizes.max_num_batched_tokens, spec.hidden_size), dtype, allocate
        )
        self.ring = [
            MicroBatchActivations(spec, sizes.micro_batch_tokens, dtype, allocate)
            for _ in range(sizes.ring)
        ]


class StepActivations:
    """On the device: hidden states of all micro-batches, a ring of what lies around attention."""

    def __init__(
        self,
        spec: ModelSpec,
        sizes: ActivationSizes,
        layout: CacheLayout,
        *,
        dtype: torch.dtype,
        allocate: Allocate,
    ) -> None:
        top_k = max(
            (layer.ffn.top_k for layer in spec.layers if isinstance(layer.ffn, MoeSpec)), default=0
        )
        tokens, hidden = sizes.max_num_batched_tokens, spec.hidden_size
        self.hidden_TH = _tensor((tokens, hidden), dtype, allocate)
        self.normed_TH = _tensor((tokens, hidden), dtype, allocate)
        self.topk_ids_TK = _tensor((tokens, top_k), torch.int32, allocate)
        self.topk_weights_TK = _tensor((tokens, top_k), torch.float32, allocate)
        self.ring = [
            MicroBatchActivations(spec, sizes.micro_batch_tokens, dtype, allocate)
            for _ in range(sizes.ring)
        ]
        self.staged_kv = [
            _tensor((sizes.staged_blocks, *layout.block_shape), layout.dtype, allocate)
            for _ in range(STAGED_MICRO_BATCHES)
        ]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocate) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return allocate(num_bytes).view(dtype).view(shape)
