"""The compiled kernels, which are installed beside the package as `_raymoe_native`, and numba's.

Beside and not inside it, so that a source tree that hides the installed package finds them too.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import _raymoe_native
from _raymoe_native import *  # noqa: F403 - the types are in _native.pyi

from raymoe._version import __version__

if _raymoe_native.__version__ != __version__:
    raise ImportError(
        f"the compiled kernels are of raymoe {_raymoe_native.__version__}, the Python code of "
        f"{__version__}; install again with: pip install ."
    )

Args = ParamSpec("Args")
Result = TypeVar("Result")


def compiled(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Compile on first call, keep the result on disk if possible, release the GIL while it runs."""
    import numba  # noqa: PLC0415 - half a second, for those that compile

    try:
        found = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package nor the user has a directory that can be written
        found = numba.njit(nogil=True)(function)
    return cast("Callable[Args, Result]", found)
