// Attention kernel without vectors: the documentation of the algorithm.
#include <algorithm>
#include <cmath>
#include <limits>

#include "raymoe/attention.h"

namespace raymoe {
namespace {

template <typename C>
float key_at(const C* keys, int64_t token, int64_t d) {
  constexpr int64_t pair = kPair<C>;
  return to_float(keys[(d / pair * kBlockTokens + token) * pair + d % pair]);
}

template <typename C>
float value_at(const C* values, int64_t dim, int64_t token, int64_t d) {
  constexpr int64_t pair = kPair<C>;
  const int64_t in_tile = d % kValueColumns;
  return to_float(values[value_offset(token, d - in_tile, dim, pair) + in_tile * pair]);
}

/// One row over positions [begin, end): scores, their maximum, exponentials, weighted sum.
template <typename Q, typename C>
void attend_row(const AttentionTile& tile, int64_t row, int64_t begin, int64_t end,
                const AttentionState& state) {
  const AttentionShape& shape = *tile.shape;
  const int64_t dim = shape.head_dim;
  const Q* query = static_cast<const Q*>(tile.query) + row / shape.group * shape.query_stride +
                   row % shape.group * dim;
  const auto keys_of = [&](int64_t position) {
    return static_cast<const C*>(tile.cache) +
           tile.block_table[position / kBlockTokens] * shape.block_stride;
  };
  float scores[kSplitTokens];
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t position = begin; position < end; ++position) {
    const C* keys = keys_of(position);
    float score = 0;
    for (int64_t d = 0; d < dim; ++d)
      score += to_float(query[d]) * key_at(keys, position % kBlockTokens, d);
    scores[position - begin] = score * shape.scale_log2e;
    max = std::max(max, scores[position - begin]);
  }
  float sum = 0;
  float* out = state.out + row * padded_head_dim(dim);
  std::fill(out, out + dim, 0.0f);
  for (int64_t position = begin; position < end; ++position) {
    const C* values = keys_of(position) + shape.head_stride / 2;
    const float weight = std::exp2(scores[position - begin] - max);
    sum += weight;
    for (int64_t d = 0; d < dim; ++d)
      out[d] += weight * value_at(values, dim, position % kBlockTokens, d);
  }
  state.max[row] = max;
  state.sum[row] = sum;
}

template <typename Q, typename C>
void attend(const AttentionTile& tile, int64_t split, const AttentionState& state, float*) {
  const int64_t group = tile.shape->group;
  const int64_t window = tile.shape->window;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const int64_t position = tile.first_position + row / group;
    const int64_t visible = position < window ? 0 : position - window + 1;
    const int64_t begin = std::max(visible, split * kSplitTokens);
    const int64_t end = std::min(position + 1, (split + 1) * kSplitTokens);
    attend_row<Q, C>(tile, row, begin, end, state);
  }
}

template <typename Q>
void store(const AttentionTile& tile, const AttentionState& state) {
  const AttentionShape& shape = *tile.shape;
  const int64_t dim = shape.head_dim;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const float* from = state.out + row * padded_head_dim(dim);
    Q* to =
        static_cast<Q*>(tile.out) + row / shape.group * shape.out_stride + row % shape.group * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] = from_float<Q>(from[d] / state.sum[row]);
  }
}

}  // namespace

AttentionKernel attention_kernel_scalar(DType query, DType cache) {
  if (query == DType::kBFloat16) return {attend<bf16, bf16>, store<bf16>};
  if (query == DType::kFloat16) return {attend<fp16, fp16>, store<fp16>};
  if (cache == DType::kBFloat16) return {attend<float, bf16>, store<float>};
  if (cache == DType::kFloat16) return {attend<float, fp16>, store<float>};
  return {attend<float, float>, store<float>};
}

}  // namespace raymoe
