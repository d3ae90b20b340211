// RMS norm of rows, with an optional residual addition before it.
#pragma once

#include <cstdint>

#include "raymoe/float_kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// Rows of `size` elements; strides in elements. out may not overlap the others.
/// Sums are float32, in an order that depends only on `size` and the instruction set.
struct RmsNorm {
  void* hidden;       // [T, size]; hidden += delta first, rounded to the storage type, if delta
  const void* delta;  // [T, size] or null
  const void* weight; // [size] or null
  void* out;          // [T, size], contiguous
  int64_t hidden_stride, delta_stride, size;
  float eps;
};

extern const FloatKernels<RmsNorm> kRmsNormScalar, kRmsNormAvx2, kRmsNormAvx512;

/// Checks, splits the rows over the worker pool. `delta` and `weight` may be null.
void rms_norm(const TensorView& hidden, const TensorView* delta, const TensorView* weight,
              float eps, const TensorView& out);

}  // namespace raymoe
