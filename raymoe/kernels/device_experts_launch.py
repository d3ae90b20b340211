"""One launch of a kernel in Triton, as data: it can be run, and compiled ahead.

Needs Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.runtime.errors import OutOfResources

from raymoe.errors import CapacityError

EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: Of `device_experts_kernels`.
        grid: Programs.
        arguments: Tensors and numbers in their order.
        constants: What it is compiled for.
        options: Warps and stages.

    Products and sums stay apart, whichever way a version of Triton has as its default: the bits of
    a result do not depend on the version, and tiles may be measured with any.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int]
    constants: Mapping[str, object]
    options: Mapping[str, int]

    def run(self) -> None:
        """Start it on the current stream.

        Raises:
            CapacityError: The tile is too large for the GPU.
        """
        try:
            self.kernel[self.grid](
                *self.arguments.values(), **self.constants, **self.options, **EXACT
            )
        except OutOfResources as error:
            tile = {name: self.constants.get(name) for name in ("OUTPUTS", "ROWS")}
            raise CapacityError(
                f"{self.kernel.__name__} with {tile | dict(self.options)} does not fit on this "
                f"GPU: {error}; measure its tiles anew, or remove the file they were read from"
            ) from error
