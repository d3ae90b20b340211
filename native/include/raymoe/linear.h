// Dense bfloat16 projections on packed weights.
#pragma once

#include <cstdint>

#include "raymoe/bf16.h"
#include "raymoe/codes.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// A matrix that is read once, by packing: any strides, in elements.
struct WeightSource {
  const bf16* data;
  int64_t outputs;
  int64_t inputs;
  int64_t output_stride;
  int64_t input_stride;
};

/// Bytes of the packed form of a weight [outputs, inputs]; the layout is described in gemm.h.
int64_t packed_bytes(int64_t outputs, int64_t inputs);

/// Packs a weight on all threads; `packed` is 64-byte aligned and does not overlap the source.
void pack_weight(const WeightSource& weight, bf16* packed);

/// Packs gate and up [F, H] into panels of 16 gate and 16 up columns of the same index:
/// packed_bytes(2 * 16 * ceil(F / 16), H) bytes.
void pack_gate_up(const WeightSource& gate, const WeightSource& up, bf16* packed);

/// out = x * weight^T + bias. Rows of x and out may be any distance apart; no overlap of out with
/// anything else. Float32 sums in a fixed order, at most one rounding: the bits of a row do not
/// depend on the other rows or on the number of threads. Rows that meet weights of int8 are
/// quantised first, each by its largest input, and the sums are exact integers. Several groups, each
/// with inputs, outputs and a bfloat16 weight of its own, have no bias; their packed weights follow
/// one another.
struct LinearProblem {
  const bf16* x;
  int64_t x_stride;  // elements
  int64_t num_rows;
  const uint8_t* packed;
  const CodeFormat* format;  // of `packed`; null: bfloat16
  int64_t outputs;
  int64_t inputs;
  const bf16* bias;  // null: none
  bf16* out;
  int64_t out_stride;
  float* wide_out = nullptr;  // in place of `out`, for sums that are not rounded
  int64_t num_groups = 1;
  int64_t x_group_stride = 0;  // elements
  int64_t out_group_stride = 0;
};

void packed_linear(const LinearProblem& problem);

/// weight [O, I] bfloat16, any strides -> packed [packed_bytes(O, I)] uint8, 64-byte aligned.
void pack_linear_op(const TensorView& weight, const TensorView& packed);

/// gate and up [F, H] -> packed [packed_gate_up_bytes(F, H)].
void pack_gate_up_op(const TensorView& gate, const TensorView& up, const TensorView& packed);

int64_t packed_gate_up_bytes(int64_t expert_size, int64_t hidden_size);

/// x [T, I] -> out [T, O], bfloat16 or float32; bias [O] or null; packed bfloat16, or codes where a
/// format is given.
void packed_linear_op(const TensorView& x, const TensorView& packed, const CodeFormat* format,
                      const TensorView* bias, const TensorView& out);

/// x [T, I] bfloat16 -> codes [T, I] int8 and scales [T] float32, as rows of int8 products are.
/// `run` inputs are rotated together before (rotation.h).
void quantise_rows_op(const TensorView& x, int64_t run, const TensorView& codes,
                      const TensorView& scales);

/// x [T, G, I] -> out [T, G, O], bfloat16; packed [G * packed_bytes(O, I)].
void packed_grouped_linear_op(const TensorView& x, const TensorView& packed,
                              const TensorView& out);

}  // namespace raymoe
