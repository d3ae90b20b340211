// linear.h and experts.h on tensors: what module.cpp binds. Errors are std::invalid_argument and
// name the argument and the dimension.
#pragma once

#include <cstdint>

#include "raymoe/experts.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// weight [O, I] bfloat16, any strides -> packed [packed_bytes(O, I)] uint8, 64-byte aligned.
void pack_linear_op(const TensorView& weight, const TensorView& packed);

/// gate and up [F, H] -> packed [packed_gate_up_bytes(F, H)].
void pack_gate_up_op(const TensorView& gate, const TensorView& up, const TensorView& packed);

int64_t packed_gate_up_bytes(int64_t expert_size, int64_t hidden_size);

/// x [T, I] -> out [T, O]; bias [O] or null.
void packed_linear_op(const TensorView& x, const TensorView& packed, const TensorView* bias,
                      const TensorView& out);

/// Float32 [E, panels * 32] as experts.h orders them, or null.
struct ExpertBiases {
  const TensorView* gate_up;
  const TensorView* down;
};

/// hidden [T, H], topk_ids [T, K] int32, topk_weights [T, K] float32 -> out [T, H]; gate_up and
/// down hold the packed weights of the experts one after the other.
void fused_experts_op(const TensorView& hidden, const TensorView& topk_ids,
                      const TensorView& topk_weights, const TensorView& gate_up,
                      const TensorView& down, const ExpertBiases& biases, int64_t expert_size,
                      const Gating& gating, const TensorView& out);

/// The same with one expert for all tokens.
void gated_ffn_op(const TensorView& hidden, const TensorView& gate_up, const TensorView& down,
                  int64_t expert_size, const TensorView& out);

}  // namespace raymoe
