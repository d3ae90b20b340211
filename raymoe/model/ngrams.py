"""Layers that add embeddings of n-grams of token ids to the streams of the hidden state.

T tokens, S streams, H hidden size, X = S H columns of all streams side by side, E elements of the
embeddings of a token, C = X channels of the convolution.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from raymoe.errors import CheckpointError
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gated_streams import norm_streams
from raymoe.kernels.gpu_state.scan import StateBatch
from raymoe.kernels.ngrams import read_rows, table_rows
from raymoe.kernels.paged_kv import StateLayout
from raymoe.kernels.state import causal_conv
from raymoe.model.loading import Loader
from raymoe.model.recurrent import Stateful
from raymoe.model.rope import Angles
from raymoe.specs.attention.ngrams import (
    NGRAM_MULTIPLIERS,
    NGRAM_OFFSETS,
    NGRAM_SCALE,
    NGRAM_SIZES,
    NGRAMS,
    NgramLayerSpec,
    NgramSpec,
)


class _Constants(NamedTuple):
    """What the convolution reads, in float32 where the states are.

    Attributes:
        conv_CW: The transpose of a contiguous [W, C], zero between the taps.
    """

    norm_X: Tensor
    conv_CW: Tensor

    @classmethod
    def of(
        cls, spec: NgramLayerSpec, loader: Loader, prefix: str, *, is_on_host: bool
    ) -> "_Constants":
        def load(name: str) -> Tensor:
            return loader.score_vector(f"{prefix}{NGRAMS}{name}.weight", is_on_host=is_on_host)

        taps_CW = load("conv")[:, 0]
        conv_WC = taps_CW.new_zeros(spec.conv_width, len(taps_CW))
        conv_WC[:: spec.dilation] = taps_CW.T
        return cls(load("conv_norm"), conv_WC.T)


class Ngrams(Stateful):
    """One such layer. In `Projected`, queries are the gated embeddings of all streams."""

    def __init__(
        self, spec: NgramLayerSpec, loader: Loader, prefix: str, *, num_streams: int
    ) -> None:
        """Load the weights `prefix` + "ngrams.k_proj.weight" and so on."""
        self._spec, self._dtype, self._num_streams = spec, loader.dtype, num_streams
        self._keys_and_values = loader.linear([f"{prefix}{NGRAMS}{part}_proj" for part in "kv"])
        self._key_norm_X, self._query_norm_X = (
            loader.vector(f"{prefix}{NGRAMS}{part}_norm.weight") for part in "kq"
        )
        self._constants_on_host = _Constants.of(spec, loader, prefix, is_on_host=True)
        self._constants_on_device = _Constants.of(spec, loader, prefix, is_on_host=False)
        self._table = _Table(spec.ngrams, loader, prefix)

    def embed(self, token_ids_T: Tensor, query_start: Tensor, past_SP: Tensor | None) -> Tensor:
        """Read the embeddings of the n-grams that end at each token, [T, E]; on the host."""
        return self._table.read(token_ids_T, query_start, past_SP)

    def gate(self, hidden_TX: Tensor, embedded_TE: Tensor) -> Tensor:
        """Return the value of the embeddings in each stream, times that stream's gate, [T, X]."""
        count, width = self._num_streams, self._spec.width
        both_TY = self._keys_and_values(embedded_TE)
        key_TX = norm_streams(both_TY[:, :width], self._key_norm_X, count, self._spec.norm_eps)
        query_TX = norm_streams(hidden_TX, self._query_norm_X, count, self._spec.norm_eps)
        hidden_size = width // count
        products_TSH = (key_TX.float() * query_TX.float()).view(-1, count, hidden_size)
        logits_TS = products_TSH.sum(-1) / hidden_size**0.5
        logits_TS = logits_TS.abs().clamp_min(1e-6).sqrt() * logits_TS.sign()
        value_T1H = both_TY[:, None, width:].float()
        gated_TSH = logits_TS.sigmoid()[..., None] * value_T1H
        gated_TX: Tensor = gated_TSH.flatten(1).to(hidden_TX.dtype)
        return gated_TX

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        """Return the output of `gate` as it is."""
        del angles
        gated_T1X = normed_TH[:, None]
        if out is None:
            nothing = gated_T1X[..., :0]
            return Projected(gated_T1X, nothing, nothing)
        out.query_THD.copy_(gated_T1X)
        return out

    def _update(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch | StateBatch
    ) -> Tensor:
        is_on_device = isinstance(batch, StateBatch)
        constants = self._constants_on_device if is_on_device else self._constants_on_host
        past_NPC, _ = ngram_layout(self._spec, self._dtype).views(cache)
        gated_TX = projected.query_THD[:, 0]
        normed_TX = norm_streams(gated_TX, constants.norm_X, self._num_streams, self._spec.norm_eps)
        mixed_TX = causal_conv(
            normed_TX, constants.conv_CW, None, past_NPC, batch, activation="silu"
        )
        mixed_TX += gated_TX
        return mixed_TX

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        """Return what is added to all streams."""
        del normed_TH
        return attention_TX


class _Table:
    """The table of a layer in host memory."""

    def __init__(self, spec: NgramSpec, loader: Loader, prefix: str) -> None:
        self._spec, self._dtype = spec, loader.dtype
        self._table_RD = loader.ngram_table(prefix, spec)
        self._scale = float(loader.host_tensor(f"{prefix}{NGRAM_SCALE}"))
        known = {
            NGRAM_MULTIPLIERS: spec.multipliers,
            NGRAM_SIZES: spec.sizes,
            NGRAM_OFFSETS: spec.offsets,
        }
        for name, values in known.items():
            found = tuple(loader.host_tensor(f"{prefix}{name}").tolist())
            if found != values:
                raise CheckpointError(
                    f"{prefix}{name} holds {found}, and config.json says {values}: the tables are "
                    "of another configuration"
                )

    def read(self, token_ids_T: Tensor, query_start: Tensor, past_SP: Tensor | None) -> Tensor:
        rows_TN = table_rows(token_ids_T, query_start, past_SP, self._spec)
        return read_rows(self._table_RD, rows_TN, self._scale, self._dtype)


def ngram_layout(spec: NgramLayerSpec, dtype: torch.dtype) -> StateLayout:
    """The last inputs of the convolution, and no matrices."""
    return StateLayout(
        past=(spec.conv_width - 1, spec.width),
        heads=(1, 0, spec.width),
        past_dtype=dtype,
        heads_dtype=torch.float32,
    )
