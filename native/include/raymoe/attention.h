// Attention over the paged KV cache: the operation, and the interface of its kernels.
//
// Layout of one layer's cache (raymoe/kernels/paged_kv.py), B = 32 tokens of a block, D dimensions
// of a key, V of a value, P = 2 for bf16, 4 for int8 and 1 otherwise:
//
//     cache [N, G, B * (D + V)]      keys [D / P][B][P], then values [V / C][B / P][C][P]
//
// so that one vector of keys belongs to consecutive tokens (a score needs no horizontal sum) and
// one vector of values to consecutive dimensions. Values lie in tiles of C = 64 dimensions, the
// last one narrower if need be: what a register block reads is one run of memory.
//
// Keys and values of int8 are numbers from -127 to 127, each token's of a head with a float32
// factor; keys are rotated before (src/rotation.h). Behind its values a block has the factors of
// its keys, then those of its values, [B] each: B * (D + V + 8) bytes.
#pragma once

#include <cstdint>

#include "raymoe/bf16.h"
#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

constexpr int64_t kBlockTokens = 32;

/// Heads, and rows of latents, are whole vectors of AVX2.
constexpr int64_t kHeadDimMultiple = 8;

/// Dimensions of a tile of values: as many as the widest register block takes.
constexpr int64_t kValueColumns = 64;

/// Where the values of `token` of a block lie for the dimensions of the tile that begins at
/// `column`, one pair apart from each other; in elements from the values of the block.
constexpr int64_t value_offset(int64_t token, int64_t column, int64_t value_dim, int64_t pair) {
  const int64_t rest = value_dim - column;
  const int64_t width = rest < kValueColumns ? rest : kValueColumns;
  return column * kBlockTokens + token / pair * width * pair + token % pair;
}

// Softmax is online in chunks, and starts afresh in splits, of fixed positions of the sequence.
// The sum of a token thus has the same order whatever else is in the step, however its query was
// batched, and whoever computes its splits: same bits.
constexpr int64_t kChunkBlocks = 4;
constexpr int64_t kChunkTokens = kChunkBlocks * kBlockTokens;
constexpr int64_t kSplitTokens = 1024;
constexpr int64_t kSplitBlocks = kSplitTokens / kBlockTokens;

/// Blocks [first, end) of a context, all of one split. The sums of a split can be had in several
/// ranges, one after the other.
struct BlockRange {
  int64_t first = 0;
  int64_t end = 0;
  bool begins = true;  // sums start here; otherwise they go on
  bool ends = true;    // nothing of the split is left
};

/// The part of the blocks [begin, end) that lies in a split; the rest of the split comes apart.
inline BlockRange range_in_split(int64_t split, int64_t begin, int64_t end) {
  const int64_t first = split * kSplitBlocks, next = first + kSplitBlocks;
  return {begin > first ? begin : first, end < next ? end : next, begin <= first, end >= next};
}

/// Elements that lie together because one dot-product step multiplies them together.
template <typename T>
constexpr int64_t kPair = 1;
template <>
inline constexpr int64_t kPair<bf16> = 2;
template <>
inline constexpr int64_t kPair<int8_t> = 4;

/// Whether the cache has factors of its elements, by token.
template <typename T>
constexpr bool kIsScaled = false;
template <>
inline constexpr bool kIsScaled<int8_t> = true;

/// Bytes of the factors of a block.
constexpr int64_t kScaleBytes = 2 * kBlockTokens * int64_t{sizeof(float)};

/// What all tiles of a call share. Strides in elements.
struct AttentionShape {
  int64_t head_dim = 0;   // of queries and keys
  int64_t value_dim = 0;  // of values and outputs
  int64_t group = 0;   // query heads of a KV head
  int64_t window = 0;  // tokens that a query sees, itself included
  float scale_log2e = 0;
  int64_t query_stride = 0;  // between tokens
  int64_t out_stride = 0;
  int64_t block_stride = 0;  // of the cache
  int64_t head_stride = 0;   // of the cache

