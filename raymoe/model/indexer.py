"""The lightning indexer of a layer: index keys, queries and weights of tokens."""

import torch
from torch import Tensor

from raymoe.kernels.elementwise import rotate_heads
from raymoe.model.loading import Loader
from raymoe.model.norms import LayerNorm
from raymoe.model.rope import Angles
from raymoe.specs.layers import IndexerSpec

# Epsilon of the norm of index keys in every transformers class, whatever rms_norm_eps says.
KEY_NORM_EPS = 1e-6


class Indexer:
    """Index rows of one layer's tokens, as `kernels.selection.IndexRows` splits them."""

    def __init__(self, spec: IndexerSpec, loader: Loader, prefix: str) -> None:
        self._spec = spec
        self._query = loader.linear([f"{prefix}wq_b"])
        self._key = loader.linear([f"{prefix}wk"])
        self._key_norm = LayerNorm(
            loader.vector(f"{prefix}k_norm.weight"),
            loader.vector(f"{prefix}k_norm.bias"),
            KEY_NORM_EPS,
        )
        self._weights = loader.linear([f"{prefix}weights_proj"])

    def __call__(self, normed_TH: Tensor, latent_TL: Tensor, angles: Angles) -> Tensor:
        """Return rows [T, X] for tokens with these inputs of attention and query latents."""
        spec = self._spec
        key_TI = self._key_norm(self._key(normed_TH))
        query_TX = self._query(latent_TL)
        shape = (len(key_TI), 1 + spec.num_heads, spec.head_dim)
        heads_TNI = torch.cat([key_TI, query_TX], dim=1).view(shape)
        rows_T, *tables = angles
        cosines, sines = (table_PR[rows_T.long(), None].to(key_TI.dtype) for table_PR in tables)
        rotated_TNI = rotate_heads(heads_TNI, cosines, sines, is_interleaved=spec.is_interleaved)
        return torch.cat([rotated_TNI.flatten(1), self._weights(normed_TH)], dim=1)
