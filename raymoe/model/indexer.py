"""The lightning indexers of a layer: index keys, queries and weights of tokens."""

import torch
from torch import Tensor

from raymoe.kernels.elementwise import rms_norm, rotate_heads
from raymoe.kernels.paged_kv import IndexedLayout
from raymoe.kernels.selection import Pools, pool_tokens
from raymoe.model.loading import Loader
from raymoe.model.norms import LayerNorm
from raymoe.model.rope import Angles, Rotary
from raymoe.specs.attention.grouped import BlockIndexerSpec, PooledIndexerSpec
from raymoe.specs.attention.latent import IndexerSpec


class Indexer:
    """Index rows of one layer's tokens, as `kernels.selection.IndexRows` splits them."""

    def __init__(self, spec: IndexerSpec, loader: Loader, prefix: str) -> None:
        self._spec = spec
        self._query = loader.linear([f"{prefix}wq_b"])
        self._key = loader.linear([f"{prefix}wk"])
        self._key_norm = LayerNorm(
            loader.vector(f"{prefix}k_norm.weight"),
            loader.vector(f"{prefix}k_norm.bias"),
            spec.key_norm_eps,
        )
        self._weights = loader.linear([f"{prefix}weights_proj"])
        self._pool_scores = None
        self._pool_biases: tuple[Tensor, ...] = ()
        if spec.pool is not None:
            self._pool_scores = loader.linear([f"{prefix}pool_gate"])
            self._pool_biases = tuple(
                loader.score_vector(f"{prefix}pool_bias", is_on_host=on_host)
                for on_host in (False, True)
            )

    def pool_bias(self, is_on_host: bool) -> Tensor:
        """What is added to the scores of an entry's tokens, [P, I] float32."""
        return self._pool_biases[is_on_host]

    def __call__(self, normed_TH: Tensor, latent_TL: Tensor, angles: Angles) -> Tensor:
        """Return rows [T, X] for tokens with these inputs of attention and query latents."""
        spec = self._spec
        key_TI = self._key_norm(self._key(normed_TH))
        query_TX = self._query(latent_TL)
        shape = (len(key_TI), 1 + spec.num_heads, spec.head_dim)
        heads_TNI = torch.cat([key_TI, query_TX], dim=1).view(shape)
        rows_T, *tables = angles
        cosines, sines = (table_PR[rows_T.long(), None].to(key_TI.dtype) for table_PR in tables)
        if spec.rotates_end:  # products are the same in any order of dimensions
            heads_TNI = heads_TNI.roll(2 * cosines.shape[-1], -1)
        rotated_TNI = rotate_heads(heads_TNI, cosines, sines, is_interleaved=spec.is_interleaved)
        rows_TX = torch.cat([rotated_TNI.flatten(1), self._weights(normed_TH)], dim=1)
        if self._pool_scores is None:
            return rows_TX
        key_TI, others_TX = rows_TX.tensor_split([spec.head_dim], dim=1)
        return torch.cat([key_TI, self._pool_scores(normed_TH), others_TX], dim=1)


class BlockIndexer:
    """Index keys and queries of one layer's tokens, whose products score blocks of positions."""

    def __init__(
        self, spec: BlockIndexerSpec, loader: Loader, prefix: str, *, norm: tuple[float, float]
    ) -> None:
        """Load the weights `prefix` + "q_proj" and so on.

        Args:
            norm: Epsilon of the norms of heads, and what is added to their weights.
        """
        self._spec, (self._eps, self._offset) = spec, norm
        self._both = loader.linear([f"{prefix}{part}_proj" for part in "kq"])
        self._norms = [loader.vector(f"{prefix}{part}_norm.weight") for part in "kq"]

    def __call__(self, normed_TH: Tensor, angles: Angles) -> Tensor:
        """Return rows [T, I + J * I]: the key, then queries."""
        spec, both_TX = self._spec, self._both(normed_TH)
        heads_TNI = both_TX.view(len(both_TX), 1 + spec.num_heads, spec.head_dim)
        parts = heads_TNI.tensor_split([1], dim=1)
        normed = [
            rms_norm(part.reshape(-1, spec.head_dim), weight_I, self._eps, self._offset)
            for part, weight_I in zip(parts, self._norms, strict=True)
        ]
        heads_TNI = torch.cat(
            [rows.view(part.shape) for rows, part in zip(normed, parts, strict=True)], dim=1
        )
        rows_T, *tables = angles
        cosines, sines = (table_PR[rows_T.long(), None].to(heads_TNI.dtype) for table_PR in tables)
        return rotate_heads(heads_TNI, cosines, sines, is_interleaved=False).flatten(1)


class PooledIndexer:
    """Index queries of one layer's tokens, and index keys of blocks of a few tokens."""

    def __init__(
        self,
        spec: PooledIndexerSpec,
        loader: Loader,
        prefix: str,
        *,
        norm: tuple[float, float],
        rotaries: tuple[Rotary, Rotary],
    ) -> None:
        """Load the weights `prefix` + "q_proj" and so on.

        Args:
            norm: Epsilon of the norms of heads, and what is added to their weights.
            rotaries: That of the device of the weights, and that of the host.
        """
        self._spec, (self._eps, self._offset), self._rotaries = spec, norm, rotaries
        self._both = loader.linear([f"{prefix}{part}_proj" for part in "kq"])
        self._query_norm = loader.vector(f"{prefix}q_norm.weight")
        self._key_norms = tuple(
            loader.score_vector(f"{prefix}k_norm.weight", is_on_host=on_host).to(loader.dtype)
            for on_host in (False, True)
        )

    def __call__(self, normed_TH: Tensor, angles: Angles) -> Tensor:
        """Return rows [T, I + J * I]: the token's share of a key, then its queries."""
        both_TX, dim = self._both(normed_TH), self._spec.head_dim
        key_TI, query_TX = both_TX.tensor_split([dim], dim=1)
        heads_XI = query_TX.reshape(-1, dim)
        heads_XI = rms_norm(heads_XI, self._query_norm, self._eps, self._offset)
        heads_TJI = heads_XI.view(len(both_TX), self._spec.num_heads, dim)
        query_TJI = _rotated(heads_TJI, angles.rows_T, angles[1:])
        return torch.cat([key_TI, query_TJI.flatten(1)], dim=1)

    def append(
        self, key_TI: Tensor, cache: Tensor, layout: IndexedLayout, pools: Pools, *, on_host: bool
    ) -> None:
        """Add tokens to the keys of their blocks, in place, on the device of the arguments.

        Args:
            cache: Blocks of one layer.
        """
        keys_NEI = layout.index_keys(cache)
        rows_EPI = pool_tokens(key_TI, layout.open_tokens(cache), pools)
        mean_EI = rows_EPI.float().mean(1).to(key_TI.dtype)
        normed_EI = rms_norm(mean_EI, self._key_norms[on_host], self._eps, self._offset)
        tables = self._rotaries[on_host].tables
        rotated_E1I = _rotated(normed_EI[:, None], pools.first_E, tables)
        keys_NEI[pools.block_E, pools.row_E] = rotated_E1I[:, 0].to(keys_NEI.dtype)


def _rotated(heads_TNI: Tensor, rows_T: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Rotate halves of the first dimensions by rows of the tables."""
    rows_T = rows_T.long()
    cosines, sines = (table_PR[rows_T, None].to(heads_TNI.dtype) for table_PR in tables)
    return rotate_heads(heads_TNI, cosines, sines, is_interleaved=False)
