"""Attention of one decoder layer: grouped-query attention and multi-head latent attention (MLA)."""

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.kernels import gpu_attention_batch
from raymoe.kernels.cpu_attention import (
    AttentionBatch,
    Chosen,
    append,
    append_and_attend,
    append_and_attend_latent,
    append_and_attend_up_projected,
    append_latent,
)
from raymoe.kernels.elementwise import (
    Projected,
    Steps,
    copied,
    latent_rope,
    qkv_rope,
    rms_norm,
)
from raymoe.kernels.gates import gate_values
from raymoe.kernels.gpu_attention_batch import (
    BlockChoosingBatch,
    ChoosingBatch,
    LatentRaggedBatch,
    PooledBatch,
    RaggedBatch,
    StagedBatch,
)
from raymoe.kernels.latent_heads import LatentHeads, PlainLatentHeads
from raymoe.kernels.paged_kv import (
    CacheLayout,
    IndexedLayout,
    KvLayout,
    LatentLayout,
)
from raymoe.kernels.selection import (
    Division,
    IndexRows,
    Pools,
    append_pooled_keys,
    attend_blocks,
    attend_chosen,
    attend_entries,
    choose_blocks,
    choose_positions,
    positions_of,
    sees_more_than,
    with_tail,
)
from raymoe.kernels.torch_attention import (
    PagedBatch,
    append_and_attend_latent_paged,
    append_and_attend_paged,
    choose_blocks_paged,
    choose_paged,
)
from raymoe.model.indexer import BlockIndexer, Indexer, PooledIndexer
from raymoe.model.loading import Loader
from raymoe.model.norms import NormHeads
from raymoe.model.rope import Angles, Rotary
from raymoe.specs.attention.grouped import AttentionSpec, PooledIndexerSpec
from raymoe.specs.attention.kind import OutputGate
from raymoe.specs.attention.latent import LatentAttentionSpec


