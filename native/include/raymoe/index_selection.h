// Selection of the positions that a token attends to, by the products of its index queries with the
// index keys of its context (DeepSeek-V3.2's lightning indexer, MiniMax-M3's blocks).
//
// Index keys of one layer lie in blocks of B = 32 tokens, of I elements each. A key may stand for
// an entry of several tokens: E = B / tokens keys lie in a block then, or one in every so many
// blocks, that of the entry's last token.
//
//     keys [N, E, I]
//
// Products are float32, summed over I in order, whatever the instruction set: a token's choice
// depends only on its own queries and context.
#pragma once

#include <cstdint>

#include "raymoe/attention.h"
#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// Up to kBlockTokens index keys, in runs from one block each, and the index queries of one token.
struct IndexTile {
  const float* query = nullptr;             // [num_heads, dim]
  const void* runs[kBlockTokens] = {};      // [run_keys, dim] each, in the type of the cache
  int64_t num_runs = 0;
  int64_t run_keys = 0;
  int64_t num_heads = 0;
  int64_t dim = 0;
  float* scratch = nullptr;  // [dim, kBlockTokens]
  float* out = nullptr;      // [num_heads, kBlockTokens]
};

/// Kernels of one instruction set: products of a tile, by the type of the cache.
struct IndexKernels {
  using Kernel = void (*)(const IndexTile& tile);
  Kernel f32 = nullptr, f16 = nullptr, bf16 = nullptr;
};
RAYMOE_DECLARE_KERNELS(IndexKernels, index_kernels);

/// See choose_positions in raymoe/kernels/selection.py.
void choose_positions(const TensorView& query, const TensorView& weights, const TensorView& keys,
                      const TensorView& query_start, const TensorView& context_tokens,
                      const TensorView& block_table, int64_t entry_tokens, const TensorView& out);

/// See choose_blocks in raymoe/kernels/selection.py.
void choose_blocks(const TensorView& query, const TensorView& keys, const TensorView& query_start,
                   const TensorView& context_tokens, const TensorView& block_table,
                   int64_t block_tokens, int64_t num_local, const TensorView& out);

}  // namespace raymoe
