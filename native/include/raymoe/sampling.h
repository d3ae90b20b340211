// Choosing tokens from rows of logits: first maximum, Gumbel-max sampling, log-sum-exp, top-k.
#pragma once

#include <cstdint>
#include <optional>

#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

struct Logits {
  const void* data;  // [R, size]
  int64_t stride, size;
};

/// First position of the largest logit; -1 for a row with a NaN or with nothing above -inf.
struct ArgMax {
  Logits logits;
  int64_t* ids;  // [R]
};

/// First position of the largest logit * scale + Gumbel noise; -1 as for ArgMax.
///
/// The noise of token t of a row is -log(-log1p(-v)), v = (w + 1/2) / 2^32, where w is word
/// t % 64 / 16 of Philox4x32-10 at counter (t / 64 * 16 + t % 16, position, sample, c) and key
/// (a, b); (a, b, c, .) is Philox4x32-10 at counter (seed, row key) and key (0, 0). So it depends
/// on seed, row key, sample, position and token only; all instruction sets compute the same bits.
struct GumbelArgMax {
  Logits logits;
  const float* scale;  // [R] or null for 1
  const int64_t *seed, *row_key;
  const int32_t *sample, *position;
  int64_t* ids;
};

/// log(sum(exp(logits))) in float32.
struct LogSumExp {
  Logits logits;
  float* out;  // [R]
};

/// The k largest logits in descending order, equal ones by position.
struct TopK {
  Logits logits;
  int64_t k;       // at most size
  int64_t* ids;    // [R, k]
  float* values;   // [R, k]
};

struct SamplingKernels {
  FloatKernels<ArgMax> argmax;
  FloatKernels<GumbelArgMax> gumbel_argmax;
  FloatKernels<LogSumExp> log_sum_exp;
  FloatKernels<TopK> top_k;
};

RAYMOE_DECLARE_KERNELS(SamplingKernels, sampling_kernels);

/// Check shapes, then split the rows over the worker pool.
void argmax(const TensorView& logits, const TensorView& ids);
void log_sum_exp(const TensorView& logits, const TensorView& out);
void top_k(const TensorView& logits, const TensorView& ids, const TensorView& values);

struct GumbelViews {
  TensorView logits;
  std::optional<TensorView> scale;
  TensorView seed, row_key, sample, position, ids;
};
void gumbel_argmax(const GumbelViews& views);

}  // namespace raymoe
