"""A hidden state of several streams, and how blocks read and write them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from raymoe.specs.weights import Weight

StreamMerge = Literal["mean", "weighted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """A hidden state of several streams, all as wide as the input of a block (mHC).

    A matrix turns the streams of a token into logits, one for each factor: `pre` weighs the streams
    that a block reads, `post` its result in each stream, and a matrix mixes the streams before that
    is added. The sums of its rows and columns are brought near 1 in turns. At first the streams are
    copies of the embedding.

    Independent streams (iHC) have no matrix: what a block adds is `post` times its result, in
    float32.

    Source: Manifold-Constrained Hyper-Connections (arXiv 2512.24880), section 4.2.
    """

    count: int
    # Added to `pre`, to the matrix and to the sums that divide it; without a matrix to `post`.
    eps: float
    norm_eps: float  # of the RMS norm of all streams, without a weight, that the logits read
    # How often columns are divided by their sums, rows once less; None: there is no matrix.
    sinkhorn_iterations: int | None
    magnitude: float = 2.0  # of `post`: factor of a sigmoid
    # What the streams become after the last layer: their mean, or a sum weighed as `pre` weighs.
    merge: StreamMerge = "mean"

    @property
    def num_factors(self) -> int:
        """Logits of a block: `pre`, `post`, then the matrix."""
        return (2 + self.count * self.is_mixed) * self.count

    @property
    def num_scales(self) -> int:
        """Factors of the logits of `pre`, `post` and the matrix."""
        return 2 + self.is_mixed

    @property
    def is_mixed(self) -> bool:
        return self.sinkhorn_iterations is not None

    @property
    def working_width(self) -> int:
        """Elements of a token that mixing allocates."""
        return 0

    @property
    def has_final_norm(self) -> bool:
        """Whether what is read after the last layer is normed again."""
        return True

    def mixer_weights(self, name: str, hidden_size: int) -> Iterator[Weight]:
        """Weights that the factors of a block come from."""
        width = self.count * hidden_size
        yield Weight(f"{name}.weight", (self.num_factors, width), "mixers")
        yield Weight(f"{name}.base", (self.num_factors,), "mixers")
        yield Weight(f"{name}.scale", (self.num_scales,), "mixers")

    def merge_weights(self, name: str, hidden_size: int) -> Iterator[Weight]:
        """Weights that say what the streams become after the last layer."""
        if self.merge == "weighted":
            yield Weight(f"{name}.weight", (self.count, self.count * hidden_size), "mixers")
            yield Weight(f"{name}.base", (self.count,), "mixers")
            yield Weight(f"{name}.scale", (1,), "mixers")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreamsSpec:
    """A hidden state of several streams that are read by gates of each channel.

    Each stream has an RMS norm with its own weight. A block reads the mean of the normed streams,
    each times a sigmoid from a latent of all of them, and needs no other norm. Its result is added
    to each stream, times a factor of that stream; the streams are not mixed. What is read after the
    last layer goes to the head as it is.
    """

    count: int
    latent_width: int
    norm_eps: float

    @property
    def num_factors(self) -> int:
        """Logits of the streams that a block's result is added to, then the latent."""
        return self.count + self.latent_width

    @property
    def working_width(self) -> int:
        """Elements of a token that mixing allocates: normed streams and gates, in hidden sizes."""
        return 2 * self.count

    @property
    def has_final_norm(self) -> bool:
        return False

    def mixer_weights(self, name: str, hidden_size: int) -> Iterator[Weight]:
        # The first two are one matrix: their places are neighbours.
        inject = (self.count, self.count * hidden_size)
        yield Weight(f"{name}.inject.weight", inject, "mixers")
        yield from self.merge_weights(name, hidden_size)

    def merge_weights(self, name: str, hidden_size: int) -> Iterator[Weight]:
        width = self.count * hidden_size
        yield Weight(f"{name}.down.weight", (self.latent_width, width), "mixers")
        yield Weight(f"{name}.up.weight", (width, self.latent_width), "mixers")
        yield Weight(f"{name}.norm.weight", (width,), "mixers")


AnyStreamsSpec = StreamsSpec | GatedStreamsSpec
