// The expert feed-forward of one layer in one launch: sort, gather, gate and up, down, combine.
#pragma once

#include <cstdint>

#include "raymoe/bf16.h"

namespace raymoe {

/// Packed weights of all experts of a layer, one expert after the other (linear.h).
struct ExpertWeights {
  const bf16* gate_up;
  const bf16* down;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t expert_size;
};

/// out = sum over k of topk_weights[k] * down(silu(gate(x)) * up(x)) of expert topk_ids[k].
///
/// The K products of a token are added in float32 in ascending order of expert and rounded once;
/// silu(gate) * up is rounded to bfloat16 between the two products. The bits of a token depend on
/// nothing but its own row, ids and weights. No overlap of out with hidden.
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
};

/// Throws std::invalid_argument for an expert index out of range.
void fused_experts(const ExpertsProblem& problem);

}  // namespace raymoe
