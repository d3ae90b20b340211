"""Hidden states of several streams: what a block reads of them, and how its result is added.

T tokens, S streams, H hidden size, X = S H columns of all streams side by side, F factors of a
token. On a GPU each function is one launch of `gpu_streams`, on cores a native kernel; torch
computes all other tensors: the references.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.kernels.cpu_linear import Linear
from raymoe.kernels.elementwise import native_reads, triton_runs_on
from raymoe.specs.streams import StreamsSpec

_ROWS_AT_ONCE = 64  # of float32 copies, which stay in the caches of cores


class MixerWeights(NamedTuple):
    """The weights of one block.

    Attributes:
        matrix: [F, X], or a projection that writes float32.
        scale_F: float32 factors of its products, and `base_F` what is added to them.
    """

    matrix: Linear | Tensor
    scale_F: Tensor
    base_F: Tensor


def stream_logits(
    hidden_TX: Tensor, weights: MixerWeights, spec: StreamsSpec, out: Tensor | None = None
) -> Tensor:
    """Return float32 logits of the factors: `pre` [S], `post` [S], matrix [S, S] of each token.

    They are products with the RMS norm of all streams, scaled and shifted.

    Args:
        out: Receives the result; contiguous.
    """
    logits_TF = out
    if logits_TF is None:
        size = (len(hidden_TX), spec.num_factors)
        logits_TF = torch.empty(size, dtype=torch.float32, device=hidden_TX.device)
    matrix = weights.matrix
    if isinstance(matrix, Tensor) and triton_runs_on(hidden_TX.device):
        from raymoe.kernels import gpu_streams  # noqa: PLC0415 - needs Triton

        gpu_streams.stream_logits(hidden_TX, matrix, weights, logits_TF, spec.norm_eps).run()
        return logits_TF
    if isinstance(matrix, Tensor):
        for rows in row_pieces(len(hidden_TX)):
            logits_TF[rows] = functional.linear(hidden_TX[rows].float(), matrix.float())
    else:
        matrix(hidden_TX, logits_TF)
    if native_reads(hidden_TX):
        scale_F, base_F = weights.scale_F, weights.base_F
        _native.stream_logits(hidden_TX, logits_TF, scale_F, base_F, spec.norm_eps)
        return logits_TF
    for rows in row_pieces(len(hidden_TX)):
        mean_T1 = hidden_TX[rows].float().square().mean(-1, keepdim=True)
        logits_TF[rows] *= torch.rsqrt(mean_T1 + spec.norm_eps)
    return logits_TF.mul_(weights.scale_F).add_(weights.base_F)


def read_streams(hidden_TX: Tensor, logits_TF: Tensor, spec: StreamsSpec) -> Tensor:
    """Return the weighted sum of the streams that a block reads, [T, H], in a new tensor."""
    out_TH = hidden_TX.new_empty(len(hidden_TX), hidden_TX.shape[1] // spec.count)
    if triton_runs_on(hidden_TX.device):
        from raymoe.kernels import gpu_streams  # noqa: PLC0415 - needs Triton

        gpu_streams.read_streams(hidden_TX, logits_TF, out_TH, spec).run()
        return out_TH
    pre_TS = logits_TF[:, : spec.count]
    if native_mixes(hidden_TX, spec.count):
        _native.read_streams(hidden_TX, pre_TS, spec.eps, out_TH)
        return out_TH
    pre_TS1 = (pre_TS.sigmoid() + spec.eps)[..., None]
    for rows in row_pieces(len(hidden_TX)):
        streams_TSH = _streams(hidden_TX[rows], spec.count)
        out_TH[rows] = (pre_TS1[rows] * streams_TSH.float()).sum(1).to(out_TH.dtype)
    return out_TH


def add_to_streams_(
    hidden_TX: Tensor, delta_TH: Tensor, logits_TF: Tensor, spec: StreamsSpec
) -> None:
    """Mix the streams by the matrix and add the result of the block to each, in place.

    Factors, products with them and both sums are rounded to the type of the streams each. Without a
    matrix only the result is rounded.
    """
    if triton_runs_on(hidden_TX.device):
        from raymoe.kernels import gpu_streams  # noqa: PLC0415 - needs Triton

        gpu_streams.add_to_streams(hidden_TX, delta_TH, logits_TF, spec).run()
        return
    count, dtype = spec.count, hidden_TX.dtype
    post_TS = logits_TF[:, count : 2 * count]
    if native_mixes(hidden_TX, count) and native_reads(delta_TH):
        matrix_TSS = mixing_matrix(logits_TF, spec) if spec.is_mixed else None
        _native.add_to_streams(hidden_TX, delta_TH, post_TS, matrix_TSS, spec.magnitude, spec.eps)
        return
    post_TS1 = (spec.magnitude * post_TS.sigmoid())[..., None]
    if not spec.is_mixed:
        for rows in row_pieces(len(hidden_TX)):
            streams_TSH = _streams(hidden_TX[rows], count).float()
            added_TSH = (post_TS1[rows] + spec.eps) * delta_TH[rows, None].float()
            hidden_TX[rows] = (added_TSH + streams_TSH).to(dtype).flatten(1)
        return
    post_TS1 = post_TS1.to(dtype)
    matrix_TSS = mixing_matrix(logits_TF, spec).to(dtype).float()
    for rows in row_pieces(len(hidden_TX)):
        streams_TSH = _streams(hidden_TX[rows], count)
        mixed_TSH = torch.bmm(matrix_TSS[rows].transpose(1, 2), streams_TSH.float())
        sum_TSH = post_TS1[rows] * delta_TH[rows, None] + mixed_TSH.to(dtype)
        hidden_TX[rows] = sum_TSH.flatten(1)


def mixing_matrix(logits_TF: Tensor, spec: StreamsSpec) -> Tensor:
    """Return [T, S, S] float32: how much of stream j (first S) becomes part of stream k."""
    assert spec.sinkhorn_iterations is not None, "there is a matrix"
    count, eps = spec.count, spec.eps
    if native_mixes(logits_TF, count):
        out_TSS = logits_TF.new_empty(len(logits_TF), count, count)
        logits_TX = logits_TF[:, 2 * count :]
        _native.mixing_matrices(logits_TX, spec.sinkhorn_iterations, eps, out_TSS)
        return out_TSS
    logits_SST = logits_TF[:, 2 * count :].T.contiguous().view(count, count, -1)
    matrix_SST = logits_SST.softmax(1) + eps
    matrix_SST /= matrix_SST.sum(0, keepdim=True) + eps
    for _ in range(spec.sinkhorn_iterations - 1):
        matrix_SST /= matrix_SST.sum(1, keepdim=True) + eps
        matrix_SST /= matrix_SST.sum(0, keepdim=True) + eps
    return matrix_SST.permute(2, 0, 1)


def native_mixes(rows: Tensor, count: int) -> bool:
    """Whether the native kernels mix so many streams of these rows."""
    return count <= _native.MAX_STREAMS and native_reads(rows)


def _streams(hidden_TX: Tensor, count: int) -> Tensor:
    num_tokens, size = hidden_TX.shape
    return hidden_TX.reshape(num_tokens, count, size // count)


def row_pieces(num_rows: int) -> Iterator[slice]:
    """Rows of which float32 copies stay in the caches of cores."""
    return (slice(begin, begin + _ROWS_AT_ONCE) for begin in range(0, num_rows, _ROWS_AT_ONCE))
