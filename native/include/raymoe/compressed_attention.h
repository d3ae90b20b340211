// Attention to the last tokens and to entries that pool earlier ones (DeepSeek-V4): the operations,
// and the interface of the kernels that pool.
//
// All heads share one row for each of the last R tokens, and one entry for every `ratio` tokens of
// which all are in the context; both are W elements, keys as well as values. Rows lie in the slots
// of sequences, entries in blocks (raymoe/kernels/paged_kv.py, CompressedLayout):
//
//     rows    [M, R, W]      that of position p is p % R; slot s has index M - 1 - s
//     entries [N, E, W]      in the block of the last token of their window
//     sums    [M, A, 3, W]   of open windows: maximum, sum of weights, weighted sum; float32
//
// The scores and sums of attention are those of latent attention, whose kernels serve both.
#pragma once

#include <cstdint>

#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// Consecutive tokens of one window, for one sum. Strides in elements, from token to token.
struct PoolTile {
  const void* values;
  const void* scores;
  const float* bias;
  float* sums;  // [3][width]
  int64_t stride, bias_stride, width, num_tokens;
};

/// Adds tokens, one after another, to channels [begin, end) of a sum; by the type of the values.
using PoolKernels = FloatKernels<PoolTile>;
RAYMOE_DECLARE_KERNELS(PoolKernels, pool_kernels);

/// Sequences of a step, their blocks and their slots; all int32.
struct CompressedStep {
  const TensorView& query_start;
  const TensorView& context_tokens;
  const TensorView& block_table;
  const TensorView& slots;
};

/// Cosines and sines of positions, [P, half of the rotated dimensions], float32.
struct RotationTables {
  const TensorView& cosine;
  const TensorView& sine;
};

struct PoolInputs {
  const TensorView& pooled;  // [T, 2 A W]
  const TensorView& bias;    // [ratio, A W], float32
  const TensorView& norm;    // [W], float32
  double eps;
};

/// See pool_entries in raymoe/kernels/cpu_compressed.py.
void pool_entries(const PoolInputs& inputs, const TensorView& sums, const TensorView& entries,
                  const CompressedStep& step, const RotationTables& tables, int64_t ratio);

struct CompressedInputs {
  const TensorView& query;     // [T, H, W]
  const TensorView& new_rows;  // [T, W], in the type of the cache
  const TensorView& sinks;     // [H], float32
  const TensorView* chosen;    // [T, K], int32, or null
  double scale;
};

/// See append_and_attend_rows in raymoe/kernels/cpu_compressed.py. `ratio` is 0 without entries.
void append_and_attend_compressed(const CompressedInputs& inputs, const TensorView& rows,
                                  const TensorView& entries, const CompressedStep& step,
                                  const RotationTables& tables, int64_t ratio,
                                  const TensorView& out);

}  // namespace raymoe
