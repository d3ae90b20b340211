"""Streams of a hidden state that blocks read by gates of each channel.

T tokens, H hidden size, X columns of all streams side by side, F factors of a token.
"""

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.kernels.gated_streams import add_gated_, norm_streams, read_gated
from raymoe.model.loading import Loader
from raymoe.specs.streams import GatedStreamsSpec


class GatedMixer:
    """The streams around one block, or after the last one, to which nothing is added.

    Factors are the logits of the streams that a result is added to, and the latent of the gates.
    """

    def __init__(
        self, spec: GatedStreamsSpec, loader: Loader, name: str, *, is_last: bool = False
    ) -> None:
        self._spec, self._dtype = spec, loader.dtype
        self._norm_X = loader.vector(f"{name}.norm.weight")
        parts = ("down",) if is_last else ("inject", "down")
        self._down = loader.linear([f"{name}.{part}" for part in parts])
        self._up = loader.linear([f"{name}.up"])
        self._num_factors = spec.latent_width if is_last else spec.num_factors

    def factors(self, hidden_TX: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            size = (len(hidden_TX), self._num_factors)
            out = torch.empty(size, dtype=torch.float32, device=hidden_TX.device)
        self._down(self._normed(hidden_TX), out)
        return out

    def read(self, hidden_TX: Tensor, factors_TF: Tensor) -> Tensor:
        count, width = self._spec.count, self._spec.latent_width
        latent_TL = functional.silu(factors_TF[:, -width:] / count).to(self._dtype)
        return read_gated(self._normed(hidden_TX), self._up(latent_TL), count)

    def add_(self, hidden_TX: Tensor, delta_TH: Tensor, factors_TF: Tensor) -> None:
        add_gated_(hidden_TX, delta_TH, factors_TF, self._spec.count)

    def _normed(self, hidden_TX: Tensor) -> Tensor:
        return norm_streams(hidden_TX, self._norm_X, self._spec.count, self._spec.norm_eps)
