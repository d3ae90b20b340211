"""RMS norm on the CPU, with the residual addition that precedes it, in one pass over memory.

T tokens, H hidden. Roundings are those of Hugging Face's LlamaRMSNorm and its copies: float32
inside, rounded to the input type, then multiplied by the weight in that type.
"""

import torch
from torch import Tensor

from raymoe import _native

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rms_norm(hidden_TH: Tensor, weight_H: Tensor | None, eps: float) -> Tensor:
    """Norm of every row; returns a new contiguous [T, H].

    Args:
        hidden_TH: float32, float16 or bfloat16; rows may be strided.
        weight_H: Factors in the same type; None for none.
        eps: Added to the mean of squares.
    """
    if not _is_native(hidden_TH, weight_H):
        return rms_norm_reference(hidden_TH, weight_H, eps)
    out_TH = torch.empty(hidden_TH.shape, dtype=hidden_TH.dtype)
    _native.rms_norm(hidden_TH, None, weight_H, eps, out_TH)
    return out_TH


def add_rms_norm_(
    residual_TH: Tensor, delta_TH: Tensor, weight_H: Tensor | None, eps: float
) -> Tensor:
    """Add `delta_TH` to `residual_TH` in place, then norm it; returns a new contiguous [T, H]."""
    same = delta_TH.shape == residual_TH.shape and delta_TH.dtype == residual_TH.dtype
    if not (same and _is_native(residual_TH, weight_H) and _is_native(delta_TH, weight_H)):
        return rms_norm_reference(residual_TH.add_(delta_TH), weight_H, eps)
    out_TH = torch.empty(residual_TH.shape, dtype=residual_TH.dtype)
    _native.rms_norm(residual_TH, delta_TH, weight_H, eps, out_TH)
    return out_TH


def _is_native(hidden_TH: Tensor, weight_H: Tensor | None) -> bool:
    return (
        hidden_TH.ndim == 2
        and hidden_TH.dtype in FLOAT_DTYPES
        and hidden_TH.is_cpu
        and (hidden_TH.shape[1] == 1 or hidden_TH.stride(1) == 1)
        and not (hidden_TH.requires_grad and torch.is_grad_enabled())
        and (weight_H is None or (weight_H.dtype == hidden_TH.dtype and weight_H.is_contiguous()))
    )


def rms_norm_reference(hidden_TH: Tensor, weight_H: Tensor | None, eps: float) -> Tensor:
    """The plain reference of `rms_norm`."""
    wide_TH = hidden_TH.float()
    mean_T1 = wide_TH.pow(2).mean(-1, keepdim=True)
    normed_TH = (wide_TH * torch.rsqrt(mean_T1 + eps)).to(hidden_TH.dtype)
    return normed_TH if weight_H is None else weight_H * normed_TH
