"""Which kernels attend on a device, ours in Triton or torch's, and how large their tiles are.

Triton is imported where a GPU is used, and nowhere else.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

OLDEST_CAPABILITY = (7, 5)
TENSOR_CORES_SINCE = (8, 0)  # Triton leaves those of Turing alone; see `device_experts_tiles`
WARPGROUPS_SINCE = (9, 0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Positions of the context that one program reads for a token that comes alone. A constant, cut at
# multiples of itself, so that the order of a token's sums does not depend on the batch.
SPLIT_POSITIONS = 1024
_FEWEST_ROWS = 16  # of a product


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCompute:
    """How our kernels attend.

    Attributes:
        dtype: Type of queries and results.
        dot: Type in which the kernels multiply: that of tensor cores, or float32 without them,
            which is what Triton multiplies in there.
        has_warpgroups: Whether four warps multiply together, as on Hopper.
    """

    dtype: torch.dtype
    dot: torch.dtype
    has_warpgroups: bool = False

    @classmethod
    def on(cls, capability: tuple[int, int], dtype: torch.dtype) -> "AttentionCompute":
        """On a GPU of this capability: (7, 5) is Turing, (8, 0) Ampere, (9, 0) Hopper."""
        return cls(
            dtype=dtype,
            dot=dtype if capability >= TENSOR_CORES_SINCE else torch.float32,
            has_warpgroups=capability >= WARPGROUPS_SINCE,
        )

    @property
    def has_tensor_cores(self) -> bool:
        """Whether they multiply."""
        return self.dot != torch.float32

    @property
    def tile_tokens(self) -> int:
        """Neighbours that one program attends for."""
        return 64 if self.has_tensor_cores else 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """What one program multiplies at once.

    Attributes:
        heads: Query heads of one KV head.
        rows: Queries: tokens times heads.
        positions: Of the context.
        step: Dimensions of queries and keys in one product.
        warps: Of a program.
        stages: Steps whose loads are under way at once.
    """

    heads: int
    rows: int
    positions: int
    step: int
    warps: int
    stages: int


def attention_tile(
    compute: AttentionCompute, *, tokens: int, group: int, dims: tuple[int, int], pair: int
) -> AttentionTile:
    """The tile for so many tokens of a sequence; fixed by the model and the GPU alone.

    Neighbours share the keys that they read, so one query head at a time is enough for them; a
    token that is alone brings all query heads of a KV head, as far as registers go.

    Args:
        compute: How.
        tokens: Tokens of a tile.
        group: Query heads of a KV head.
        dims: Of a key and of a value.
        pair: Elements that lie together.
    """
    key_dim, value_dim = dims
    is_wide = value_dim > 256
    if compute.has_tensor_cores:
        fewest_rows, most_rows = _FEWEST_ROWS, 32 if is_wide else 64
    else:
        fewest_rows = most_rows = _FEWEST_ROWS // 2 if is_wide else _FEWEST_ROWS
    heads = 1 if tokens > 1 else min(power_of_two(group), most_rows)
    rows = max(tokens * heads, fewest_rows)
    if not compute.has_tensor_cores:
        # A thread keeps all its operands of a product in registers: as few as may be.
        return AttentionTile(
            heads=heads,
            rows=rows,
            positions=16 * pair,
            step=16 * pair,
            warps=8 if is_wide or rows > _FEWEST_ROWS else 4,
            stages=1,
        )
    # What fits registers, by the compiler: one warpgroup for bfloat16, whose pairs it takes apart.
    takes_four = compute.has_warpgroups and compute.dot == torch.bfloat16
    return AttentionTile(
        heads=heads,
        rows=rows,
        positions=64 if value_dim <= 128 else 16 if is_wide else 32,
        step=max(min(key_dim & -key_dim, 128), 16 * pair),
        warps=8 if value_dim > 128 and rows > _FEWEST_ROWS and not takes_four else 4,
        stages=2,
    )


def attention_compute(device: torch.device, dtype: torch.dtype) -> AttentionCompute | None:
    """How our kernels attend on a device; None where torch's do.

    They do on a GPU from Turing on, where Triton is installed.
    """
    if device.type != "cuda" or find_spec("triton") is None or dtype not in DTYPES:
        return None
    capability = torch.cuda.get_device_capability(device)
    return AttentionCompute.on(capability, dtype) if capability >= OLDEST_CAPABILITY else None


def power_of_two(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << (number - 1).bit_length()
