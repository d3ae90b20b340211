// Latent attention in plain loops: what the vector kernels compute, one row after another.
#include <algorithm>
#include <cmath>
#include <limits>

#include "raymoe/latent_attention.h"

namespace raymoe {
namespace {

template <typename C>
const C* cached_row(const LatentTile& tile, int64_t position) {
  const LatentShape& shape = *tile.shape;
  const int64_t block = tile.block_table[position / kBlockTokens];
  return static_cast<const C*>(tile.cache) + block * shape.block_stride +
         position % kBlockTokens * shape.width;
}

/// Online softmax of one row over positions [begin, end), a step of kStepTokens at a time.
template <typename Q, typename C>
void attend_row(const LatentTile& tile, int64_t row, int64_t begin, int64_t end,
                const AttentionState& state) {
  const LatentShape& shape = *tile.shape;
  const Q* query = static_cast<const Q*>(tile.query) + row / tile.num_heads * shape.query_stride +
                   row % tile.num_heads * shape.width;
  float* out = state.out + row * padded_head_dim(shape.rank);
  float max = -std::numeric_limits<float>::infinity(), sum = 0;
  std::fill(out, out + shape.rank, 0.0f);
  for (int64_t first = begin; first < end; first += kStepTokens) {
    const int64_t count = std::min(kStepTokens, end - first);
    float weights[kStepTokens];
    float new_max = max;
    for (int64_t i = 0; i < count; ++i) {
      const C* cached = cached_row<C>(tile, first + i);
      float score = 0;
      for (int64_t d = 0; d < shape.width; ++d) score += to_float(query[d]) * to_float(cached[d]);
      weights[i] = score * shape.scale_log2e;
      new_max = std::max(new_max, weights[i]);
    }
    const float factor = std::exp2(max - new_max);
    max = new_max;
    sum *= factor;
    for (int64_t d = 0; d < shape.rank; ++d) out[d] *= factor;
    for (int64_t i = 0; i < count; ++i) {
      const C* cached = cached_row<C>(tile, first + i);
      const float weight = std::exp2(weights[i] - max);
      sum += weight;
      for (int64_t d = 0; d < shape.rank; ++d) out[d] += weight * to_float(cached[d]);
    }
  }
  state.max[row] = max;
  state.sum[row] = sum;
}

template <typename Q, typename C>
void attend(const LatentTile& tile, int64_t split, const AttentionState& state, float*) {
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const int64_t position = tile.first_position + row / tile.num_heads;
    attend_row<Q, C>(tile, row, split * kSplitTokens,
                     std::min(position + 1, (split + 1) * kSplitTokens), state);
  }
}

template <typename Q>
void store(const LatentTile& tile, const AttentionState& state) {
  const LatentShape& shape = *tile.shape;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const float* from = state.out + row * padded_head_dim(shape.rank);
    Q* to = static_cast<Q*>(tile.out) + row / tile.num_heads * shape.out_stride +
            row % tile.num_heads * shape.rank;
    for (int64_t d = 0; d < shape.rank; ++d) to[d] = from_float<Q>(from[d] / state.sum[row]);
  }
}

}  // namespace

LatentKernel latent_kernel_scalar(DType query, DType cache) {
  if (query == DType::kBFloat16) return {attend<bf16, bf16>, store<bf16>};
  if (query == DType::kFloat16) return {attend<fp16, fp16>, store<fp16>};
  if (cache == DType::kBFloat16) return {attend<float, bf16>, store<float>};
  if (cache == DType::kFloat16) return {attend<float, fp16>, store<float>};
  return {attend<float, float>, store<float>};
}

}  // namespace raymoe
