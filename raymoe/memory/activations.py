"""What a pass writes between its operations, on the device and on the host, allocated once.

T tokens of a pass, W tokens of a wave, H hidden, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe.kernels.cpu_rope import Projected
from raymoe.kernels.paged_kv import KvLayout
from raymoe.specs.model import ModelSpec, MoeSpec

Allocate = Callable[[int], Tensor]  # bytes -> uint8 tensor

STAGED_WAVES = 2  # KV of this many waves is on the device at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSizes:
    """How much of everything.

    Attributes:
        pass_tokens: Most tokens of a pass (T).
        wave_tokens: Most tokens of a wave (W).
        ring: Waves whose attention is under way at once.
        staged_blocks: KV blocks of one wave on the device; 0 if the device never attends.
    """

    pass_tokens: int
    wave_tokens: int
    ring: int
    staged_blocks: int


class WaveActivations:
    """Between the operations around attention, of one wave."""

    def __init__(
        self, spec: ModelSpec, tokens: int, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        self.num_tokens = tokens
        attention = spec.layers[0].grouped_attention
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self._projected = Projected(
            *(
                _tensor((tokens, count, dim), dtype, allocate)
                for count in (heads, kv_heads, kv_heads)
            )
        )
        self._attention_WX = _tensor((tokens, heads * dim), dtype, allocate)

    def projected(self, num_tokens: int) -> Projected:
        """Queries, keys and values of the first tokens."""
        return Projected(*(tensor[:num_tokens] for tensor in self._projected))

    def attention(self, num_tokens: int) -> Tensor:
        """Attention output of the first tokens, [num_tokens, heads * head_dim]."""
        return self._attention_WX[:num_tokens]


class HostActivations:
    """In pinned memory: embedded tokens of all waves, and a ring of what lies around attention."""

    def __init__(
        self, spec: ModelSpec, sizes: ActivationSizes, *, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        """Take everything from `allocate`."""
        self.embedded_TH = _tensor((sizes.pass_tokens, spec.hidden_size), dtype, allocate)
        self.ring = [
            WaveActivations(spec, sizes.wave_tokens, dtype, allocate) for _ in range(sizes.ring)
        ]


class PassActivations:
    """On the device: hidden states of all waves, and a ring of what lies around attention."""

    def __init__(
        self,
        spec: ModelSpec,
        sizes: ActivationSizes,
        layout: KvLayout,
        *,
        dtype: torch.dtype,
        allocate: Allocate,
    ) -> None:
        """Take everything from `allocate`."""
        top_k = max(
            (layer.ffn.top_k for layer in spec.layers if isinstance(layer.ffn, MoeSpec)), default=0
        )
        tokens, hidden = sizes.pass_tokens, spec.hidden_size
        self.hidden_TH = _tensor((tokens, hidden), dtype, allocate)
        self.normed_TH = _tensor((tokens, hidden), dtype, allocate)
        self.topk_ids_TK = _tensor((tokens, top_k), torch.int32, allocate)
        self.topk_weights_TK = _tensor((tokens, top_k), torch.float32, allocate)
        self.ring = [
            WaveActivations(spec, sizes.wave_tokens, dtype, allocate) for _ in range(sizes.ring)
        ]
        self.staged_kv = [
            _tensor((sizes.staged_blocks, *layout.block_shape), layout.dtype, allocate)
            for _ in range(STAGED_WAVES)
        ]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocate) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return allocate(num_bytes).view(dtype).view(shape)
