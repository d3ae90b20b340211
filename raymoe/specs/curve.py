"""Curve: a measured quantity over the size at which it was measured."""

import bisect
import itertools
import math
from dataclasses import dataclass

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Curve:
    """Values between the measured points, straight on logarithmic axes, and constant outside.

    A roofline over intensity is two straight lines on these axes: the interpolation is exact where
    memory binds (the rate grows with the rows) and where operations do (it is constant).

    Attributes:
        points: Pairs of a size and the value there, all positive, sizes ascending.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("Curve.points is empty; a curve needs at least one point")
        for size, value in self.points:
            if not (0 < size < math.inf and 0 < value < math.inf):
                raise ConfigError(
                    f"Curve.points has ({size!r}, {value!r}); both must be positive and finite"
                )
        sizes = [size for size, _ in self.points]
        if any(later <= earlier for earlier, later in itertools.pairwise(sizes)):
            raise ConfigError(f"Curve.points has the sizes {sizes}; they must ascend")

    def at(self, size: float) -> float:
        """The value at a positive size."""
        index = bisect.bisect_right(self.points, size, key=lambda point: point[0])
        if index == 0 or index == len(self.points):
            return self.points[max(0, index - 1)][1]
        (left, low), (right, high) = self.points[index - 1 : index + 1]
        share = math.log(size / left) / math.log(right / left)
        return math.exp((1 - share) * math.log(low) + share * math.log(high))

    def scaled(self, factor: float) -> "Curve":
        """The same sizes, with all values multiplied."""
        return Curve(tuple((size, factor * value) for size, value in self.points))

    @property
    def highest(self) -> float:
        """The largest measured value."""
        return max(value for _, value in self.points)
