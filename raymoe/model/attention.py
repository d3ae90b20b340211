"""Attention of one decoder layer: fused projection, norms, rotation, paged attention, output.

T tokens, H hidden, A heads, D dimensions of a query, X = (heads + 2 KV heads) * head_dim, or the
elements of a result.
"""

from typing import Protocol

import torch
from torch import Tensor

from raymoe.kernels import gpu_attention_batch
from raymoe.kernels.cpu_attention import AttentionBatch, append, append_and_attend
from raymoe.kernels.cpu_elementwise import Projected, qkv_rope
from raymoe.kernels.gpu_attention_batch import RaggedBatch, StagedBatch
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.kernels.torch_attention import PagedBatch, append_and_attend_paged
from raymoe.model.loading import Loader, NormOverRanks
from raymoe.model.rope import Angles
from raymoe.specs.model import AttentionSpec


class LayerAttention(Protocol):
    """The attention of one layer, of whichever kind.

    A host that holds the cache but not the weights attends in *absorbed* form, which needs nothing
    but the cache: queries are absorbed before they travel, results unfolded when they are back.
    What a token leaves in the cache is the same in both forms.
    """

    def project(self, normed_TH: Tensor, angles: Angles) -> Projected:
        """Queries, keys and values, normed and rotated."""

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        """Append to the layer's cache on the host and attend to nothing; queries are not read."""

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Append to the layer's cache on the host, where the weights are, and attend."""

    def staged_batch(
        self, batch: AttentionBatch, layout: CacheLayout, device: torch.device
    ) -> StagedBatch:
        """A batch as `attend_staged` takes it, on the device of the weights; for all layers."""

    def attend_staged(self, projected: Projected, staged: Tensor, batch: StagedBatch) -> Tensor:
        """Append to blocks on the device of the weights, and attend."""

    def absorb(self, query_TAD: Tensor) -> Tensor:
        """Queries of the absorbed form."""

    def attend_absorbed(self, absorbed: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Append and attend on a host without the weights; absorbed results."""

    def unfold(self, result_TX: Tensor) -> Tensor:
        """What `attend` gives, from absorbed results."""

    def output(self, attention_TX: Tensor) -> Tensor:
        """What attention adds to the hidden state, [T, H]."""


class Attention:
    """Grouped-query attention; its absorbed form is the form that it has anyway."""

    def __init__(
        self,
        spec: AttentionSpec,
        loader: Loader,
        prefix: str,
        *,
        eps: float,
        is_interleaved: bool,
        norm_over_ranks: NormOverRanks | None = None,
    ) -> None:
        """Load what is called `prefix` + "q_proj" and so on.

        Args:
            spec: What to compute.
            loader: Where weights come from.
            prefix: What their names begin with.
            eps: Of the norms of queries and keys.
            is_interleaved: See `RopeSpec`.
            norm_over_ranks: Norms queries and keys where other ranks have some of their heads.
        """
        self._norm_over_ranks = norm_over_ranks
        self._spec, self._eps, self._is_interleaved = spec, eps, is_interleaved
        self._dtype = loader.dtype
        self._qkv = loader.linear(
            [f"{prefix}{part}_proj" for part in "qkv"], has_bias=spec.qkv_bias
        )
        self._output = loader.linear([f"{prefix}o_proj"], has_bias=spec.output_bias)
        has_norm = spec.qk_norm != "none"
        self._query_norm = loader.vector(f"{prefix}q_norm.weight") if has_norm else None
        self._key_norm = loader.vector(f"{prefix}k_norm.weight") if has_norm else None
        self._sinks_H = self._host_sinks_H = None
        if spec.has_sinks:
            self._sinks_H = loader.score_vector(f"{prefix}sinks")
            self._host_sinks_H = loader.score_vector(f"{prefix}sinks", is_on_host=True)

    def project(self, normed_TH: Tensor, angles: Angles) -> Projected:
        """Queries, keys and values, normed and rotated."""
        qkv_TX, norms = self._qkv(normed_TH), (self._query_norm, self._key_norm)
        if self._norm_over_ranks is not None:
            middle, end = self._spec.query_width, self._spec.query_width + self._spec.kv_width
            weights = [norm for norm in norms if norm is not None]
            self._norm_over_ranks((qkv_TX[:, :middle], qkv_TX[:, middle:end]), weights)
            norms = (None, None)
        return qkv_rope(
            qkv_TX,
            *angles,
            num_heads=self._spec.num_heads,
            num_kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=self._eps,
            clip=self._spec.clip_qkv,
            is_norm_after_rope=self._spec.is_norm_after_rope,
            is_interleaved=self._is_interleaved,
        )

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        """See `LayerAttention`."""
        append(projected.key_TGD, projected.value_TGD, cache, batch)

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `LayerAttention`; [T, heads * head_dim]."""
        return append_and_attend(
            *projected,
            cache,
            batch,
            scale=self._spec.scale,
            sliding_window=self._spec.sliding_window,
            sinks_H=self._host_sinks_H,
        )

    def staged_batch(
        self, batch: AttentionBatch, layout: CacheLayout, device: torch.device
    ) -> StagedBatch:
        """See `LayerAttention`."""
        compute = gpu_attention_batch.attention_compute(device, self._dtype)
        if compute is None:
            return PagedBatch.of(batch, layout, device)
        return RaggedBatch.of(batch, compute, device)

    def attend_staged(self, projected: Projected, staged: Tensor, batch: StagedBatch) -> Tensor:
        """See `LayerAttention`; [T, heads * head_dim]."""
        if isinstance(batch, RaggedBatch):
            return self._attend_ragged(projected, staged, batch)
        assert isinstance(batch, PagedBatch), "made by this layer's `staged_batch`"
        return append_and_attend_paged(
            projected,
            staged,
            batch,
            scale=self._spec.scale,
            sliding_window=self._spec.sliding_window,
            sinks_H=self._sinks_H,
        )

    def _attend_ragged(self, projected: Projected, staged: Tensor, batch: RaggedBatch) -> Tensor:
        # They need Triton.
        from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
            Scoring,
            append_and_attend_ragged,
        )

        scoring = Scoring(
            scale=self._spec.scale,
            sliding_window=self._spec.sliding_window,
            sinks_H=None if self._sinks_H is None else self._sinks_H.float(),
        )
        return append_and_attend_ragged(projected, staged, batch, scoring)

    def absorb(self, query_TAD: Tensor) -> Tensor:
        """See `LayerAttention`."""
        return query_TAD

    def attend_absorbed(self, absorbed: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `LayerAttention`."""
        return self.attend(absorbed, cache, batch)

    def unfold(self, result_TX: Tensor) -> Tensor:
        """See `LayerAttention`."""
        return result_TX

    def output(self, attention_TX: Tensor) -> Tensor:
        """See `LayerAttention`."""
        return self._output(attention_TX)
