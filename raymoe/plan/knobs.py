"""The space that is searched for a node whose GPU does not hold the model."""

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace


@dataclass(frozen=True, slots=True, order=True)
class Knobs:
    """One point of the search.

    Attributes:
        batch_share: Live sequences as a share of the most that memory and workload allow, 0..1.
        num_waves: Waves of a pass.
        is_grouped: Whether the experts run once over all waves, instead of for each wave.
        look_ahead: Waves whose attention runs ahead.
        cpu_attention_fraction: Share of the decoding sequences for which the CPU attends.
        pass_tokens: Tokens of a pass.
    """

    batch_share: float
    num_waves: int
    is_grouped: bool
    look_ahead: int
    cpu_attention_fraction: float
    pass_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values of each axis: the fields of `Knobs`, in their order."""

    batch_share: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.125)
    num_waves: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    is_grouped: tuple[bool, ...] = (False, True)
    look_ahead: tuple[int, ...] = (1, 2, 15)
    cpu_attention_fraction: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2, 0.0)
    pass_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)

    def around(self, knobs: Knobs, *names: str) -> Iterator[Knobs]:
        """The points that differ from `knobs` in these fields alone."""
        axes = [getattr(self, name) for name in names]
        for values in itertools.product(*axes):
            yield replace(knobs, **dict(zip(names, values, strict=True)))

    def points(self) -> Iterator[Knobs]:
        """All of them."""
        return itertools.starmap(Knobs, itertools.product(*astuple(self)))


AXES = tuple(axis.name for axis in fields(Knobs))
