"""Hidden states of several streams that are read by gates of each channel.

T tokens, S streams, H hidden size, X = S H columns of all streams side by side, F factors of a
token. On a GPU each function is one launch of `gpu_gated_streams`, on cores native kernels compute
it; torch computes all other tensors: the references. Sums are float32 and rounded once.
"""

import torch
from torch import Tensor

from raymoe import _native
from raymoe.kernels.elementwise import native_reads, rms_norm, triton_runs_on
from raymoe.kernels.streams import native_mixes, row_pieces


def norm_streams(hidden_TX: Tensor, weight_X: Tensor, count: int, eps: float) -> Tensor:
    """Return RMS norms of the streams, times 1 + weight, [T, X], in a new tensor."""
    out_TX = hidden_TX.new_empty(hidden_TX.shape)
    if triton_runs_on(hidden_TX.device):
        from raymoe.kernels import gpu_gated_streams  # noqa: PLC0415 - needs Triton

        gpu_gated_streams.norm_streams(hidden_TX, weight_X, out_TX, count, eps).run()
        return out_TX
    if native_reads(hidden_TX, weight_X):
        streams = zip(
            *(x.tensor_split(count, -1) for x in (hidden_TX, weight_X, out_TX)), strict=True
        )
        for hidden_TH, weight_H, out_TH in streams:
            rms_norm(hidden_TH, weight_H, eps, 1.0, out=out_TH)
        return out_TX
    factor_SH = (1 + weight_X.float()).view(count, -1)
    for rows in row_pieces(len(hidden_TX)):
        wide_TSH = hidden_TX[rows].float().view(-1, count, factor_SH.shape[1])
        mean_TS1 = wide_TSH.square().mean(-1, keepdim=True)
        normed_TSH = wide_TSH * torch.rsqrt(mean_TS1 + eps) * factor_SH
        out_TX[rows] = normed_TSH.flatten(1).to(out_TX.dtype)
    return out_TX


def read_gated(normed_TX: Tensor, gates_TX: Tensor, count: int) -> Tensor:
    """Return the mean of the streams, each times the sigmoids of its gates, [T, H]."""
    out_TH = normed_TX.new_empty(len(normed_TX), normed_TX.shape[1] // count)
    if triton_runs_on(normed_TX.device):
        from raymoe.kernels import gpu_gated_streams  # noqa: PLC0415 - needs Triton

        gpu_gated_streams.read_gated(normed_TX, gates_TX, out_TH, count).run()
        return out_TH
    if native_mixes(normed_TX, count) and native_reads(gates_TX):
        _native.read_gated_streams(normed_TX, gates_TX, out_TH)
        return out_TH
    for rows in row_pieces(len(normed_TX)):
        product_TX = gates_TX[rows].float().sigmoid().mul_(normed_TX[rows].float())
        out_TH[rows] = product_TX.view(-1, count, out_TH.shape[1]).mean(1).to(out_TH.dtype)
    return out_TH


def add_gated_(hidden_TX: Tensor, delta_TH: Tensor, logits_TF: Tensor, count: int) -> None:
    """Add the result of a block to each stream, times twice a sigmoid, in place.

    Args:
        logits_TF: float32; those of the streams are the first of each row, `count` times too large.
    """
    if triton_runs_on(hidden_TX.device):
        from raymoe.kernels import gpu_gated_streams  # noqa: PLC0415 - needs Triton

        gpu_gated_streams.add_gated(hidden_TX, delta_TH, logits_TF, count).run()
        return
    gates_TS = logits_TF[:, :count] / count
    if native_mixes(hidden_TX, count) and native_reads(delta_TH):
        _native.add_to_streams(hidden_TX, delta_TH, gates_TS, None, 2.0, 0.0)
        return
    factors_TS1 = 2 * gates_TS.sigmoid()[..., None]
    for rows in row_pieces(len(hidden_TX)):
        streams_TSH = hidden_TX[rows].float().view(-1, count, delta_TH.shape[1])
        sum_TSH = streams_TSH + factors_TS1[rows] * delta_TH[rows, None].float()
        hidden_TX[rows] = sum_TSH.flatten(1).to(hidden_TX.dtype)
