"""Shared parts of the GPU kernels: launches as data, rounding, and noise."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from raymoe.errors import CapacityError

EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    Fused multiply-add is off explicitly, because its default differs between versions of Triton:
    the bits of a result do not depend on the version or on the tile.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int]
    constants: Mapping[str, object]
    options: Mapping[str, int]

    def run(self) -> None:
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


TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.uint8,  # decoded by `gpu_codes`: Turing and Ampere do not convert it
}
MINUS_INFINITY = tl.constexpr(float("-inf"))

Constants = TypeVar("Constants")


@functools.lru_cache(maxsize=None, typed=True)
def kernel_constants(kind: type[Constants], /, **values: object) -> Constants:
    """Return the one object of a kind with these values as compile-time constants.

    Triton looks a kernel up by its constants at each launch. These compare by identity, because
    hashing and comparing their fields took most of the time of a launch.
    """
    return kind(**{name: tl.constexpr(value) for name, value in values.items()})


@triton.jit
def rounded(value: tl.tensor, TYPE: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Round a float32 value to `TYPE` and return it as type `DOT`."""
    if TYPE == DOT:
        result = value.to(DOT)
    else:
        # Round to nearest even by hand, because Triton's interpreter truncates bfloat16.
        bits = value.to(tl.uint32, bitcast=True)
        up = (bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000
        result = tl.where(value == value, up.to(tl.float32, bitcast=True), value)
    return result


@triton.jit
def round_to(values: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Round float32 values to `TYPE` and return them as float32."""
    if tl.bfloat16 == TYPE:
        values = rounded(values, TYPE, tl.float32)
    else:
        values = values.to(TYPE).to(tl.float32)
    return values


@triton.jit
def philox(
    c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, key0: tl.tensor, key1: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Compute `elementwise.philox4x32` on uint32 blocks of one shape."""
    factor0 = tl.full([1, 1], 0xD2511F53, tl.uint32) + c0 * 0
    factor1 = tl.full([1, 1], 0xCD9E8D57, tl.uint32) + c0 * 0
    step0, step1 = tl.full([1, 1], 0x9E3779B9, tl.uint32), tl.full([1, 1], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, factor0), c0 * factor0
        high1, low1 = tl.umulhi(c2, factor1), c2 * factor1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + step0, key1 + step1
    return c0, c1, c2, c3


@triton.jit
def _log(exponent: tl.tensor, f: tl.tensor) -> tl.tensor:
    """Compute log(2^exponent * (1 + f)) by the polynomial of Cephes' logf, as `_native` does."""
    square = f * f
    p = f * 7.0376836292e-2 + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    e = exponent.to(tl.float32)
    p = p * f * square + e * -2.12194440e-4 - square * 0.5
    return f + p + e * 0.693359375


@triton.jit
def _reduced(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return exponent and f with x = 2^exponent * (1 + f), f around 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # sqrt(1/2)
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def gumbel(word: tl.tensor) -> tl.tensor:
    """Return -log(-log1p(-v)), v = (word + 1/2) / 2^32, with every rounding of `_native`'s."""
    word = word.to(tl.int32, bitcast=True)
    tail = ((word ^ (word >> 31)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent, f = _reduced(tl.where(word < 0, tail, 1.0 - tail))
    f = tl.where((word < 0) | (exponent < 0), f, 0.0 - tail)
    exponent, f = _reduced(0.0 - _log(exponent, f))
    return 0.0 - _log(exponent, f)
