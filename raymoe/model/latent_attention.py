"""Latent attention of one decoder layer: projections, norms of the latents, rotation, both forms.

T tokens, H hidden, A heads, D dimensions of a query, W elements of a cached row, R of its latent,
V dimensions of a value.
"""

import torch
from torch import Tensor

from raymoe.kernels import gpu_attention_batch
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_elementwise import Projected, rms_norm, rotate_heads
from raymoe.kernels.cpu_latent_attention import (
    append_and_attend_latent,
    append_and_attend_unfolded,
    append_latent,
)
from raymoe.kernels.gpu_attention_batch import LatentRaggedBatch, StagedBatch
from raymoe.kernels.paged_kv import CacheLayout, LatentHeads
from raymoe.kernels.torch_attention import PagedBatch, append_and_attend_latent_paged
from raymoe.model.loading import Loader
from raymoe.model.rope import Angles
from raymoe.specs.model import LatentAttentionSpec


class LatentAttention:
    """Weights and operations of the latent attention of one layer; see `attention.LayerAttention`.

    Tokens of long prompts are attended to in plain form, all others in absorbed form; where the
    weights are not at hand, all.
    """

    def __init__(
        self, spec: LatentAttentionSpec, loader: Loader, prefix: str, *, is_interleaved: bool
    ) -> None:
        """Load what is called `prefix` + "kv_b_proj" and so on.

        Args:
            spec: What to compute.
            loader: Where weights come from.
            prefix: What their names begin with.
            is_interleaved: See `RopeSpec`.
        """
        self._spec, self._is_interleaved = spec, is_interleaved
        self._dtype = loader.dtype
        if spec.q_lora_rank is None:
            self._query_down = self._query_norm = None
            self._query = loader.linear([f"{prefix}q_proj"])
        else:
            self._query_down = loader.linear([f"{prefix}q_a_proj"], has_bias=spec.has_bias)
            self._query_norm = loader.vector(f"{prefix}q_a_layernorm.weight")
            self._query = loader.linear([f"{prefix}q_b_proj"])
        self._row = loader.linear([f"{prefix}kv_a_proj_with_mqa"], has_bias=spec.has_bias)
        self._row_norm = loader.vector(f"{prefix}kv_a_layernorm.weight")
        self._unfolding = loader.head_matrices(f"{prefix}kv_b_proj", spec.num_heads)
        self._output = loader.linear([f"{prefix}o_proj"], has_bias=spec.has_bias)

    @property
    def _heads(self) -> LatentHeads:
        return self._heads_of(self._unfolding())

    def _heads_of(self, weight_HXR: Tensor) -> LatentHeads:
        return LatentHeads(
            weight_HXR=weight_HXR,
            nope_dim=self._spec.nope_head_dim,
            rope_dim=self._spec.rope_head_dim,
        )

    def project(self, normed_TH: Tensor, angles: Angles) -> Projected:
        """Rotated queries [T, A, D] and the rows of the tokens [T, 1, W]; no values."""
        spec = self._spec
        query_TAD = self._query_of(normed_TH).view(-1, spec.num_heads, spec.query_head_dim)
        row_TW = self._row(normed_TH)
        latent_TR, key_T1O = row_TW[:, : spec.kv_lora_rank], row_TW[:, None, spec.kv_lora_rank :]
        row_T1W = torch.empty_like(row_TW)[:, None]
        row_T1W[:, 0, : spec.kv_lora_rank] = rms_norm(latent_TR, self._row_norm, spec.norm_eps)
        row_T1W[..., spec.kv_lora_rank :] = self._rotate(key_T1O, angles)
        rope_TAO = query_TAD[..., spec.nope_head_dim :]
        rope_TAO.copy_(self._rotate(rope_TAO, angles))
        return Projected(query_TAD, row_T1W, row_T1W[..., :0])

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        """See `LayerAttention`."""
        append_latent(projected.key_TGD[:, 0], cache, batch)

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `LayerAttention`; [T, A * V]."""
        heads, query_TAD = self._heads, projected.query_THD
        out_TAV = query_TAD.new_empty(*query_TAD.shape[:2], heads.value_dim)
        num_plain = self._num_plain(batch, heads)
        for first, end, attend in (
            (torch.zeros_like(num_plain), num_plain, self._attend_plain),
            (num_plain, batch.num_new, self._attend_and_unfold),
        ):
            rows, part = batch.cut(first, end)
            if len(rows):
                chosen = Projected(*(tensor[rows] for tensor in projected))
                out_TAV[rows] = attend(chosen, cache, part).view(len(rows), *out_TAV.shape[1:])
        return out_TAV.flatten(1)

    def staged_batch(
        self, batch: AttentionBatch, layout: CacheLayout, device: torch.device
    ) -> StagedBatch:
        """See `LayerAttention`."""
        compute = gpu_attention_batch.attention_compute(device, self._dtype)
        if compute is None:
            return PagedBatch.of(batch, layout, device)
        return LatentRaggedBatch.of(
            batch, layout, compute, device, fewest_plain_tokens=self._fewest_plain_tokens
        )

    def attend_staged(self, projected: Projected, staged: Tensor, batch: StagedBatch) -> Tensor:
        """See `LayerAttention`; [T, A * V]."""
        if isinstance(batch, LatentRaggedBatch):
            return self._attend_ragged(projected, staged, batch)
        assert isinstance(batch, PagedBatch), "made by this layer's `staged_batch`"
        return append_and_attend_latent_paged(
            projected.query_THD,
            projected.key_TGD[:, 0],
            staged,
            batch,
            heads=self._heads,
            scale=self._spec.scale,
        ).flatten(1)

    def absorb(self, query_TAD: Tensor) -> Tensor:
        """See `LayerAttention`; [T, A, W]."""
        return self._heads.absorb(query_TAD)

    def attend_absorbed(self, absorbed: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `LayerAttention`; [T, A * R]."""
        return append_and_attend_latent(
            absorbed.query_THD,
            absorbed.key_TGD[:, 0],
            cache,
            batch,
            rank=self._spec.kv_lora_rank,
            scale=self._spec.scale,
        ).flatten(1)

    def unfold(self, result_TX: Tensor) -> Tensor:
        """See `LayerAttention`; from [T, A * R] to [T, A * V]."""
        result_TAR = result_TX.view(-1, self._spec.num_heads, self._spec.kv_lora_rank)
        return self._heads.unfold(result_TAR).flatten(1)

    def output(self, attention_TX: Tensor) -> Tensor:
        """See `LayerAttention`."""
        return self._output(attention_TX)

    @property
    def _fewest_plain_tokens(self) -> int:
        """By sizes alone: between passes the weight may be on its way."""
        spec = self._spec
        shape = (spec.num_heads, spec.nope_head_dim + spec.value_head_dim, spec.kv_lora_rank)
        return self._heads_of(torch.empty(shape, device="meta")).fewest_plain_tokens

    def _attend_ragged(
        self, projected: Projected, staged: Tensor, batch: LatentRaggedBatch
    ) -> Tensor:
        # They need Triton.
        from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
            Scoring,
            append_and_attend_latent_ragged,
        )

        return append_and_attend_latent_ragged(
            projected.query_THD,
            projected.key_TGD[:, 0],
            staged,
            batch,
            heads=self._heads,
            scoring=Scoring(scale=self._spec.scale),
        ).flatten(1)

    @staticmethod
    def _num_plain(batch: AttentionBatch, heads: LatentHeads) -> Tensor:
        """Of the new tokens of each sequence, those that are attended to in plain form.

        Those of long prompts: which depends on nothing but the row that a token is in, so that
        rounding does not either.
        """
        num_new, prompts = batch.num_new_of_prompts, batch.prompt_tokens
        lengths = batch.context_tokens if prompts is None else prompts
        return num_new.where(lengths >= heads.fewest_plain_tokens, 0)

    def _attend_plain(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        query_TAD, row_TW = projected.query_THD, projected.key_TGD[:, 0]
        return append_and_attend_unfolded(
            query_TAD, row_TW, cache, batch, heads=self._heads, scale=self._spec.scale
        )

    def _attend_and_unfold(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        absorbed = projected._replace(query_THD=self.absorb(projected.query_THD))
        return self.unfold(self.attend_absorbed(absorbed, cache, batch))

    def _query_of(self, normed_TH: Tensor) -> Tensor:
        if self._query_down is None:
            return self._query(normed_TH)
        latent_TL = self._query_down(normed_TH)
        return self._query(rms_norm(latent_TL, self._query_norm, self._spec.norm_eps))

    def _rotate(self, heads_TND: Tensor, angles: Angles) -> Tensor:
        rows_T = angles.rows_T.long()
        tables = (angles.cos_PR, angles.sin_PR)
        cos_T1R, sin_T1R = (table_PR[rows_T, None].to(heads_TND.dtype) for table_PR in tables)
        return rotate_heads(heads_TND, cos_T1R, sin_T1R, is_interleaved=self._is_interleaved)
