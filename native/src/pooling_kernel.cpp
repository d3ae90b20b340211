// Sums of open windows: values of tokens, weighted by the exponentials of their scores, by channel.
// Lanes are channels and tokens follow one another, so that an entry has the same bits on every
// instruction set and however its window was cut into steps.
#include "raymoe/compressed_attention.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

template <typename T>
void add_tokens(const PoolTile& tile, int64_t begin, int64_t end) {
  float* max_at = tile.sums + begin;
  float* weight_at = max_at + tile.width;
  float* sum_at = weight_at + tile.width;
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    const T* values = static_cast<const T*>(tile.values) + token * tile.stride + begin;
    const T* scores = static_cast<const T*>(tile.scores) + token * tile.stride + begin;
    const float* bias = tile.bias + token * tile.bias_stride + begin;
    for_lanes(end - begin, [&](int64_t i, auto part) {
      const F32 score = add(load(scores + i, part), load(bias + i, part));
      const F32 old_max = load(max_at + i, part);
      const F32 new_max = max(old_max, score);
      const F32 kept = exp_of(sub(old_max, new_max)), added = exp_of(sub(score, new_max));
      const F32 weight = add(mul(load(weight_at + i, part), kept), added);
      const F32 sum =
          add(mul(load(sum_at + i, part), kept), mul(added, load(values + i, part)));
      store(max_at + i, new_max, part);
      store(weight_at + i, weight, part);
      store(sum_at + i, sum, part);
    });
  }
}

}  // namespace

RAYMOE_DEFINE_KERNELS(PoolKernels, pool_kernels) = RAYMOE_FLOAT_KERNELS(add_tokens);

}  // namespace raymoe
