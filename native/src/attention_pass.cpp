// Checks of the ragged shape of an attention pass.
#include "attention_pass.h"

#include <cmath>
#include <stdexcept>

#include "raymoe/attention.h"

namespace raymoe {
namespace {

void check_blocks(const AttentionPass& pass, int64_t sequence, int64_t table_width,
                  int64_t num_blocks) {
  const int64_t first = pass.first_visible(pass.first_position(sequence)) / kBlockTokens;
  const int64_t end = (pass.context_tokens[sequence] + kBlockTokens - 1) / kBlockTokens;
  if (end > table_width)
    refuse_attention("sequence " + std::to_string(sequence) + " has " +
           std::to_string(pass.context_tokens[sequence]) +
           " context_tokens, block_table room for " + std::to_string(table_width * kBlockTokens));
  const int32_t* table = pass.block_table + sequence * pass.table_stride;
  for (int64_t i = first; i < end; ++i)
    if (table[i] < 0 || table[i] >= num_blocks)
      refuse_attention("block_table[" + std::to_string(sequence) + ", " + std::to_string(i) + "] is " +
             std::to_string(table[i]) + ", the cache has " + std::to_string(num_blocks) +
             " blocks");
}

}  // namespace

void check_pass(const AttentionPass& pass, int64_t num_tokens, int64_t table_width,
                int64_t num_blocks) {
  if (pass.query_start[0] != 0 || pass.query_start[pass.num_sequences] != num_tokens)
    refuse_attention("query_start runs from " + std::to_string(pass.query_start[0]) + " to " +
           std::to_string(pass.query_start[pass.num_sequences]) + ", expected 0 to " +
           std::to_string(num_tokens));
  for (int64_t sequence = 0; sequence < pass.num_sequences; ++sequence) {
    const int64_t count = pass.num_tokens(sequence);
    if (count < 0) refuse_attention("query_start falls after entry " + std::to_string(sequence));
    if (count > pass.context_tokens[sequence])
      refuse_attention("sequence " + std::to_string(sequence) + " has " + std::to_string(count) +
             " tokens in the pass but " + std::to_string(pass.context_tokens[sequence]) +
             " context_tokens");
    if (count > 0) check_blocks(pass, sequence, table_width, num_blocks);
  }
}

AttentionPass make_pass(const TensorView& query_start, const TensorView& context_tokens,
                        const TensorView& block_table) {
  context_tokens.expect("attention: context_tokens", DType::kInt32, 1);
  query_start.expect("attention: query_start", DType::kInt32, 1);
  block_table.expect("attention: block_table", DType::kInt32, 2);
  const int64_t count = context_tokens.size(0);
  query_start.expect_size("attention: query_start", 0, count + 1);
  block_table.expect_size("attention: block_table", 0, count);
  AttentionPass pass;
  pass.query_start = query_start.data<int32_t>();
  pass.context_tokens = context_tokens.data<int32_t>();
  pass.block_table = block_table.data<int32_t>();
  pass.table_stride = block_table.stride(0);
  pass.num_sequences = count;
  return pass;
}

void refuse_attention(const std::string& message) {
  throw std::invalid_argument("attention: " + message);
}

float checked_scale_log2e(double scale) {
  constexpr double kLog2E = 1.4426950408889634;
  if (!(scale > 0) || !std::isfinite(scale))
    refuse_attention("scale is " + std::to_string(scale) + ", expected a positive number");
  return static_cast<float>(scale * kLog2E);
}

}  // namespace raymoe
