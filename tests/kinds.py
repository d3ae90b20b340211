"""Grids of which the default run has one case of each kind."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def covering(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """All combinations, of which all but a few are slow: those few have each value of each axis.

    A mapping names its values by its keys.
    """
    named = [_named(axis) for axis in axes.values()]
    longest_first = sorted(range(len(named)), key=lambda axis: -len(named[axis]))
    chosen = {
        tuple(
            _place(row, longest_first.index(axis), len(named[axis])) for axis in range(len(named))
        )
        for row in range(max(map(len, named)))
    }
    params = [
        pytest.param(
            *(named[axis][place][1] for axis, place in enumerate(places)),
            id="-".join(named[axis][place][0] for axis, place in enumerate(places)),
            marks=() if places in chosen else pytest.mark.slow,
        )
        for places in itertools.product(*(range(len(values)) for values in named))
    ]
    return pytest.mark.parametrize(tuple(axes), params)


def _named(axis: Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return [(str(name), value) for name, value in axis.items()]
    return [(str(getattr(value, "name", value)), value) for value in axis]


def _place(row: int, rank: int, length: int) -> int:
    """Where a row is on an axis: it moves on a place with each turn, so that pairs change."""
    return (row + rank * (row // length)) % length
