// The expert feed-forward of one layer in one launch: sort, gather, gate and up, down, combine.
#pragma once

#include <cstdint>

#include "raymoe/bf16.h"
#include "raymoe/codes.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// Packed weights of all experts of a layer, one expert after the other (linear.h, codes.h).
///
/// Biases are null or float32 in the order and with the zeros of the packed outputs: 16 of the gate
/// and 16 of up in turn, [E, panels * 32]; those of down [E, panels * 32].
struct ExpertWeights {
  const uint8_t* gate_up;
  const uint8_t* down;
  const CodeFormat* gate_up_format;  // null: bfloat16
  const CodeFormat* down_format;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t expert_size;
  const float* gate_up_bias = nullptr;
  const float* down_bias = nullptr;
};

/// How gate and up are multiplied: (clamp(up, -limit, limit) + offset) * g * sigmoid(gain * g * (1 +
/// cubic * g^2)) with g = min(gate, gate_limit). Without limits this is silu(gate) * up, or, with gain =
/// 2 sqrt(2 / pi) and cubic = 0.044715, the tanh form of gelu(gate) * up, because (1 + tanh(x)) / 2
/// is sigmoid(2 x).
struct Gating {
  float gain = 1.0f;
  float cubic = 0.0f;
  float limit = __builtin_inff();
  float offset = 0.0f;
  float gate_limit = __builtin_inff();
};

/// out = sum over k of topk_weights[k] * down(gating(gate(x), up(x))) of expert topk_ids[k].
///
/// The K products of a token are added in float32 in ascending order of expert and rounded once;
/// the gated product is rounded to bfloat16 between the two products, and then to int8 where the
/// weights of down are. The bits of a token depend on nothing but its own row, ids and weights. No
/// overlap of out with hidden.
struct ExpertsProblem {
  ExpertWeights weights;
  const bf16* hidden;
  int64_t hidden_stride;      // elements
  const int32_t* topk_ids;    // [T, K] contiguous; null: one expert, of weight 1, for all tokens
  const float* topk_weights;  // [T, K] contiguous
  int64_t num_tokens;
  int64_t top_k;
  bf16* out;
  int64_t out_stride;
  Gating gating = {};
};

/// Throws std::invalid_argument for an expert index out of range.
void fused_experts(const ExpertsProblem& problem);

/// Packed weights of experts, one after the other: bfloat16, or codes where a format is given.
/// Biases are float32 [E, panels * 32] in the order of ExpertWeights, or null.
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