  /// Where the values of a block begin, in elements from its keys.
  int64_t values_begin() const { return kBlockTokens * head_dim; }
  /// Where the factors of a block of int8 begin, in bytes from its keys.
  int64_t scales_begin() const { return kBlockTokens * (head_dim + value_dim); }
};

/// Query tokens for the query heads of one KV head: consecutive ones of one sequence, or tokens of
/// several sequences that all see the whole of the same blocks. Row r is token r / group, head
/// r % group.
struct AttentionTile {
  const AttentionShape* shape = nullptr;
  const void* query = nullptr;           // first token, first head of the group
  const int32_t* tokens = nullptr;       // of several sequences: tokens, counted from `query`
  void* out = nullptr;                   // same place of the output
  const void* cache = nullptr;           // block 0 of this KV head
  const int32_t* block_table = nullptr;  // of this sequence
  int64_t first_position = 0;            // of the first token
  int64_t num_tokens = 0;
  // What this thread will read after this split, to be prefetched: the keys of a chunk, and before
  // them keys that it will overwrite. Any address will do; next_append may be null.
  const void* next_keys[kChunkBlocks] = {};
  const void* next_append = nullptr;

  int64_t num_rows() const { return num_tokens * shape->group; }
  int64_t last_position() const { return first_position + num_tokens - 1; }
  /// First position that any token of the tile sees.
  int64_t first_visible() const {
    return first_position < shape->window ? 0 : first_position - shape->window + 1;
  }
};

constexpr int64_t padded_head_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

/// The widest vector, in floats: a row's sum has so many parts until its split ends.
constexpr int64_t kSumParts = 16;

/// Softmax sums of the rows of a tile. `out` is not yet divided by `sum`; its rows are padded to
/// `padded_head_dim` floats.
struct AttentionState {
  float* max = nullptr;    // of scale_log2e * score, [rows]
  float* sum = nullptr;    // [rows], when a split has ended
  float* parts = nullptr;  // [rows][kSumParts], until then
  float* out = nullptr;    // [rows][padded_head_dim]

  AttentionState rows_from(int64_t row, int64_t head_dim) const {
    return {max + row, sum + row, parts + row * kSumParts, out + row * padded_head_dim(head_dim)};
  }
};

/// Maximum of the rows of a tile: as many as keep its state and scores near the core.
constexpr int64_t kAttentionRows = 64;

/// Floats of scratch that `attend` needs: queries of `rows` rows, and room for one more to rotate.
constexpr int64_t attention_scratch_floats(int64_t rows, int64_t head_dim) {
  return (rows + 1) * padded_head_dim(head_dim);
}

/// Kernels of one instruction set and one pair of query and cache types.
struct AttentionKernel {
  /// Adds the sums of the tile over a range of one split to `state`.
  void (*attend)(const AttentionTile& tile, const BlockRange& range, const AttentionState& state,
                 float* scratch) = nullptr;
  /// Writes state.out / state.sum to tile.out, rounded to nearest even.
  void (*store)(const AttentionTile& tile, const AttentionState& state) = nullptr;
};

/// The kernel of an instruction set for these types.
using AttentionKernelOf = AttentionKernel (*)(DType query, DType cache);
RAYMOE_DECLARE_KERNELS(AttentionKernelOf, attention_kernel);

/// Adds the sums of `part`, a later split of the same rows, to `total`.
void merge_attention(const AttentionState& total, const AttentionState& part, int64_t rows,
                     int64_t head_dim);

/// See append_and_attend in raymoe/kernels/cpu_attention.py; sinks is float32 [heads] or null.
void append_and_attend(const TensorView& query, const TensorView& key, const TensorView& value,
                       const TensorView& cache, const TensorView& query_start,
                       const TensorView& context_tokens, const TensorView& block_table,
                       const TensorView& out, double scale, int64_t sliding_window,
                       const TensorView* sinks);

/// See append in raymoe/kernels/cpu_attention.py.
void append(const TensorView& key, const TensorView& value, const TensorView& cache,
            const TensorView& query_start, const TensorView& context_tokens,
            const TensorView& block_table);

}  // namespace raymoe
