"""Attention to the last tokens and to compressed entries of earlier ones (DeepSeek-V4).

T tokens, H hidden size, A query heads, W width of queries, rows and entries, G groups of heads, J
index heads, I elements of an index key.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raymoe.kernels.compressed import (
    CompressedBatch,
    CompressedBatches,
    CompressedScoring,
    EntryIndex,
    Pooling,
    append_and_attend_compressed,
    append_index_keys,
    choose_entries,
    keep_rows,
    rotate_ends,
)
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_compressed import append_and_attend_compressed_on_host, pool_entries
from raymoe.kernels.elementwise import Projected, copied, rms_norm
from raymoe.kernels.gpu_attention_batch import ChoosingTokens, attention_compute
from raymoe.kernels.paged_kv import CompressedLayout
from raymoe.kernels.selection import IndexRows, choose_positions, sees_more_than
from raymoe.model.attention import OneForm
from raymoe.model.loading import Loader
from raymoe.model.rope import Angles, Rotary
from raymoe.specs.attention.compressed import CompressedAttentionSpec, EntryIndexerSpec


class CompressedAttention(OneForm):
    """Such attention of one layer, where its cache is: on the host or on the device.

    In `Projected`, keys are the rows of the tokens, and values what entries are made of; then what
    their index keys are made of, index queries, and weights of their heads.
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
        self._indexer = None
        if spec.indexer is not None:
            self._indexer = EntryIndexer(spec, spec.indexer, loader, f"{prefix}indexer.")
        self._on_host = _scoring(spec, loader, prefix, is_on_host=True)
        self._on_device = _scoring(spec, loader, prefix, is_on_host=False)
        self._groups = loader.grouped_linear(f"{prefix}o_a_proj", spec.num_groups)
        self._output = loader.linear([f"{prefix}o_proj"])

    @property
    def layout(self) -> CompressedLayout:
        return self._layout

    @property
    def num_heads(self) -> int:
        return self._spec.num_heads

    @property
    def num_seen(self) -> int | None:
        """The longest context all of whose entries a token sees; None for any."""
        return self._spec.num_seen

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        """Return rotated queries [T, A, W], rotated rows [T, 1, W], and [T, 1, X] to be pooled."""
        spec = self._spec
        positions_T, tables = angles.rows_T, (angles.cos_PR, angles.sin_PR)
        sizes = [spec.q_lora_rank, spec.head_dim]
        latent_TL, row_TW = torch.split(self._down(normed_TH), sizes, dim=1)
        latent_TL = rms_norm(latent_TL, self._query_norm, spec.norm_eps, 0.0)
        query_TX = self._query(latent_TL)
        num_tokens, num_heads, width = len(normed_TH), spec.num_heads, spec.head_dim
        query_XW = rms_norm(query_TX.view(num_tokens * num_heads, width), None, spec.norm_eps)
        query_TAW = query_XW.view(num_tokens, num_heads, width)
        row_T1W = rms_norm(row_TW, self._row_norm, spec.norm_eps, 0.0)[:, None]
        pooled_T1X = row_T1W[..., :0] if self._pooled is None else self._pooled(normed_TH)[:, None]
        if self._indexer is not None:
            index_TX = self._indexer(normed_TH, latent_TL, angles)
            pooled_T1X = torch.cat([pooled_T1X, index_TX[:, None]], dim=2)
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
            self._pooled_of(projected),
            cache,
            batch,
            layout=self._layout,
            tables=self._host_rotary.tables,
            scoring=self._on_host,
            chosen_TK=self._choose_on_host(projected, cache, batch),
        ).flatten(1)

    def append(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> None:
        """Append to the layer's cache on the host without attending; queries are not read."""
        entries_NEW, rows_MRW, sums_MA3W = self._layout.views(cache)
        if self._on_host.pooling is not None:
            pool_entries(
                self._pooled_of(projected), (entries_NEW, sums_MA3W), batch,
                ratio=self._layout.ratio, tables=self._host_rotary.tables,
                pooling=self._on_host.pooling,
            )  # fmt: skip
        if self._indexer is not None:
            index = self._indexer.index_of(projected, is_on_host=True)
            self._append_index_keys(index, cache, batch)
        indices = CompressedBatch.of(batch, self._layout, self._spec.num_heads)
        keep_rows(projected.key_TGD[:, 0], rows_MRW, indices)

    def _append_index_keys(self, index: EntryIndex, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Append the index keys of entries on the host; return all, [N, E, I]."""
        keys_and_sums = self._layout.index_views(cache)
        pool_entries(
            index.pooled_TX, keys_and_sums, batch,
            ratio=self._layout.ratio, tables=self._host_rotary.tables, pooling=index.pooling,
        )  # fmt: skip
        return keys_and_sums[0]

    def _choose_on_host(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch
    ) -> Tensor | None:
        """Append index keys and choose, [T, K] int32; None where all entries are seen."""
        indexer = self._indexer
        if indexer is None:
            return None
        index = indexer.index_of(projected, is_on_host=True)
        keys_NEI = self._append_index_keys(index, cache, batch)
        if not sees_more_than(batch, indexer.num_seen):
            return None
        return choose_positions(
            index.rows, keys_NEI, batch, indexer.top_k, entry_tokens=indexer.ratio
        )

    def _pooled_of(self, projected: Projected) -> Tensor:
        return projected.value_TGV[:, 0, : 2 * self._spec.pooled_width]

    def attend_staged(
        self,
        projected: Projected,
        cache: Tensor,
        batch: CompressedBatches,
        out: Tensor | None = None,
    ) -> Tensor:
        """Add to the cache on the device of the weights and attend there; [T, A * W], in `out`."""
        indices, tables = batch.of_layout(self._layout), self._rotary.tables
        chosen_TK = None
        if self._indexer is not None:
            index = self._indexer.index_of(projected, is_on_host=False)
            keys_NEI = append_index_keys(index, cache, indices, layout=self._layout, tables=tables)
            if batch.are_chosen:
                chosen_TK = self._indexer.choose_staged(index, keys_NEI, indices, batch.choosing)
        result_TX = append_and_attend_compressed(
            projected.query_THD,
            projected.key_TGD[:, 0],
            self._pooled_of(projected),
            cache,
            indices,
            layout=self._layout,
            tables=tables,
            scoring=self._on_device,
            chosen_TK=chosen_TK,
        ).flatten(1)
        return result_TX if out is None else out.copy_(result_TX)

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        del normed_TH
        num_groups = self._spec.num_groups
        width = attention_TX.shape[1] // num_groups
        groups_TGI = attention_TX.view(len(attention_TX), num_groups, width)
        return self._output(self._groups(groups_TGI).flatten(1))


class EntryIndexer:
    """What chooses entries in one layer."""

    def __init__(
        self,
        spec: CompressedAttentionSpec,
        indexer: EntryIndexerSpec,
        loader: Loader,
        prefix: str,
    ) -> None:
        """Load the weights `prefix` + "wq_b" and so on."""
        assert spec.ratio is not None, "it has entries"
        assert spec.num_seen is not None, "it has entries"
        self._spec, self._indexer, self.ratio = spec, indexer, spec.ratio
        self.num_seen, self.top_k = spec.num_seen, indexer.top_k
        self._query = loader.linear([f"{prefix}wq_b"])
        self._weights = loader.linear([f"{prefix}weights_proj"])
        self._pooled = loader.linear([f"{prefix}{part}_proj" for part in ("kv", "gate")])
        self._poolings = tuple(
            _pooling(spec, loader, prefix, is_on_host=on_host) for on_host in (False, True)
        )

    def __call__(self, normed_TH: Tensor, latent_TL: Tensor, angles: Angles) -> Tensor:
        """Return rows [T, 4 I + J * I + J] for tokens with these inputs and query latents."""
        query_TX = self._query(latent_TL)
        heads = (self._indexer.num_heads, self._indexer.head_dim)
        query_TJI = query_TX.view(len(query_TX), *heads)
        tables = (angles.cos_PR, angles.sin_PR)
        rotated_TJI = rotate_ends(query_TJI, angles.rows_T, tables)
        parts = [self._pooled(normed_TH), rotated_TJI.flatten(1), self._weights(normed_TH)]
        return torch.cat(parts, dim=1)

    def index_of(self, projected: Projected, *, is_on_host: bool) -> EntryIndex:
        spec, indexer = self._spec, self._indexer
        index_TX = projected.value_TGV[:, 0, 2 * spec.pooled_width :]
        pooled = 2 * spec.num_sums * indexer.head_dim
        sizes = [pooled, indexer.num_heads * indexer.head_dim, indexer.num_heads]
        pooled_TX, query_TX, weight_TJ = torch.split(index_TX, sizes, dim=1)
        rows = IndexRows(query_TX[:, :0], query_TX, weight_TJ)
        return EntryIndex(pooled_TX=pooled_TX, rows=rows, pooling=self._poolings[is_on_host])

    def choose_staged(
        self,
        index: EntryIndex,
        keys_NEI: Tensor,
        indices: CompressedBatch,
        choosing: ChoosingTokens | None,
    ) -> Tensor:
        if choosing is None:
            return choose_entries(index.rows, keys_NEI, indices, ratio=self.ratio, top_k=self.top_k)
        # This module imports Triton.
        from raymoe.kernels.gpu_selection import choose_positions_ragged  # noqa: PLC0415

        return choose_positions_ragged(index.rows, keys_NEI, choosing, self.top_k)


def _scoring(
    spec: CompressedAttentionSpec, loader: Loader, prefix: str, *, is_on_host: bool
) -> CompressedScoring:
    pooling = None
    if spec.ratio is not None:
        pooling = _pooling(spec, loader, f"{prefix}compressor.", is_on_host=is_on_host)
    sinks_H = loader.score_vector(f"{prefix}sinks", is_on_host=is_on_host)
    return CompressedScoring(scale=spec.scale, sinks_H=sinks_H, pooling=pooling)


def _pooling(
    spec: CompressedAttentionSpec, loader: Loader, prefix: str, *, is_on_host: bool
) -> Pooling:
    return Pooling(
        bias_MX=loader.score_vector(f"{prefix}position_bias", is_on_host=is_on_host),
        norm_W=loader.score_vector(f"{prefix}kv_norm.weight", is_on_host=is_on_host),
        eps=spec.norm_eps,
    )


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
    attending = compute
    if compute is not None and (dtype == torch.float32 or not compute.has_tensor_cores):
        attending = None
    batches = tuple(CompressedBatch.of(batch, layout, num_heads, attending) for layout in layouts)
    indexed = next((layer for layer in layers if layer.num_seen is not None), None)
    if indexed is None or indexed.num_seen is None or not sees_more_than(batch, indexed.num_seen):
        return CompressedBatches(layouts, batches)
    choosing = None
    if compute is not None:
        choosing = ChoosingTokens.of(batch, compute, entry_tokens=indexed.layout.ratio or 1)
    return CompressedBatches(layouts, batches, are_chosen=True, choosing=choosing)


def compressed_layout(spec: CompressedAttentionSpec, dtype: torch.dtype) -> CompressedLayout:
    return CompressedLayout(
        width=spec.head_dim,
        window=spec.sliding_window,
        ratio=spec.ratio,
        num_sums=spec.num_sums,
        dtype=dtype,
        index_dim=spec.index_head_dim,
    )
