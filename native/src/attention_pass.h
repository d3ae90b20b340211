// The ragged shape of an attention pass: which tokens belong to which sequence, and their blocks.
#pragma once

#include <cstdint>
#include <string>

#include "raymoe/tensor_view.h"

namespace raymoe {

/// Ragged shape of a pass; the arrays of AttentionBatch.
struct AttentionPass {
  const int32_t* query_start = nullptr;
  const int32_t* context_tokens = nullptr;
  const int32_t* block_table = nullptr;
  int64_t table_stride = 0;
  int64_t num_sequences = 0;
  int64_t num_kv_heads = 0;
  int64_t group = 0;
  int64_t window = 0;

  int64_t num_tokens(int64_t sequence) const {
    return query_start[sequence + 1] - query_start[sequence];
  }
  /// Position of the first token of the pass in its sequence.
  int64_t first_position(int64_t sequence) const {
    return context_tokens[sequence] - num_tokens(sequence);
  }
  /// First position that a token sees.
  int64_t first_visible(int64_t position) const {
    return position < window ? 0 : position - window + 1;
  }
};

/// The pass of these arrays, whose types and sizes are checked; heads and window are the caller's.
AttentionPass make_pass(const TensorView& query_start, const TensorView& context_tokens,
                        const TensorView& block_table);

/// Throws unless the sequences cover `num_tokens` tokens and their blocks are in the cache.
void check_pass(const AttentionPass& pass, int64_t num_tokens, int64_t table_width,
                int64_t num_blocks);

/// Throws std::invalid_argument with the name of the operation before the message.
[[noreturn]] void refuse_attention(const std::string& message);

/// The positive finite factor of the scores, for softmax in powers of two.
float checked_scale_log2e(double scale);

}  // namespace raymoe
