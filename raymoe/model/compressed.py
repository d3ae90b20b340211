"""Attention to the last tokens and to compressed entries of earlier ones (DeepSeek-V4).

T tokens, H hidden size, A query heads, W width of queries, rows and entries, G groups of heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raymoe.kernels.compressed import (
    CompressedBatch,
    CompressedBatches,
    CompressedScoring,
    Pooling,
    append_and_attend_compressed,
    append_compressed,
    rotate_ends,
)
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_compressed import append_and_attend_compressed_on_host
from raymoe.kernels.elementwise import Projected, copied, rms_norm
from raymoe.kernels.gpu_attention_batch import attention_compute
from raymoe.kernels.paged_kv import CompressedLayout
from raymoe.model.attention import OneForm
from raymoe.model.loading import Loader
from raymoe.model.rope import Angles, Rotary
from raymoe.specs.layers import CompressedAttentionSpec


class CompressedAttention(OneForm):
    """Such attention of one layer, where its cache is: on the host or on the device.

    In `Projected`, keys are the rows of the tokens, and values what entries are made of.
    """

    def __init__(
        self,
        spec: CompressedAttentionSpec,
        loader: Loader,
        prefix: str,
        rotaries: tuple[Rotary, Rotary],
    ) -> None:
        """Load the weights `prefix` + "q_a_proj" and so on.

        Args:
            rotaries: That of the device of the weights, and that of the host.
        """
        self._spec, (self._rotary, self._host_rotary) = spec, rotaries
        self._layout = compressed_layout(spec, loader.dtype)
        self._down = loader.linear([f"{prefix}q_a_proj", f"{prefix}kv_proj"])
        self._query_norm = loader.vector(f"{prefix}q_a_norm.weight")
        self._query = loader.linear([f"{prefix}q_b_proj"])
        self._row_norm = loader.vector(f"{prefix}kv_norm.weight")
        self._pooled = None
        if spec.ratio is not None:
            parts = [f"{prefix}compressor.{part}_proj" for part in ("kv", "gate")]
            self._pooled = loader.linear(parts)
        self._on_host = _scoring(spec, loader, prefix, is_on_host=True)
        self._on_device = _scoring(spec, loader, prefix, is_on_host=False)
        self._groups = loader.head_matrices(f"{prefix}o_a_proj", spec.num_groups)
        self._output = loader.linear([f"{prefix}o_proj"])

    @property
    def layout(self) -> CompressedLayout:
        return self._layout

    @property
    def num_heads(self) -> int:
        return self._spec.num_heads

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        """Return rotated queries [T, A, W], rotated rows [T, 1, W], and [T, 1, X] to be pooled."""
        spec = self._spec
        positions_T, tables = angles.rows_T, (angles.cos_PR, angles.sin_PR)
        sizes = [spec.q_lora_rank, spec.head_dim]
        latent_TL, row_TW = torch.split(self._down(normed_TH), sizes, dim=1)
        query_TX = self._query(rms_norm(latent_TL, self._query_norm, spec.norm_eps, 0.0))
        num_tokens, num_heads, width = len(normed_TH), spec.num_heads, spec.head_dim
        query_XW = rms_norm(query_TX.view(num_tokens * num_heads, width), None, spec.norm_eps)
        query_TAW = query_XW.view(num_tokens, num_heads, width)
        row_T1W = rms_norm(row_TW, self._row_norm, spec.norm_eps, 0.0)[:, None]
        pooled_T1X = row_T1W[..., :0] if self._pooled is None else self._pooled(normed_TH)[:, None]
        projected = Projected(
            rotate_ends(query_TAW, positions_T, tables),
            rotate_ends(row_T1W, positions_T, tables),
            pooled_T1X,
        )
        return projected if out is None else copied(projected, out)

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        return append_and_attend_compressed_on_host(
            projected.query_THD,
            projected.key_TGD[:, 0],
            projected.value_TGV[:, 0],
            cache,
            batch,
            layout=self._layout,
            tables=self._host_rotary.tables,
            scoring=self._on_host,
        ).flatten(1)

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        """Append to the layer's cache on the host without attending; queries are not read."""
        indices = CompressedBatch.of(batch, self._layout, self._spec.num_heads)
        angles = self._host_rotary.angles(indices.position_T)
        append_compressed(
            projected.key_TGD[:, 0],
            projected.value_TGV[:, 0],
            cache,
            indices,
            layout=self._layout,
            tables=(angles.cos_PR, angles.sin_PR),
            pooling=self._on_host.pooling,
        )

    def attend_staged(
        self,
        projected: Projected,
        cache: Tensor,
        batch: CompressedBatches,
        out: Tensor | None = None,
    ) -> Tensor:
        """Add to the cache on the device of the weights and attend there; [T, A * W], in `out`."""
        indices = batch.of_layout(self._layout)
        result_TX = append_and_attend_compressed(
            projected.query_THD,
            projected.key_TGD[:, 0],
            projected.value_TGV[:, 0],
            cache,
            indices,
            layout=self._layout,
            tables=self._rotary.tables,
            scoring=self._on_device,
        ).flatten(1)
        return result_TX if out is None else out.copy_(result_TX)

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        del normed_TH
        weight_GLX = self._groups()
        num_groups, _, width = weight_GLX.shape
        grouped_TGX = attention_TX.view(len(attention_TX), num_groups, width)
        latent_GTL = torch.bmm(grouped_TGX.transpose(0, 1), weight_GLX.transpose(1, 2))
        return self._output(latent_GTL.transpose(0, 1).flatten(1))


def _scoring(
    spec: CompressedAttentionSpec, loader: Loader, prefix: str, *, is_on_host: bool
) -> CompressedScoring:
    def vector(name: str) -> Tensor:
        return loader.score_vector(f"{prefix}{name}", is_on_host=is_on_host)

    pooling = None
    if spec.ratio is not None:
        pooling = Pooling(
            bias_MX=vector("compressor.position_bias"),
            norm_W=vector("compressor.kv_norm.weight"),
            eps=spec.norm_eps,
        )
    return CompressedScoring(scale=spec.scale, sinks_H=vector("sinks"), pooling=pooling)


def staged_batches(
    layers: Sequence[CompressedAttention],
    batch: AttentionBatch,
    device: torch.device,
    dtype: torch.dtype,
) -> CompressedBatches:
    """Prepare a batch for `attend_staged` on `device`, once for all layers; on the host.

    The kernel in Triton multiplies on tensor cores alone; torch attends elsewhere.
    """
    layouts = tuple(dict.fromkeys(layer.layout for layer in layers))
    num_heads = max(layer.num_heads for layer in layers)
    compute = attention_compute(device, dtype)
    if compute is not None and (dtype == torch.float32 or not compute.has_tensor_cores):
        compute = None
    batches = tuple(CompressedBatch.of(batch, layout, num_heads, compute) for layout in layouts)
    return CompressedBatches(layouts, batches)


def compressed_layout(spec: CompressedAttentionSpec, dtype: torch.dtype) -> CompressedLayout:
    return CompressedLayout(
        width=spec.head_dim,
        window=spec.sliding_window,
        ratio=spec.ratio,
        num_sums=spec.num_sums,
        dtype=dtype,
    )
