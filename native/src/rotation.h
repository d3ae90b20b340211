// Rotations before numbers are rounded to int8: of keys, with queries, and of inputs, with weights.
#pragma once

#include <cstdint>

namespace raymoe {
namespace {

constexpr int64_t kMaxInputRun = 128;

/// Inputs that are rotated together: the largest power of two that divides them, up to a limit.
inline int64_t input_run(int64_t inputs) {
  const int64_t power = inputs & -inputs;
  return power < kMaxInputRun ? power : kMaxInputRun;
}

/// Multiplies the runs of a row by a Hadamard matrix, from blocks of `begin` elements on, which are
/// multiplied already. `run` is a power of two. A few large elements, as keys and inputs have them,
/// become many of middling size, which share a factor without loss. Done to both, it multiplies
/// products by the length of a run. Source: QuaRot (arXiv 2404.00456), section 4.
inline void rotate_runs(float* row, int64_t dim, int64_t run, int64_t begin = 1) {
  for (int64_t step = begin; step < run; step *= 2)
    for (int64_t i = 0; i < dim; i += 2 * step)
      for (int64_t j = i; j < i + step; ++j) {
        const float a = row[j], b = row[j + step];
        row[j] = a + b;
        row[j + step] = a - b;
      }
}

/// Rotates a key by runs of the largest power of two that divides it.
inline void rotate_row(float* row, int64_t dim) { rotate_runs(row, dim, dim & -dim); }

/// Rotates a query, so that its products with rotated keys are those of both before.
inline void rotate_query(float* row, int64_t dim) {
  rotate_row(row, dim);
  const float inverse = 1.0f / static_cast<float>(dim & -dim);
  for (int64_t d = 0; d < dim; ++d) row[d] *= inverse;
}

}  // namespace
}  // namespace raymoe
