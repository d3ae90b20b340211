"""The compiled kernels, which are installed beside the package as `_raymoe_native`.

Beside and not inside it, so that a source tree that hides the installed package finds them too.
"""

import _raymoe_native
from _raymoe_native import *  # noqa: F403 - the types are in _native.pyi

from raymoe._version import __version__

if _raymoe_native.__version__ != __version__:
    raise ImportError(
        f"the compiled kernels are of raymoe {_raymoe_native.__version__}, the Python code of "
        f"{__version__}; install again with: pip install ."
    )
