"""The packing kernel of humming-kernels, built for the CPU: what our packing is compared with."""

import ctypes
import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# What the kernel uses of CUDA and of the package's own headers. The lanes of a block run one after
# another, twice: the first time they fill shared memory, which all of them read the second time.
_BEFORE = """
#include <cstdint>
#include <cassert>
#define CUDA_INLINE inline
#define PRAGMA_UNROLL
#define __global__
#define __shared__ static
#define __syncthreads()
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
struct Index { uint32_t x, y, z; };
static Index threadIdx, blockIdx, blockDim{32, 1, 1}, gridDim;
constexpr uint32_t static_next_power_of_2(uint32_t n) {
  uint32_t power = 1;
  while (power < n) power *= 2;
  return power;
}
"""
_AFTER = """
extern "C" void repack(const uint32_t *in, uint32_t *out, uint32_t outputs, uint32_t inputs) {
  gridDim = {outputs / 64, CEIL_DIV(inputs, 64), 1};
  blockIdx.z = 0;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
      for (int time = 0; time < 2; time++)
        for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++)
          weight_repack_nk<BITS, 16, true, false, false, false, 0>(
              in, out, nullptr, outputs, inputs, outputs, inputs, 3);
}
"""


class Repack:
    """Their packing for inputs of 16 bits, of codes of one size."""

    def __init__(self, bits: int, folder: Path) -> None:
        found = importlib.util.find_spec("humming")
        assert found is not None
        assert found.origin is not None
        header = Path(found.origin).parent / "include/humming/kernel/process.cuh"
        kernel = header.read_text().replace("#include <humming/utils/all.cuh>", "")
        source, library = folder / f"repack{bits}.cpp", folder / f"repack{bits}.so"
        source.write_text(_BEFORE + kernel + _AFTER)
        command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-DBITS={bits}"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        self._call, self._bits = ctypes.CDLL(str(library)).repack, bits

    def __call__(self, codes_OI: Tensor) -> Tensor:
        """Pack uint8 [O, I] to int32 [I / 16, O * bits / 2]."""
        outputs, inputs = codes_OI.shape
        codes = codes_OI.numpy()
        if self._bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        packed, out = np.ascontiguousarray(codes), np.zeros(codes.nbytes // 4, np.int32)
        pointers = (ctypes.c_void_p(each.ctypes.data) for each in (packed, out))
        self._call(*pointers, outputs, inputs)
        return torch.from_numpy(out).view(inputs // 16, outputs * self._bits // 2)
