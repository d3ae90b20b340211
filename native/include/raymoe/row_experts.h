// Experts on weights as a checkpoint stores them: row-major float32, float16 or bfloat16.
#pragma once

#include <cstdint>

#include "raymoe/experts.h"
#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

constexpr int64_t kRowOutputs = 16;  // outputs that a kernel computes at once

/// sums[r - begin][o] = dot(x[r], w[o]) in float32, of at most kRowOutputs outputs. Each dot adds
/// its lanes in one order: its bits do not depend on the other rows and outputs.
struct RowDots {
  const void* x;  // [rows][x_stride], in the type of the kernels' inputs
  int64_t x_stride;
  const void* weights;  // [num_outputs][inputs] contiguous
  int64_t inputs;
  int64_t num_outputs;
  float* sums;       // [rows][kRowOutputs]
  const void* next;  // weights of the next call, to prefetch; null: none
};

/// out = gating(gate + gate_bias, up + up_bias), rounded to the type of the weights.
struct RowGate {
  const float* gate;  // [rows][kRowOutputs]
  const float* up;
  const float* gate_bias;  // null: none
  const float* up_bias;
  Gating gating;
  int64_t num_outputs;
  void* out;  // [rows][out_stride], in the type of the kernels' inputs
  int64_t out_stride;
};

/// Copies rows to the type of the kernels' inputs: out[r] = source[rows[r]].
struct RowGather {
  const void* source;
  int64_t source_stride;
  const int32_t* rows;
  int64_t size;
  void* out;
  int64_t out_stride;
};

struct RowKernels {
  FloatKernels<RowDots> dots;
  FloatKernels<RowGate> gate;
  FloatKernels<RowGather> gather;
  int64_t input_bytes_of_bf16;  // bytes of an input element for bfloat16 weights; else 4
};

RAYMOE_DECLARE_KERNELS(RowKernels, row_kernels);

/// sum [T, H] float32 += weighted outputs of the experts [first, last), in ascending order.
///
/// hidden [T, H] has the type of the weights; `matrices` [E, 3] int64 holds the addresses of gate
/// and up [F, H] and down [H, F] of each expert, which are read only of experts in the range.
/// Biases are float32 [E, F], [E, F] and [E, H], or null. The gated product is rounded to the type
/// of the weights between the two products. A gate at the address of the up projection is not
/// multiplied again.
struct RowExperts {
  const TensorView& matrices;
  int64_t expert_size;
  int64_t first, last;
  const TensorView* gate_bias;
  const TensorView* up_bias;
  const TensorView* down_bias;
  Gating gating = {};
};

void add_row_experts_op(const TensorView& hidden, const TensorView& topk_ids,
                        const TensorView& topk_weights, const RowExperts& experts,
                        const TensorView& sum);

}  // namespace raymoe
