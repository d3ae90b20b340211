"""How blocks read a hidden state of several streams, and how their results are added to it.

T tokens, H hidden size, X columns of all streams side by side, F factors of a token. A block is
attention or a feed-forward network. The decoder knows neither how many streams there are nor how
they are mixed; a hidden state of one stream has no mixers.
"""

from typing import Protocol

import torch
from torch import Tensor

from raymoe.kernels.streams import MixerWeights, add_to_streams_, read_streams, stream_logits
from raymoe.model.gated_streams import GatedMixer
from raymoe.model.loading import Loader
from raymoe.specs.layer_weights import ATTENTION_MIXER, FFN_MIXER, MERGE
from raymoe.specs.streams import AnyStreamsSpec, GatedStreamsSpec, StreamsSpec


class Mixer(Protocol):
    """The streams around one block, which depend on each other by factors of each token."""

    def factors(self, hidden_TX: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute float32 factors of the streams that the block reads, [T, F], in `out`."""

    def read(self, hidden_TX: Tensor, factors_TF: Tensor) -> Tensor:
        """Return the input of the block before its norm, [T, H]."""

    def add_(self, hidden_TX: Tensor, delta_TH: Tensor, factors_TF: Tensor) -> None:
        """Mix the streams that the block has read and add its result, in place."""


class HyperConnection:
    """The mixer of mHC, and of iHC without its matrix; factors are logits."""

    def __init__(self, spec: StreamsSpec, loader: Loader, name: str) -> None:
        self._spec, count = spec, spec.count
        scale = loader.score_vector(f"{name}.scale")
        sizes = (count, count, count * count)[: spec.num_scales]
        self._weights = MixerWeights(
            loader.float_matrix(name),
            torch.cat([one.expand(size) for one, size in zip(scale, sizes, strict=True)]),
            loader.score_vector(f"{name}.base"),
        )

    def factors(self, hidden_TX: Tensor, out: Tensor | None = None) -> Tensor:
        return stream_logits(hidden_TX, self._weights, self._spec, out)

    def read(self, hidden_TX: Tensor, factors_TF: Tensor) -> Tensor:
        return read_streams(hidden_TX, factors_TF, self._spec)

    def add_(self, hidden_TX: Tensor, delta_TH: Tensor, factors_TF: Tensor) -> None:
        add_to_streams_(hidden_TX, delta_TH, factors_TF, self._spec)


def load_mixers(spec: AnyStreamsSpec, loader: Loader, prefix: str) -> tuple[Mixer, Mixer]:
    """Those of attention and of the feed-forward network of a layer."""
    return (
        _load_mixer(spec, loader, prefix + ATTENTION_MIXER),
        _load_mixer(spec, loader, prefix + FFN_MIXER),
    )


def _load_mixer(spec: AnyStreamsSpec, loader: Loader, name: str) -> Mixer:
    if isinstance(spec, GatedStreamsSpec):
        return GatedMixer(spec, loader, name)
    return HyperConnection(spec, loader, name)


def spread(embedded_TH: Tensor, spec: AnyStreamsSpec | None) -> Tensor:
    """Return the hidden state before the first layer."""
    return embedded_TH if spec is None else embedded_TH.repeat(1, spec.count)


def load_merge(spec: AnyStreamsSpec | None, loader: Loader) -> MixerWeights | GatedMixer | None:
    """The weights of the sum that the final norm reads; None where it reads a mean."""
    if isinstance(spec, GatedStreamsSpec):
        return GatedMixer(spec, loader, MERGE, is_last=True)
    if spec is None or spec.merge == "mean":
        return None
    scale_F = loader.score_vector(f"{MERGE}.scale").repeat(spec.count)
    return MixerWeights(
        loader.table(f"{MERGE}.weight"), scale_F, loader.score_vector(f"{MERGE}.base")
    )


def merge(
    hidden_TX: Tensor, spec: AnyStreamsSpec | None, weights: MixerWeights | GatedMixer | None
) -> Tensor:
    """Return what becomes of the streams after the last layer, [T, H]."""
    if spec is None:
        return hidden_TX
    if isinstance(weights, GatedMixer):
        return weights.read(hidden_TX, weights.factors(hidden_TX))
    assert isinstance(spec, StreamsSpec), "the others have such a mixer"
    num_tokens, size = hidden_TX.shape
    if weights is not None:
        logits_TS = hidden_TX.new_empty(num_tokens, spec.count, dtype=torch.float32)
        return read_streams(hidden_TX, stream_logits(hidden_TX, weights, spec, logits_TS), spec)
    return hidden_TX.view(num_tokens, spec.count, size // spec.count).mean(1)
