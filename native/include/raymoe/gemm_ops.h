// linear.h and experts.h on tensors: what module.cpp binds. Errors are std::invalid_argument and
// name the argument and the dimension.
#pragma once

#include <cstdint>

#include "raymoe/codes.h"
#include "raymoe/experts.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// weight [O, I] bfloat16, any strides -> packed [packed_bytes(O, I)] uint8, 64-byte aligned.
void pack_linear_op(const TensorView& weight, const TensorView& packed);

/// gate and up [F, H] -> packed [packed_gate_up_bytes(F, H)].
void pack_gate_up_op(const TensorView& gate, const TensorView& up, const TensorView& packed);

int64_t packed_gate_up_bytes(int64_t expert_size, int64_t hidden_size);

/// x [T, I] -> out [T, O], bfloat16 or float32; bias [O] or null; packed bfloat16, or codes where a
/// format is given.
void packed_linear_op(const TensorView& x, const TensorView& packed, const CodeFormat* format,
                      const TensorView* bias, const TensorView& out);

/// Packed weights of experts, one after the other: bfloat16, or codes where a format is given.
/// Biases are float32 [E, panels * 32] as experts.h orders them, or null.
struct PackedExperts {
  TensorView gate_up;
  TensorView down;
  int64_t expert_size;
  const CodeFormat* gate_up_format;
  const CodeFormat* down_format;
  const TensorView* gate_up_bias = nullptr;
  const TensorView* down_bias = nullptr;
  Gating gating = {};
};

/// hidden [T, H], topk_ids [T, K] int32, topk_weights [T, K] float32 -> out [T, H].
void fused_experts_op(const TensorView& hidden, const TensorView& topk_ids,
                      const TensorView& topk_weights, const PackedExperts& experts,
                      const TensorView& out);

/// The same with one expert for all tokens.
void gated_ffn_op(const TensorView& hidden, const PackedExperts& expert, const TensorView& out);

}  // namespace raymoe
