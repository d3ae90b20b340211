"""A weight by name and shape, and what reads it."""

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Shape = tuple[int, ...]
# What reads a weight: products before attention, products after it, the router, the factors of
# several streams, or sums, which do not count as work.
Reader = Literal["pre", "post", "router", "mixers", "added"]


class Weight(NamedTuple):
    """A weight of a layer.

    Attributes:
        name: Canonical, without the layer's prefix.
        rows_before: First rows of a matrix that products before attention read, where others read
            the rest.
    """

    name: str
    shape: Shape
    reader: Reader = "pre"
    rows_before: int = 0


def linear(
    name: str, shape: Shape, reader: Reader = "pre", *, has_bias: bool = False
) -> Iterator[Weight]:
    """A matrix [O, I] or a norm's vector, and a bias as long as its first axis."""
    yield Weight(f"{name}.weight", shape, reader)
    if has_bias:
        yield Weight(f"{name}.bias", shape[:1], reader)


def num_elements(weights: Iterable[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def shapes(weights: Iterable[Weight]) -> dict[str, Shape]:
    return {weight.name: weight.shape for weight in weights}
