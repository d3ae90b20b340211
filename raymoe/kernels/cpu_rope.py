"""From the fused QKV projection to rotated queries and keys on the CPU, in one pass over memory.

T tokens, H query heads, G KV heads, D head dimension, X = (H + 2 G) D, P positions,
R half of the rotated dimensions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_norm import FLOAT_DTYPES, rms_norm_reference

MAX_NATIVE_HEAD_DIM = 512


class Projected(NamedTuple):
    """Queries [T, H, D], keys and values [T, G, D] of a pass; contiguous.

    In latent attention the cached row of a token is its one key, and its value has no dimensions.
    """

    query_THD: Tensor
    key_TGD: Tensor
    value_TGD: Tensor


class Steps(NamedTuple):
    """What happens to a head: see `qkv_rope`; `clip` is infinity for none."""

    eps: float
    clip: float
    is_norm_after_rope: bool
    is_interleaved: bool


def qkv_rope(  # noqa: PLR0913 - an operator: its tensors are its arguments
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    clip: float | None = None,
    is_norm_after_rope: bool = False,
    is_interleaved: bool = False,
) -> Projected:
    """Split, norm queries and keys, clip all three, rotate queries and keys.

    The order and every rounding are those of Hugging Face's attention: for bfloat16 the cosines,
    sines, both products and their sum are rounded one by one.

    Args:
        qkv_TX: Queries, keys and values side by side; float32, float16 or bfloat16.
        positions_T: int32, each in [0, P); ValueError otherwise.
        cos_PR: Cosines by position, float32, multiplied by the attention scaling already; the
            first 2 R dimensions of every head rotate, the rest passes through.
        sin_PR: Sines, likewise.
        num_heads: H.
        num_kv_heads: G.
        head_dim: D.
        q_norm: Weight [D] for a norm of each head (Qwen3), [H * D] for one norm over all heads of
            a token (OLMoE), None for none.
        k_norm: Likewise, [D] or [G * D].
        eps: Of the norms.
        clip: Largest magnitude after the norms (OLMoE's `clip_qkv`), values included.
        is_norm_after_rope: The norms, of each head, follow the rotation instead (Hunyuan).
        is_interleaved: Neighbouring dimensions are a pair (DeepSeek, ERNIE), instead of dimensions
            R apart. What comes out has the first of all pairs before the second of all, in queries
            and keys alike: their products are the same.
    """
    tables = (cos_PR, sin_PR)
    sizes = (num_heads, num_kv_heads, head_dim)
    _check_width(qkv_TX, sizes)
    limit = math.inf if clip is None else clip
    steps = Steps(eps, limit, is_norm_after_rope, is_interleaved)
    norms = (q_norm, k_norm)
    if not _is_native(qkv_TX, positions_T, tables, norms):
        return qkv_rope_reference(
            qkv_TX, positions_T, tables, sizes=sizes, norms=norms, steps=steps
        )
    out = Projected(
        *(
            torch.empty(len(qkv_TX), heads, head_dim, dtype=qkv_TX.dtype)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
    )
    _native.qkv_rope(qkv_TX, positions_T, *tables, *norms, *out, eps, limit, *steps[2:])
    return out


def _check_width(qkv_TX: Tensor, sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = sizes
    width = (heads + 2 * kv_heads) * dim
    if qkv_TX.ndim != 2 or qkv_TX.shape[1] != width:
        raise ConfigError(
            f"qkv_rope: qkv has shape {tuple(qkv_TX.shape)}, expected [T, {width}] for {heads} "
            f"query and {kv_heads} KV heads of {dim}"
        )


def _is_native(
    qkv_TX: Tensor,
    positions_T: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
) -> bool:
    return (
        qkv_TX.dtype in FLOAT_DTYPES
        and qkv_TX.is_cpu
        and qkv_TX.stride(1) == 1
        and not (qkv_TX.requires_grad and torch.is_grad_enabled())
        and positions_T.dtype == torch.int32
        and all(table.dtype == torch.float32 and table.is_contiguous() for table in tables)
        and tables[0].shape[1] <= MAX_NATIVE_HEAD_DIM // 2
        and all(w is None or (w.dtype == qkv_TX.dtype and w.is_contiguous()) for w in norms)
    )


def qkv_rope_reference(
    qkv_TX: Tensor,
    positions_T: Tensor,
    tables: tuple[Tensor, Tensor],
    *,
    sizes: tuple[int, int, int],
    norms: tuple[Tensor | None, Tensor | None],
    steps: Steps,
) -> Projected:
    """The plain reference of `qkv_rope`; sizes are (H, G, D), norms those of queries and keys."""
    heads, kv_heads, dim = sizes
    angles = [t[positions_T.long(), None].to(qkv_TX.dtype) for t in tables]
    query_TY, key_TY, value_TY = torch.split(
        qkv_TX, [heads * dim, kv_heads * dim, kv_heads * dim], dim=1
    )
    rotated = []
    for part_TY, norm in zip((query_TY, key_TY), norms, strict=True):
        x_TY = part_TY if steps.is_norm_after_rope else _norm_heads(part_TY, norm, dim, steps.eps)
        x_TND = x_TY.clamp(-steps.clip, steps.clip).reshape(len(x_TY), part_TY.shape[1] // dim, dim)
        x_TND = rotate_heads(x_TND, *angles, is_interleaved=steps.is_interleaved)
        if steps.is_norm_after_rope and norm is not None:
            x_TND = rms_norm_reference(x_TND, norm, steps.eps)
        rotated.append(x_TND)
    value_TGD = value_TY.clamp(-steps.clip, steps.clip).reshape(len(value_TY), kv_heads, dim)
    return Projected(rotated[0], rotated[1], value_TGD)


def rotate_heads(
    heads_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, *, is_interleaved: bool
) -> Tensor:
    """Rotate the first 2 R dimensions of heads as `qkv_rope` does, on any device.

    Args:
        heads_TND: Any heads.
        cos_T1R: Cosines of each token, in the type of the heads.
        sin_T1R: Sines, likewise.
        is_interleaved: See `qkv_rope`.
    """
    parted_TND = _part_pairs(heads_TND, cos_T1R) if is_interleaved else heads_TND
    return _rotate(parted_TND, cos_T1R, sin_T1R)


def _norm_heads(x_TY: Tensor, weight: Tensor | None, head_dim: int, eps: float) -> Tensor:
    if weight is None:
        return x_TY
    span = x_TY.shape[1] if weight.numel() == x_TY.shape[1] else head_dim
    return rms_norm_reference(x_TY.reshape(-1, span), weight, eps).view(x_TY.shape)


def _part_pairs(heads_TND: Tensor, cos_T1R: Tensor) -> Tensor:
    """The first of all pairs of neighbours, then the second of all; what is not rotated stays."""
    end = 2 * cos_T1R.shape[-1]
    parts = (heads_TND[..., 0:end:2], heads_TND[..., 1:end:2], heads_TND[..., end:])
    return torch.cat(parts, dim=-1)


def _rotate(heads_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    half = cos_T1R.shape[-1]
    first, second = heads_TND[..., :half], heads_TND[..., half : 2 * half]
    rotated = (first * cos_T1R + -second * sin_T1R, second * cos_T1R + first * sin_T1R)
    return torch.cat([*rotated, heads_TND[..., 2 * half :]], dim=-1)
