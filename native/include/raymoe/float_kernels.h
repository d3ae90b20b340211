// A kernel in its versions for the three storage types, and the choice by instruction set.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "raymoe/isa.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// The same kernel over rows [begin, end) for float32, float16 and bfloat16 tensors.
template <typename Args>
struct FloatKernels {
  using Kernel = void (*)(const Args&, int64_t begin, int64_t end);
  Kernel f32, f16, bf16;

  Kernel of(DType dtype, const char* what) const {
    if (dtype == DType::kFloat32) return f32;
    if (dtype == DType::kFloat16) return f16;
    if (dtype == DType::kBFloat16) return bf16;
    throw std::invalid_argument(std::string(what) + " has dtype " + dtype_name(dtype) +
                                ", expected float32, float16 or bfloat16");
  }
};

/// The table of the active instruction set, for kernels that come in scalar, AVX2 and AVX512.
template <typename Table>
const Table& kernels_of(const Table& scalar, const Table& avx2, const Table& avx512) {
  const Isa isa = active_isa();
  return isa == Isa::kScalar ? scalar : isa == Isa::kAvx2 ? avx2 : avx512;
}

}  // namespace raymoe
