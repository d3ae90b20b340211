// The rotation of keys that are stored as int8, and of queries for them.
#pragma once

#include <cstdint>

namespace raymoe {
namespace {

/// Multiplies the runs of a row by a Hadamard matrix; a run has the largest power of two that
/// divides `dim`. A few large elements, as keys have them, become many of middling size, which
/// share a factor without loss. Done to both, it multiplies products by the length of a run.
/// Source: QuaRot (arXiv 2404.00456), section 4, of keys.
inline void rotate_row(float* row, int64_t dim) {
  const int64_t size = dim & -dim;
  for (int64_t step = 1; step < size; step *= 2)
    for (int64_t i = 0; i < dim; i += 2 * step)
      for (int64_t j = i; j < i + step; ++j) {
        const float a = row[j], b = row[j + step];
        row[j] = a + b;
        row[j + step] = a - b;
      }
}

/// Rotates a query, so that its products with rotated keys are those of both before.
inline void rotate_query(float* row, int64_t dim) {
  rotate_row(row, dim);
  const float inverse = 1.0f / static_cast<float>(dim & -dim);
  for (int64_t d = 0; d < dim; ++d) row[d] *= inverse;
}

}  // namespace
}  // namespace raymoe
