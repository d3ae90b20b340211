"""Loops over sequences and tokens, compiled: the one place that knows numba."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

Args = ParamSpec("Args")
Result = TypeVar("Result")


def compiled(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Compile on first call, keep the result on disk, release the GIL while it runs."""
    return cast("Callable[Args, Result]", numba.njit(cache=True, nogil=True)(function))
