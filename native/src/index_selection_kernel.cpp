// Products of index queries with the keys of a tile. Lanes are positions, so that every
// instruction set sums the elements of a key in the same order.
#include "raymoe/index_selection.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

constexpr int64_t kVectors = kBlockTokens / kLanes;

/// Keys of a tile by element: [dim, kBlockTokens]. Runs that are not there leave what was there.
template <typename T>
void transpose(const IndexTile& tile) {
  for (int64_t run = 0; run < tile.num_runs; ++run) {
    const T* keys = static_cast<const T*>(tile.runs[run]);
    float* out = tile.scratch + run * tile.run_keys;
    for (int64_t key = 0; key < tile.run_keys; ++key)
      for (int64_t i = 0; i < tile.dim; ++i)
        out[i * kBlockTokens + key] = to_float(keys[key * tile.dim + i]);
  }
}

/// Products of `heads` neighbouring heads, which share the keys that are loaded.
template <int heads>
void multiply(const IndexTile& tile, int64_t head) {
  const float* query = tile.query + head * tile.dim;
  F32 sums[heads][kVectors];
  for (auto& of_head : sums)
    for (F32& sum : of_head) sum = splat(0.0f);
  for (int64_t i = 0; i < tile.dim; ++i) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const F32 key = load(tile.scratch + i * kBlockTokens + v * kLanes, Whole{});
      for (int h = 0; h < heads; ++h)
        sums[h][v] = add(sums[h][v], mul(splat(query[h * tile.dim + i]), key));
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int64_t v = 0; v < kVectors; ++v)
      store(tile.out + (head + h) * kBlockTokens + v * kLanes, sums[h][v], Whole{});
}

template <typename T>
void products(const IndexTile& tile) {
  transpose<T>(tile);
  int64_t head = 0;
  for (; head + 2 <= tile.num_heads; head += 2) multiply<2>(tile, head);
  if (head < tile.num_heads) multiply<1>(tile, head);
}

}  // namespace

RAYMOE_DEFINE_KERNELS(IndexKernels, index_kernels) = {products<float>, products<fp16>,
                                                      products<bf16>};

}  // namespace raymoe
