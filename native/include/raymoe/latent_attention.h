// Latent attention over a paged cache, in absorbed form: the operation, and the interface of its
// kernels.
//
// All heads share one cached row for each token, the latent and after it the rotated key; queries
// have been carried into the latent space, results stay in it. Layout of one layer's cache
// (raymoe/kernels/paged_latent.py), B = 32 tokens of a block, W = rank + rotated dimensions:
//
//     cache [N, B, W]
//
// A token's scores are its W elements times the query of each head, its values the first `rank` of
// them: with many heads two matrix products over the same rows, bound by arithmetic.
#pragma once

#include <cstdint>

#include "raymoe/attention.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// What all tiles of a call share. Strides in elements.
struct LatentShape {
  int64_t width = 0;  // of a cached row and of a query
  int64_t rank = 0;   // of the values: the first elements of a row
  float scale_log2e = 0;
  int64_t query_stride = 0;  // between tokens; heads are `width` apart
  int64_t out_stride = 0;    // between tokens; heads are `rank` apart
  int64_t block_stride = 0;
};

/// Query tokens for some neighbouring heads: consecutive ones of one sequence, or tokens of several
/// sequences that all see the whole of the same blocks. Row r is token r / num_heads, head
/// r % num_heads.
struct LatentTile {
  const LatentShape* shape = nullptr;
  const void* query = nullptr;           // first token, first head
  const int32_t* tokens = nullptr;       // of several sequences: tokens, counted from `query`
  void* out = nullptr;                   // same place of the output
  const void* cache = nullptr;           // block 0
  const int32_t* block_table = nullptr;  // of this sequence
  int64_t first_position = 0;            // of the first token
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  const void* next_blocks[kChunkBlocks] = {};  // read by this thread after this split; any address

  int64_t num_rows() const { return num_tokens * num_heads; }
  int64_t last_position() const { return first_position + num_tokens - 1; }
  /// Where the query of a row begins, in elements.
  int64_t query_offset(int64_t row) const {
    const int64_t index = row / num_heads, token = tokens == nullptr ? index : tokens[index];
    return token * shape->query_stride + row % num_heads * shape->width;
  }
};

/// Maximum of the heads of a tile: as many as keep queries, a chunk of the cache and the sums in a
/// second-level cache of 1 MiB.
constexpr int64_t kLatentHeads = 64;

/// Floats between the widened rows of a chunk: of rows a power of two apart, few fit in a cache.
constexpr int64_t kRowPadding = 16;

/// Floats of scratch that `attend` needs for `rows` rows.
int64_t latent_scratch_floats(const LatentShape& shape, int64_t rows);

/// Kernels of one instruction set and one pair of query and cache types. Positions, chunks, splits
/// and the order of sums are those of AttentionKernel; state.out has rows of
/// `padded_head_dim(rank)`.
struct LatentKernel {
  /// Adds the sums of the tile over a range of one split to `state`; `state.sum` is always whole.
  void (*attend)(const LatentTile& tile, const BlockRange& range, const AttentionState& state,
                 float* scratch) = nullptr;
  /// Adds rows that lie anywhere, of `width` elements, to the sums in `state`, in this order and in
  /// chunks of kChunkTokens. The tile has one token; its cache and positions are not read.
  void (*attend_rows)(const LatentTile& tile, const void* const* rows, int64_t count,
                      const AttentionState& state, float* scratch) = nullptr;
  /// Writes state.out / state.sum to tile.out, rounded to nearest even.
  void (*store)(const LatentTile& tile, const AttentionState& state) = nullptr;
};

/// The kernel of an instruction set for these types.
using LatentKernelOf = LatentKernel (*)(DType query, DType cache);
RAYMOE_DECLARE_KERNELS(LatentKernelOf, latent_kernel);

/// See append_and_attend_latent in raymoe/kernels/cpu_attention.py; sinks is float32 [heads] or null.
void append_and_attend_latent(const TensorView& query, const TensorView& latent,
                              const TensorView& cache, const TensorView& query_start,
                              const TensorView& context_tokens, const TensorView& block_table,
                              const TensorView& out, double scale, const TensorView* sinks);

/// See append_latent in raymoe/kernels/cpu_latent_attention.py.
void append_latent(const TensorView& latent, const TensorView& cache,
                   const TensorView& query_start, const TensorView& context_tokens,
                   const TensorView& block_table);

}  // namespace raymoe