class LayerAttention(Protocol):
    """The attention of one layer.

    A host that holds the cache but not the weights attends in *absorbed* form, which reads only the
    cache: the device absorbs queries before it sends them, and up-projects the results. Both forms
    write the same rows to the cache.
    """

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        """Return queries, keys and values, normed and rotated; in `out`, which is contiguous."""

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        """Append to the layer's cache on the host without attending; queries are not read."""

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Append to the layer's cache on the host, which has the weights, and attend."""

    def staged_batch(
        self, batch: AttentionBatch, layout: CacheLayout, device: torch.device
    ) -> StagedBatch:
        """Prepare a batch for `attend_staged` on `device`, once for all layers; on the host."""

    def attend_staged(
        self,
        projected: Projected,
        staged: Tensor,
        batch: StagedBatch,
        out: Tensor | None = None,
    ) -> Tensor:
        """Append to blocks on the device of the weights, and attend; [T, X], in `out`."""

    def absorb(self, query_TAD: Tensor, out: Tensor | None = None) -> Tensor:
        """Return queries in absorbed form, in `out`."""

    def attend_absorbed(self, absorbed: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Append and attend on a host without the weights; returns absorbed results."""

    def up_project(self, result_TX: Tensor, out: Tensor | None = None) -> Tensor:
        """Turn absorbed results into those of `attend`, in `out`."""

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        """Return what attention adds to the hidden state, [T, H].

        `normed_TH` is what `project` was given; only gated attention reads it.
        """


class OneForm(ABC):
    """Attention whose absorbed form is its only form."""

    @abstractmethod
    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """As in `LayerAttention`."""

    def absorb(self, query_TAD: Tensor, out: Tensor | None = None) -> Tensor:
        return query_TAD if out is None else out.copy_(query_TAD)

    def attend_absorbed(self, absorbed: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        return self.attend(absorbed, cache, batch)

    def up_project(self, result_TX: Tensor, out: Tensor | None = None) -> Tensor:
        return result_TX if out is None else out.copy_(result_TX)


class Attention(OneForm):
    """Grouped-query attention."""

    def __init__(
        self,
        spec: AttentionSpec,
        loader: Loader,
        prefix: str,
        *,
        eps: float,
        norm_offset: float | None,
        is_interleaved: bool,
        rotaries: tuple[Rotary, Rotary],
        norm_heads: NormHeads | None = None,
    ) -> None:
        """Load the weights `prefix` + "q_proj" and so on.

        Args:
            rotaries: That of the device of the weights, and that of the host.
            norm_heads: Norms queries and keys before they are rotated, in place of the kernel that
                rotates them.
        """
        self._norm_heads = norm_heads
        self._spec = spec
        self._steps = Steps(
            eps,
            math.inf if spec.clip_qkv is None else spec.clip_qkv,
            spec.is_norm_after_rope,
            is_interleaved,
            spec.norms_values,
            spec.values_are_keys,
            norm_offset,
        )
        self._dtype = loader.dtype
        self._qkv = loader.linear(
            [f"{prefix}{part}_proj" for part in spec.projections], has_bias=spec.qkv_bias
        )
        self._output = loader.linear([f"{prefix}o_proj"], has_bias=spec.output_bias)
        self._gate = None if spec.gate is None else _Gate(spec.gate, loader, prefix)
        has_norm = spec.qk_norm not in {"none", "unit"}
        self._query_norm = loader.vector(f"{prefix}q_norm.weight") if has_norm else None
        self._key_norm = loader.vector(f"{prefix}k_norm.weight") if has_norm else None
        self._indexer: BlockIndexer | PooledIndexer | None = None
        if spec.blocks is not None:
            assert norm_offset is not None, "such layers norm heads by 1 + weight"
            norm, index = (eps, norm_offset), f"{prefix}indexer."
            if isinstance(spec.blocks, PooledIndexerSpec):
                self._indexer = PooledIndexer(
                    spec.blocks, loader, index, norm=norm, rotaries=rotaries
                )
            else:
                self._indexer = BlockIndexer(spec.blocks, loader, index, norm=norm)
        self._sinks_H = self._host_sinks_H = None
        if spec.has_sinks:
            self._sinks_H, self._host_sinks_H = _sinks(loader, prefix)

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        if self._indexer is None:
            return self._project(normed_TH, angles, out)
        projected = self._project(normed_TH, angles, None)
        index_TX = self._indexer(normed_TH, angles)
        heads = (self._spec.index_heads, self._spec.value_dim)
        spare = math.prod(heads) - index_TX.shape[1]
        index_TNV = functional.pad(index_TX, (0, spare)).view(len(index_TX), *heads)
        value_TNV = torch.cat([projected.value_TGV, index_TNV], dim=1)
        projected = projected._replace(value_TGV=value_TNV)
        return projected if out is None else copied(projected, out)

    def _project(self, normed_TH: Tensor, angles: Angles, out: Projected | None) -> Projected:
        qkv_TX, norms = self._qkv(normed_TH), (self._query_norm, self._key_norm)
        if self._norm_heads is not None:
            middle, end = self._spec.query_width, self._spec.query_width + self._spec.key_width
            weights = [norm for norm in norms if norm is not None]
            self._norm_heads((qkv_TX[:, :middle], qkv_TX[:, middle:end]), weights)
            norms = (None, None)
        if self._spec.qk_norm == "unit":
            ones_D = qkv_TX.new_ones(self._spec.head_dim)
            norms = (ones_D, ones_D)
        projected = qkv_rope(
            qkv_TX,
            *angles,
            num_heads=self._spec.num_heads,
            num_kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim,
            value_dim=self._spec.value_dim,
            q_norm=norms[0],
            k_norm=norms[1],
            steps=self._steps,
            out=out,
        )
        if self._spec.value_scale != 1:
            projected.value_TGV.mul_(self._spec.value_scale)
        temperature = self._spec.temperature
        if temperature is not None:  # of layers without rotation: their rows are positions
            periods_T = torch.floor((angles.rows_T + 1.0) / temperature.period)
            factors_T = 1 + temperature.beta * torch.log1p(periods_T)
            projected.query_THD.mul_(factors_T[:, None, None])
        return projected

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        layout = grouped_layout(self._spec, cache.dtype)
        if isinstance(layout, IndexedLayout):
            projected, rows = self._without_index(projected)
            self._append_index(rows.key_TI, cache, batch, layout)
            cache = layout.attended_blocks(cache)
        append(projected.key_TGD, projected.value_TGV, cache, batch)

    def _without_index(self, projected: Projected) -> tuple[Projected, IndexRows]:
        """Separate the index rows, which are behind the values and have no weights."""
        spec, indexer = self._spec, self._spec.blocks
        assert indexer is not None, "its layer has index rows"
        value_TGV, index_TNV = projected.value_TGV.tensor_split([spec.num_kv_heads], dim=1)
        index_TX = index_TNV.flatten(1)[:, : indexer.width]
        key_TI, query_TX = index_TX.tensor_split([indexer.head_dim], dim=1)
        ones_TJ = query_TX.new_ones(len(query_TX), indexer.num_heads)
        return projected._replace(value_TGV=value_TGV), IndexRows(key_TI, query_TX, ones_TJ)

    def _append_index(
        self, key_TI: Tensor, cache: Tensor, batch: AttentionBatch, layout: IndexedLayout
    ) -> None:
        if layout.pool is None:
            append_latent(key_TI, layout.index_keys(cache), batch)
        else:
            self._append_pooled(key_TI, cache, Pools.of(batch, layout.pool), on_host=True)

    def _append_pooled(self, key_TI: Tensor, cache: Tensor, pools: Pools, *, on_host: bool) -> None:
        layout = grouped_layout(self._spec, cache.dtype)
        assert isinstance(layout, IndexedLayout), "it has index keys"
        assert isinstance(self._indexer, PooledIndexer), "its keys are pooled"
        self._indexer.append(key_TI, cache, layout, pools, on_host=on_host)

    def _attend_choosing(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch, layout: IndexedLayout
    ) -> Tensor:
        """Attend from tokens that see few blocks to all of these, from others to chosen ones."""
        indexer = self._spec.blocks
        assert indexer is not None, "it has index keys"
        projected, index = self._without_index(projected)
        self._append_index(index.key_TI, cache, batch, layout)
        keys_NEI, cache = layout.index_keys(cache), layout.attended_blocks(cache)
        if not sees_more_than(batch, indexer.num_seen):
            return append_and_attend(*projected, cache, batch, scale=self._spec.scale)
        division = Division.of(batch, indexer.num_seen)
        early, late = (
            Projected(*(tensor[rows] for tensor in projected))
            for rows in (division.early_T, division.late_T)
        )
        out_TX = projected.query_THD.new_empty(len(projected.query_THD), self._spec.output_width)
        if len(division.early_T):
            out_TX[division.early_T] = append_and_attend(
                *early, cache, division.early, scale=self._spec.scale
            )
        append(late.key_TGD, late.value_TGV, cache, division.late)
        out_TX[division.late_T] = self._attend_chosen(
            late, index.select(division.late_T), (keys_NEI, cache), division.late
        )
        return out_TX

    def _attend_chosen(
        self,
        late: Projected,
        index: IndexRows,
        memory: tuple[Tensor, Tensor],
        batch: AttentionBatch,
    ) -> Tensor:
        """Attend from tokens that choose by index keys, which are in the cache with their KV."""
        (keys_NEI, cache), indexer, scale = memory, self._spec.blocks, self._spec.scale
        assert indexer is not None, "its tokens choose"
        tokens = indexer.block_tokens
        if isinstance(indexer, PooledIndexerSpec):
            chosen_TK = choose_positions(index, keys_NEI, batch, indexer.top_k, entry_tokens=tokens)
            return attend_entries(late, cache, batch, chosen_TK, entry_tokens=tokens, scale=scale)
        chosen_TGK = choose_blocks(
            index.query_TX,
            keys_NEI,
            batch,
            top_k=indexer.top_k,
            block_tokens=tokens,
            num_local=indexer.num_local,
        )
        return attend_blocks(late, cache, batch, chosen_TGK, block_tokens=tokens, scale=scale)

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        layout = grouped_layout(self._spec, cache.dtype)
        if isinstance(layout, IndexedLayout):
            return self._attend_choosing(projected, cache, batch, layout)
        chunk = self._spec.chunk_tokens
        if chunk is not None and sees_more_than(batch, chunk):
            batch = batch.in_chunks(chunk)
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
        dim, indexer = self._spec.value_dim, self._spec.blocks
        compute = gpu_attention_batch.attention_compute(device, self._dtype, dim)
        if isinstance(indexer, PooledIndexerSpec):
            if compute is not None:
                return PooledBatch.of(batch, compute, indexer)
            pools = Pools.of(batch, indexer.block_tokens)
            return replace(PagedBatch.of(batch, layout), pools=pools)
        if compute is None:
            return PagedBatch.of(batch, layout)
        if indexer is not None and sees_more_than(batch, indexer.num_seen):
            return BlockChoosingBatch.of(batch, compute, indexer)
        return RaggedBatch.of(batch, compute)

    def attend_staged(
        self,
        projected: Projected,
        staged: Tensor,
        batch: StagedBatch,
        out: Tensor | None = None,
    ) -> Tensor:
        layout, masks = grouped_layout(self._spec, staged.dtype), None
        if isinstance(batch, PooledBatch):
            return self._choose_entries_ragged(projected, staged, batch, out)
        if isinstance(batch, RaggedBatch | BlockChoosingBatch):
            if isinstance(layout, IndexedLayout):
                return self._choose_ragged(projected, staged, batch, out)
            ragged = batch.everything if isinstance(batch, BlockChoosingBatch) else batch
            return self._attend_ragged(projected, staged, ragged, out)
        assert isinstance(batch, PagedBatch), "made by this layer's `staged_batch`"
        if isinstance(layout, IndexedLayout):
            assert self._spec.blocks is not None, "it has index keys"
            projected, index = self._without_index(projected)
            masks = self._choose_paged(index, staged, batch, layout)
            staged = layout.attended_blocks(staged)
        result_TX = append_and_attend_paged(
            projected,
            staged,
            batch,
            scale=self._spec.scale,
            sliding_window=self._spec.sliding_window,
            sinks_H=self._sinks_H,
            masks_SGQC=masks,
        )
        return result_TX if out is None else out.copy_(result_TX)

    def _choose_paged(
        self, index: IndexRows, staged: Tensor, batch: PagedBatch, layout: IndexedLayout
    ) -> tuple[Tensor, ...]:
        """Append index keys; return what tokens attend to as `append_and_attend_paged` takes it."""
        indexer, keys_NEI = self._spec.blocks, layout.index_keys(staged)
        if isinstance(indexer, PooledIndexerSpec):
            assert batch.pools is not None, "made by `staged_batch`"
            self._append_pooled(index.key_TI, staged, batch.pools, on_host=False)
            tokens, num_kv_heads = indexer.block_tokens, self._spec.num_kv_heads
            masks = choose_paged(index, keys_NEI, batch, indexer.top_k, entry_tokens=tokens)
            return tuple(mask[:, None].expand(-1, num_kv_heads, -1, -1) for mask in masks)
        assert indexer is not None, "it has index keys"
        keys_NEI[batch.blocks_T, batch.offsets_T] = index.key_TI.to(keys_NEI.dtype)
        return choose_blocks_paged(index.query_TX, keys_NEI, batch, indexer)

    def _attend_ragged(
        self, projected: Projected, staged: Tensor, batch: RaggedBatch, out: Tensor | None
    ) -> Tensor:
        # This module imports Triton.
        from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
            Scoring,
            append_and_attend_ragged,
        )

        scoring = Scoring(
            scale=self._spec.scale,
            sliding_window=self._spec.sliding_window,
            sinks_H=self._sinks_H,
        )
        return append_and_attend_ragged(projected, staged, batch, scoring, out=out)

    def _choose_ragged(
        self,
        projected: Projected,
        staged: Tensor,
        batch: RaggedBatch | BlockChoosingBatch,
        out: Tensor | None,
    ) -> Tensor:
        # These modules import Triton.
        from raymoe.kernels.gpu_attention import append_latent_rows  # noqa: PLC0415
        from raymoe.kernels.gpu_selection import (  # noqa: PLC0415
            append_and_attend_blocks_ragged,
            choose_blocks_ragged,
        )

        layout = grouped_layout(self._spec, staged.dtype)
        assert isinstance(layout, IndexedLayout), "it has index keys"
        projected, index = self._without_index(projected)
        keys_NBI, staged = layout.index_keys(staged), layout.attended_blocks(staged)
        ragged = batch if isinstance(batch, RaggedBatch) else batch.everything
        append_latent_rows(index.key_TI, keys_NBI, ragged.slots_T)
        if isinstance(batch, RaggedBatch):
            return self._attend_ragged(projected, staged, batch, out)
        chosen_LGK = choose_blocks_ragged(index.query_TX, keys_NBI, batch)
        return append_and_attend_blocks_ragged(
            projected, staged, batch, chosen_LGK, scale=self._spec.scale, out=out
        )

    def _choose_entries_ragged(
        self, projected: Projected, staged: Tensor, batch: PooledBatch, out: Tensor | None
    ) -> Tensor:
        # This module imports Triton.
        from raymoe.kernels.gpu_selection import (  # noqa: PLC0415
            append_and_attend_entries_ragged,
            choose_positions_ragged,
        )

        layout, indexer = grouped_layout(self._spec, staged.dtype), self._spec.blocks
        assert isinstance(layout, IndexedLayout), "it has index keys"
        assert indexer is not None, "it has index keys"
        projected, index = self._without_index(projected)
        self._append_pooled(index.key_TI, staged, batch.pools, on_host=False)
        keys_NEI, staged = layout.index_keys(staged), layout.attended_blocks(staged)
        if batch.late is None:
            return self._attend_ragged(projected, staged, batch.everything, out)
        chosen_LK = choose_positions_ragged(index, keys_NEI, batch.late.choosing, indexer.top_k)
        return append_and_attend_entries_ragged(
            projected, staged, batch.everything, batch.late, chosen_LK, self._spec.scale, out=out
        )

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        if self._gate is not None:
            attention_TX = self._gate(attention_TX, normed_TH)
        return self._output(attention_TX)


def grouped_layout(spec: AttentionSpec, dtype: torch.dtype) -> KvLayout | IndexedLayout:
    layout = KvLayout(
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        value_head_dim=spec.value_head_dim,
    )
    if spec.blocks is None:
        return layout
    dim = spec.blocks.head_dim
    if isinstance(spec.blocks, PooledIndexerSpec):
        pool = spec.blocks.block_tokens
        return IndexedLayout(attended=layout, index_dim=dim, pool=pool, open_dim=dim)
    return IndexedLayout(attended=layout, index_dim=dim)


def _sinks(loader: Loader, prefix: str) -> tuple[Tensor, Tensor]:
    """The sinks of a layer, where it has its weights and on the host."""
    name = f"{prefix}sinks"
    return loader.score_vector(name), loader.score_vector(name, is_on_host=True)


class _Gate:
    """The factor of attention's output."""

    def __init__(self, spec: OutputGate, loader: Loader, prefix: str) -> None:
        self._activation = spec.activation
        self._linear = loader.linear([f"{prefix}g_proj"], has_bias=spec.has_bias)

    def __call__(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        return gate_values(attention_TX, self._linear(normed_TH), self._activation)


def latent_layout(spec: LatentAttentionSpec, dtype: torch.dtype) -> LatentLayout | IndexedLayout:
    layout = LatentLayout(rank=spec.kv_lora_rank, rope_dim=spec.rope_head_dim, dtype=dtype)
    if spec.indexer is None or spec.indexer.is_shared:
        return layout
    indexer = spec.indexer
    return IndexedLayout(
        attended=layout,
        index_dim=indexer.head_dim,
        pool=indexer.pool,
        open_dim=2 * indexer.head_dim,
    )


class LatentAttention:
    """Latent attention of one layer.

    Tokens of long prompts use the plain form, all others the absorbed form. A host without the
    weights uses the absorbed form for all. So do tokens that choose among the positions they see,
    by the index rows that are their values.
    """

    def __init__(
        self, spec: LatentAttentionSpec, loader: Loader, prefix: str, *, is_interleaved: bool
    ) -> None:
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
        self._heads = loader.latent_heads(f"{prefix}kv_b_proj", spec)
        self._gate = None if spec.gate is None else _Gate(spec.gate, loader, prefix)
        self._output = loader.linear([f"{prefix}o_proj"], has_bias=spec.has_bias)
        self._sinks_H = self._host_sinks_H = None
        if spec.has_sinks:
            self._sinks_H, self._host_sinks_H = _sinks(loader, prefix)
        self._indexer: Indexer | None = None
        if spec.indexer is not None and not spec.indexer.is_shared:
            self._indexer = Indexer(spec.indexer, loader, f"{prefix}indexer.")

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        """Return rotated queries [T, A, D] and rows of the tokens [T, 1, W].

        Values are the index rows [T, 1, X], or empty.
        """
        spec = self._spec
        latent_TL = self._query_latent(normed_TH)
        query_TAD = self._query(latent_TL).view(-1, spec.num_heads, spec.query_head_dim)
        row_TW = self._row(normed_TH)
        projected = latent_rope(
            query_TAD,
            row_TW,
            angles,
            row_norm=self._row_norm,
            eps=spec.norm_eps,
            is_interleaved=self._is_interleaved,
            out=None if out is None else out._replace(value_TGV=out.value_TGV[..., :0]),
        )
        if self._indexer is None:
            return projected
        index_T1X = self._indexer(normed_TH, latent_TL, angles)[:, None]
        if out is not None:
            index_T1X = out.value_TGV.copy_(index_T1X)
        return projected._replace(value_TGV=index_T1X)

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        append_latent(projected.key_TGD[:, 0], self._append_index(projected, cache, batch), batch)

    def _append_index(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Append the index keys; return the part of the cache that attention reads."""
        layout = latent_layout(self._spec, cache.dtype)
        if isinstance(layout, LatentLayout):
            return cache
        key_TI = self._index_rows(projected).key_TI
        if layout.pool is None:
            append_latent(key_TI, layout.index_keys(cache), batch)
        else:
            self._append_pooled(key_TI, cache, Pools.of(batch, layout.pool), is_on_host=True)
        return layout.attended_blocks(cache)

    def _append_pooled(
        self, key_TX: Tensor, cache: Tensor, pools: Pools, *, is_on_host: bool
    ) -> None:
        layout, indexer = latent_layout(self._spec, cache.dtype), self._indexer
        assert isinstance(layout, IndexedLayout), "it has index keys"
        assert indexer is not None, "it has index keys"
        keys_NEI, open_NPX = layout.index_keys(cache), layout.open_tokens(cache)
        append_pooled_keys(
            key_TX, keys_NEI, open_NPX, pools=pools, bias_PI=indexer.pool_bias(is_on_host)
        )

    def _index_rows(self, projected: Projected) -> IndexRows:
        indexer = self._spec.indexer
        assert indexer is not None, "its layer has index rows"
        return IndexRows.of(projected.value_TGV[:, 0], indexer.num_heads, indexer.head_dim)

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        return self._attend_each(projected, cache, batch, is_absorbed=False)

    def _attend_each(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch, *, is_absorbed: bool
    ) -> Tensor:
        """Attend from tokens that see few positions to all of these, from others to chosen ones."""
        latents, indexer = self._append_index(projected, cache, batch), self._spec.indexer
        attend_all = self._attend_all_absorbed if is_absorbed else self._attend_all
        if indexer is None or not sees_more_than(batch, indexer.num_seen):
            return attend_all(projected, latents, batch)
        division = Division.of(batch, indexer.num_seen)
        early, late = (
            Projected(*(tensor[rows] for tensor in projected))
            for rows in (division.early_T, division.late_T)
        )
        width = self._spec.output_width if is_absorbed else self._spec.token_shapes.output
        out_TX = projected.query_THD.new_empty(len(projected.query_THD), width)
        if len(division.early_T):
            out_TX[division.early_T] = attend_all(early, latents, division.early)
        append_latent(late.key_TGD[:, 0], latents, division.late)
        if not is_absorbed:
            late = late._replace(query_THD=self.absorb(late.query_THD))
        late_TX = self._attend_chosen(late, cache, division.late, batch.chosen)
        out_TX[division.late_T] = late_TX if is_absorbed else self.up_project(late_TX)
        return out_TX

    def _attend_chosen(
        self, absorbed: Projected, cache: Tensor, batch: AttentionBatch, chosen: Chosen
    ) -> Tensor:
        """Attend in absorbed form from tokens that choose; their rows are in the cache."""
        indexer, layout = self._spec.indexer, latent_layout(self._spec, cache.dtype)
        assert indexer is not None, "its tokens choose"
        if isinstance(layout, IndexedLayout):
            keys_NBI = layout.index_keys(cache)
            rows, pool = self._index_rows(absorbed), indexer.entry_tokens
            chosen_TK = choose_positions(
                rows, keys_NBI, batch, indexer.top_k // pool, entry_tokens=pool
            )
            if pool > 1:
                chosen_TK = with_tail(chosen_TK, positions_of(batch), pool)
            chosen.positions = (chosen_TK,)
            cache = layout.attended_blocks(cache)
        (positions_TK,) = chosen.positions
        return attend_chosen(
            absorbed.query_THD,
            cache,
            batch,
            positions_TK,
            rank=self._spec.kv_lora_rank,
            scale=self._spec.scale,
            sinks_H=self._host_sinks_H,
        ).flatten(1)

    def _attend_all(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        heads, query_TAD = self._heads(), projected.query_THD
        out_TAV = query_TAD.new_empty(*query_TAD.shape[:2], heads.value_dim)
        num_plain = self._num_plain(batch, heads)
        for first, end, attend in (
            (torch.zeros_like(num_plain), num_plain, self._attend_plain),
            (num_plain, batch.num_new, self._attend_and_up_project),
        ):
            rows, part = batch.cut(first, end)
            if len(rows):
                chosen = Projected(*(tensor[rows] for tensor in projected))
                out_TAV[rows] = attend(chosen, cache, part).view(len(rows), *out_TAV.shape[1:])
        return out_TAV.flatten(1)

    def staged_batch(
        self, batch: AttentionBatch, layout: CacheLayout, device: torch.device
    ) -> StagedBatch:
        indexer, minimum = self._spec.indexer, self._min_plain_tokens
        pools = None
        if indexer is not None and indexer.pool is not None:
            pools = Pools.of(batch, indexer.pool)
        compute = gpu_attention_batch.attention_compute(device, self._dtype)
        if compute is None:
            return replace(PagedBatch.of(batch, layout), pools=pools)
        if indexer is not None and sees_more_than(batch, indexer.num_seen):
            choosing = ChoosingBatch.of(
                batch,
                layout,
                compute,
                min_plain_tokens=minimum,
                top_k=indexer.top_k,
                entry_tokens=indexer.entry_tokens,
            )
            return replace(choosing, pools=pools)
        ragged = LatentRaggedBatch.of(batch, layout, compute, min_plain_tokens=minimum)
        return replace(ragged, pools=pools)

    def attend_staged(
        self,
        projected: Projected,
        staged: Tensor,
        batch: StagedBatch,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(batch, LatentRaggedBatch | ChoosingBatch):
            return self._attend_ragged(projected, staged, batch, out)
        assert isinstance(batch, PagedBatch), "made by this layer's `staged_batch`"
        layout, indexer = latent_layout(self._spec, staged.dtype), self._spec.indexer
        if isinstance(layout, IndexedLayout):
            assert indexer is not None, "it has index keys"
            rows, keys_NEI = self._index_rows(projected), layout.index_keys(staged)
            if batch.pools is None:
                keys_NEI[batch.blocks_T, batch.offsets_T] = rows.key_TI.to(keys_NEI.dtype)
            else:
                self._append_pooled(rows.key_TI, staged, batch.pools, is_on_host=False)
            pool = indexer.entry_tokens
            top_k = indexer.top_k // pool
            batch.chosen.positions = choose_paged(rows, keys_NEI, batch, top_k, entry_tokens=pool)
            staged = layout.attended_blocks(staged)
        result_TAV = append_and_attend_latent_paged(
            projected.query_THD,
            projected.key_TGD[:, 0],
            staged,
            batch,
            heads=self._heads(),
            scale=self._spec.scale,
            masks_SQC=None if indexer is None else batch.chosen.positions,
            sinks_H=self._sinks_H,
        )
        return result_TAV.flatten(1) if out is None else out.copy_(result_TAV.flatten(1))

    def absorb(self, query_TAD: Tensor, out: Tensor | None = None) -> Tensor:
        return self._heads().absorb(query_TAD, out)

    def attend_absorbed(self, absorbed: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        return self._attend_each(absorbed, cache, batch, is_absorbed=True)

    def _attend_all_absorbed(
        self, absorbed: Projected, latents: Tensor, batch: AttentionBatch
    ) -> Tensor:
        return append_and_attend_latent(
            absorbed.query_THD,
            absorbed.key_TGD[:, 0],
            latents,
            batch,
            rank=self._spec.kv_lora_rank,
            scale=self._spec.scale,
            sinks_H=self._host_sinks_H,
        ).flatten(1)

    def up_project(self, result_TX: Tensor, out: Tensor | None = None) -> Tensor:
        num_heads = self._spec.num_heads
        result_TAR = result_TX.view(-1, num_heads, self._spec.kv_lora_rank)
        if out is None:
            return self._heads().up_project(result_TAR).flatten(1)
        self._heads().up_project(result_TAR, out.view(len(out), num_heads, -1))
        return out

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        if self._gate is not None:
            attention_TX = self._gate(attention_TX, normed_TH)
        return self._output(attention_TX)

    @property
    def _min_plain_tokens(self) -> int:
        spec = self._spec
        shape = (spec.num_heads, spec.nope_head_dim + spec.value_head_dim, spec.kv_lora_rank)
        sizes = {"nope_dim": spec.nope_head_dim, "rope_dim": spec.rope_head_dim}
        return PlainLatentHeads(torch.empty(shape, device="meta"), **sizes).min_plain_tokens

    def _attend_ragged(
        self,
        projected: Projected,
        staged: Tensor,
        batch: LatentRaggedBatch | ChoosingBatch,
        out: Tensor | None,
    ) -> Tensor:
        # These modules import Triton.
        from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
            Scoring,
            append_and_attend_latent_ragged,
            append_latent_rows,
        )
        from raymoe.kernels.gpu_selection import (  # noqa: PLC0415
            append_and_attend_chosen_ragged,
            choose_positions_ragged,
        )

        layout, indexer = latent_layout(self._spec, staged.dtype), self._spec.indexer
        query_TAD, latent_TW = projected.query_THD, projected.key_TGD[:, 0]
        if isinstance(layout, IndexedLayout):
            assert indexer is not None, "it has index keys"
            rows, keys_NBI = self._index_rows(projected), layout.index_keys(staged)
            if batch.pools is None:
                append_latent_rows(rows.key_TI, keys_NBI, batch.slots_T)
            else:
                self._append_pooled(rows.key_TI, staged, batch.pools, is_on_host=False)
            if isinstance(batch, ChoosingBatch):
                pool = indexer.entry_tokens
                chosen_LK = choose_positions_ragged(rows, keys_NBI, batch, indexer.top_k // pool)
                if pool > 1:
                    chosen_LK = with_tail(chosen_LK, batch.positions_L, pool)
                batch.chosen.positions = (chosen_LK,)
            staged = layout.attended_blocks(staged)
        heads, scoring = self._heads(), Scoring(scale=self._spec.scale, sinks_H=self._sinks_H)
        if isinstance(batch, LatentRaggedBatch):
            return append_and_attend_latent_ragged(
                query_TAD, latent_TW, staged, batch, heads=heads, scoring=scoring, out=out
            )
        (positions_LK,) = batch.chosen.positions
        return append_and_attend_chosen_ragged(
            query_TAD, latent_TW, staged, batch, positions_LK, heads=heads, scoring=scoring, out=out
        )

    @staticmethod
    def _num_plain(batch: AttentionBatch, heads: LatentHeads) -> Tensor:
        """Return how many new tokens of each sequence use the plain form.

        The choice depends only on the prompt length of the row, so that rounding does not depend on
        the batch.
        """
        num_new, prompts = batch.num_new_of_prompts, batch.prompt_tokens
        lengths = batch.context_tokens if prompts is None else prompts
        return num_new.where(lengths >= heads.min_plain_tokens, 0)

    def _attend_plain(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        query_TAD, row_TW = projected.query_THD, projected.key_TGD[:, 0]
        return append_and_attend_up_projected(
            query_TAD,
            row_TW,
            cache,
            batch,
            heads=self._heads(),
            scale=self._spec.scale,
            sinks_H=self._host_sinks_H,
        )

    def _attend_and_up_project(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        absorbed = projected._replace(query_THD=self.absorb(projected.query_THD))
        return self.up_project(self._attend_all_absorbed(absorbed, cache, batch))

    def _query_latent(self, normed_TH: Tensor) -> Tensor:
        """What queries are projected from: a latent, or the input itself."""
        if self._query_down is None:
            return normed_TH
        return rms_norm(self._query_down(normed_TH), self._query_norm, self._spec.norm_eps)
