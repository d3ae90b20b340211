// Hidden states of several streams, [T, S * H]: what a block reads of them, what it adds to them.
#pragma once

#include <cstdint>

#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

constexpr int64_t kMaxStreams = 8;

/// logits = logits / rms(hidden) * scale + base, in place.
struct StreamLogits {
  const void* hidden;  // [T, size]
  float* logits;       // [T, num_factors]
  const float *scale, *base;  // [num_factors]
  int64_t hidden_stride, logits_stride, size, num_factors;
  float eps;
};

/// out = sum over s of (sigmoid(logits[s]) + eps) * stream s, in this order, rounded once.
struct StreamRead {
  const void* hidden;   // [T, count * size]
  const float* logits;  // [T, count]
  void* out;            // [T, size]
  int64_t hidden_stride, logits_stride, out_stride, count, size;
  float eps;
};

/// out = mean over s of sigmoid(gates) * normed, rounded once.
struct GatedStreamRead {
  const void *normed, *gates;  // [T, count * size]
  void* out;                   // [T, size]
  int64_t normed_stride, gates_stride, out_stride, count, size;
};

/// From logits to matrices [T, count, count] whose columns and rows are divided by their sums in
/// turns: a softmax of each row first, columns `iterations` times, rows once less.
struct MixingMatrices {
  const float* logits;  // [T, count * count]
  float* out;           // [T, count, count], contiguous
  int64_t logits_stride, count, iterations;
  float eps;
};

/// With matrices: stream k = round(round(post[k] * delta) + round(sum over j of matrix[j][k] *
/// stream j)), where matrix and post = magnitude * sigmoid(logits) are rounded too. Without:
/// stream k = round((post[k] + eps) * delta + stream k).
struct StreamAdd {
  void* hidden;           // [T, count * size], in place
  const void* delta;      // [T, size]
  const float* logits;    // [T, count]
  const float* matrices;  // [T, count, count] or null
  int64_t hidden_stride, delta_stride, logits_stride, count, size;
  float magnitude, eps;
};

/// Check shapes, then split the tokens over the worker pool.
void stream_logits(const TensorView& hidden, const TensorView& logits, const TensorView& scale,
                   const TensorView& base, float eps);
void read_streams(const TensorView& hidden, const TensorView& logits, float eps,
                  const TensorView& out);
void read_gated_streams(const TensorView& normed, const TensorView& gates, const TensorView& out);
void mixing_matrices(const TensorView& logits, int64_t iterations, float eps,
                     const TensorView& out);
void add_to_streams(const TensorView& hidden, const TensorView& delta, const TensorView& logits,
                    const TensorView* matrices, float magnitude, float eps);

struct StreamKernels {
  FloatKernels<StreamLogits> logits;
  FloatKernels<StreamRead> read;
  FloatKernels<GatedStreamRead> read_gated;
  FloatKernels<StreamAdd> add;
  void (*mixing_matrices)(const MixingMatrices&, int64_t begin, int64_t end);
};
RAYMOE_DECLARE_KERNELS(StreamKernels, stream_kernels);

}  // namespace raymoe
