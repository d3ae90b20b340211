// The attention kernel. Without vectors it is the documentation of the algorithm.
//
// With vectors, a tile is worked off in chunks of 4 blocks (128 positions) and, within a chunk, in
// groups of rows that fit the registers: scores = Q K^T, online softmax, out += P V. Both products
// are the same small matrix product, because a block of keys and a tile of values are both packed
// matrices. A row's arithmetic never depends on its group: positions that only other rows see score
// -inf, get weight 0 and add 0.
#include "raymoe/attention.h"
#include "rotation.h"

#if defined(__AVX2__)
#include "attention_prefetch.h"
#include "attention_vector.h"
#if defined(__AVX512VNNI__)
#include "attention_bytes.h"
#endif
#else
#include <algorithm>
#include <cmath>
#include <limits>
#endif

namespace raymoe {
namespace {

#if defined(__AVX2__)

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/// Products of float32 operands: cache elements are widened.
template <typename Cache>
struct WideDot {
  using C = Cache;
  using A = float;

  using Weight = float;
  static constexpr int kMaxRows = Vector::kMaxRows;

  static void store_weights(Weight* to, Vector::Reg x) { Vector::store(to, x); }

  /// acc += one row of pairs of the cache times the matching pair of each row of `a`.
  template <int kRows, int kCols>
  static inline __attribute__((always_inline)) void multiply_add(
      Vector::Reg (&acc)[kRows][kCols], const A* a, int64_t a_stride, const C* b, bool half) {
    constexpr int pair = static_cast<int>(kPair<C>);
#pragma GCC unroll 4
    for (int p = 0; p < pair; ++p) {
      Vector::Reg wide[kCols];
#pragma GCC unroll 4
      for (int j = 0; j < kCols; ++j)
        wide[j] = Vector::widen(b + j * Vector::kLanes * pair, half, p);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Vector::Reg x = Vector::set1(a[i * a_stride + p]);
#pragma GCC unroll 4
        for (int j = 0; j < kCols; ++j) Vector::add_product(acc[i][j], x, wide[j]);
      }
    }
  }
};

/// out[rows][columns] = scale * out + a * (the matrices below one another).
template <typename Dot>
struct Product {
  const typename Dot::A* a;  // [rows][num_matrices * depth * pair]
  int64_t a_stride;
  const typename Dot::C* matrices[kChunkBlocks];  // each [depth][columns][pair]
  int64_t num_matrices;
  int64_t depth;
  int64_t columns;
  float* out;
  int64_t out_stride;
  const float* scale;      // [rows]; null overwrites out
  const char* const* path;  // of the first matrix; null prefetches nothing
};

/// Columns [column, column + kCols vectors) for kRows rows. Not inlined: constants that the
/// compiler keeps in registers across it would make the accumulators spill (30 % slower).
template <typename Dot, int kRows, int kCols, bool kPrefetch>
__attribute__((noinline)) void multiply_columns(const Product<Dot>& product, int64_t column,
                                                bool half) {
  constexpr int64_t pair = kPair<typename Dot::C>;
  constexpr int64_t row_bytes = kCols * Vector::kLanes * pair * sizeof(typename Dot::C);
  Vector::Reg acc[kRows][kCols];
  float* out = product.out + column;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kCols; ++j)
      acc[i][j] =
          product.scale == nullptr
              ? Vector::zero()
              : Vector::mul(Vector::set1(product.scale[i]),
                            Vector::load(out + i * product.out_stride + j * Vector::kLanes));
  const int64_t b_stride = product.columns * pair;
  const int64_t matrix_bytes = product.depth * b_stride * sizeof(typename Dot::C);
  const int64_t done_bytes = column * product.depth * pair * sizeof(typename Dot::C);
  const typename Dot::A* a = product.a;
  for (int64_t matrix = 0; matrix < product.num_matrices; ++matrix) {
    const typename Dot::C* b = product.matrices[matrix] + column * pair;
    const char* const* path = product.path + matrix * pages_of(matrix_bytes);
    for_each_row<kPrefetch, row_bytes>(path, done_bytes, product.depth, [&]() RAYMOE_INLINE {
      Dot::multiply_add(acc, a, product.a_stride, b, half);
      a += pair;
      b += b_stride;
    });
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kCols; ++j)
      Vector::store(out + i * product.out_stride + j * Vector::kLanes, acc[i][j]);
}

template <typename Dot, int kRows, bool kPrefetch>
void multiply_all(const Product<Dot>& product) {
  constexpr int64_t lanes = Vector::kLanes;
  constexpr int cols = kRows <= Vector::kNarrowRows ? Vector::kWideColumns : Vector::kColumns;
  const int64_t columns = product.columns;
  int64_t column = 0;
  for (; column + cols * lanes <= columns; column += cols * lanes)
    multiply_columns<Dot, kRows, cols, kPrefetch>(product, column, false);
  for (; column + 2 * lanes <= columns; column += 2 * lanes)
    multiply_columns<Dot, kRows, 2, kPrefetch>(product, column, false);
  for (; column + lanes <= columns; column += lanes)
    multiply_columns<Dot, kRows, 1, kPrefetch>(product, column, false);
  if (column < columns) multiply_columns<Dot, kRows, 1, kPrefetch>(product, column, true);
}

template <typename Dot, int kRows>
void multiply(const Product<Dot>& product) {
  if (product.path == nullptr)
    multiply_all<Dot, kRows, false>(product);
  else
    multiply_all<Dot, kRows, true>(product);
}

/// Tile, split and buffers of one call.
template <typename Dot>
struct TileWork {
  const AttentionTile& tile;
  const AttentionState& state;
  typename Dot::A* query;  // [rows][head_dim]
};

/// Up to 4 consecutive blocks of one chunk.
template <typename Dot>
struct Chunk {
  const typename Dot::C* keys[kChunkBlocks];
  const typename Dot::C* values[kChunkBlocks];
  int64_t first_block;
  int64_t num_blocks;
  const char* const* path;  // keys of the blocks, then each tile of values of the blocks; or null
  // Where the cache is scaled, the factors of its tokens.
  alignas(64) float key_scales[kChunkTokens];
  alignas(64) float value_scales[kChunkTokens];
};

/// scores *= scales, by token.
inline void scale_row(float* scores, const float* scales, int64_t count) {
  for (int64_t i = 0; i < count; i += Vector::kLanes)
    Vector::store(scores + i, Vector::mul(Vector::load(scores + i), Vector::load(scales + i)));
}

/// Weights of one row from its scores, times the factors of values where the cache is scaled;
/// returns the factor of everything summed before.
template <typename Dot>
inline float softmax_row(const float* scores, int64_t count, float scale, float* max, float* sums,
                         const float* value_scales, typename Dot::Weight* weights) {
  constexpr int64_t lanes = Vector::kLanes;
  Vector::Reg top = Vector::load(scores);
  for (int64_t i = lanes; i < count; i += lanes) top = Vector::max(top, Vector::load(scores + i));
  const float row_max = Vector::reduce_max(top) * scale;
  const float new_max = row_max > *max ? row_max : *max;
  // A row that has seen nothing yet: any finite reference gives weights of zero.
  const float reference = new_max == -__builtin_inff() ? 0.0f : new_max;
  const Vector::Reg factor = Vector::exp2(Vector::set1(*max - reference));
  const Vector::Reg scales = Vector::set1(scale);
  const Vector::Reg references = Vector::set1(reference);
  Vector::Reg sum = Vector::mul(Vector::load(sums), factor);
  for (int64_t i = 0; i < count; i += lanes) {
    Vector::Reg weight = Vector::exp2(Vector::fms(Vector::load(scores + i), scales, references));
    sum = Vector::add(sum, weight);
    if constexpr (kIsScaled<typename Dot::C>)
      weight = Vector::mul(weight, Vector::load(value_scales + i));
    Dot::store_weights(weights + i, weight);
  }
  Vector::store(sums, sum);
  *max = new_max;
  alignas(64) float factors[Vector::kLanes];
  Vector::store(factors, factor);
  return factors[0];
}

/// Scores outside [first, last] become -inf.
inline void mask_row(float* scores, int64_t count, int64_t first, int64_t last) {
  constexpr int64_t lanes = Vector::kLanes;
  for (int64_t i = 0; i < count; i += lanes) {
    const int from = static_cast<int>(larger(first - i, 0));
    const int to = static_cast<int>(smaller(last - i, lanes));
    Vector::store(scores + i, Vector::keep(Vector::load(scores + i), from, to));
  }
}

/// Blocks of a chunk that some row sees.
struct Range {
  int64_t begin;
  int64_t end;
};

/// scores[kRows][kChunkTokens] = Q K^T for rows [row, row + kRows).
template <int kRows, typename Dot>
void score_rows(const TileWork<Dot>& work, const Chunk<Dot>& chunk, int64_t row, Range range,
                float* scores) {
  using C = typename Dot::C;
  const int64_t dim = work.tile.shape->head_dim;
  const int64_t pages = pages_of(kBlockTokens * dim * sizeof(C));
  Product<Dot> product{};
  product.a = work.query + row * dim;
  product.a_stride = dim;
  product.num_matrices = 1;
  product.depth = dim / kPair<C>;
  product.columns = kBlockTokens;
  product.out_stride = kChunkTokens;
  for (int64_t block = range.begin; block < range.end; ++block) {
    product.matrices[0] = chunk.keys[block];
    product.out = scores + (block - range.begin) * kBlockTokens;
    if (chunk.path != nullptr) product.path = chunk.path + block * pages;
    multiply<Dot, kRows>(product);
  }
}

/// out = factors * out + P V for rows [row, row + kRows).
template <int kRows, typename Dot>
void add_values(const TileWork<Dot>& work, const Chunk<Dot>& chunk, int64_t row, Range range,
                const typename Dot::Weight* weights, const float* factors) {
  using C = typename Dot::C;
  const int64_t dim = work.tile.shape->value_dim;
  const int64_t key_pages = pages_of(work.tile.shape->values_begin() * sizeof(C));
  const char* const* path = chunk.path;
  if (path != nullptr) path += chunk.num_blocks * key_pages;
  Product<Dot> product{};
  product.a = weights;
  product.a_stride = kChunkTokens;
  product.num_matrices = range.end - range.begin;
  product.depth = kBlockTokens / kPair<C>;
  product.out_stride = padded_head_dim(dim);
  product.scale = factors;
  for (int64_t column = 0; column < dim; column += kValueColumns) {
    product.columns = smaller(dim - column, kValueColumns);
    product.out = work.state.out + row * product.out_stride + column;
    for (int64_t i = 0; i < product.num_matrices; ++i)
      product.matrices[i] = chunk.values[range.begin + i] + column * kBlockTokens;
    const int64_t pages = pages_of(kBlockTokens * product.columns * sizeof(C));
    if (path != nullptr) {
      product.path = path + range.begin * pages;
      path += chunk.num_blocks * pages;
    }
    multiply<Dot, kRows>(product);
  }
}

/// Blocks of the chunk that some of `count` rows from `row` on see.
template <typename Dot>
Range seen_blocks(const AttentionTile& tile, const Chunk<Dot>& chunk, int64_t row, int64_t count) {
  if (tile.tokens != nullptr) return {0, chunk.num_blocks};
  const AttentionShape& shape = *tile.shape;
  const int64_t first_token = tile.first_position + row / shape.group;
  const int64_t last_token = tile.first_position + (row + count - 1) / shape.group;
  const int64_t visible = larger(first_token - shape.window + 1, 0);
  return {larger(visible / kBlockTokens - chunk.first_block, 0),
          smaller(last_token / kBlockTokens - chunk.first_block + 1, chunk.num_blocks)};
}

#if defined(__AVX512VNNI__)

/// Products of bytes with int8 keys and values; queries and weights are cut into bytes.
struct ByteDot {
  using C = int8_t;
  using A = uint8_t;
  using Weight = float;
  static constexpr int kMaxRows = 6;  // 6 x 2 x 2 sums of 32 registers

  static void store_weights(Weight* to, Vector::Reg x) { Vector::store(to, x); }
};

template <int kRows>
void score_rows(const TileWork<ByteDot>& work, const Chunk<ByteDot>& chunk, int64_t row,
                Range range, float* scores) {
  const int64_t dim = work.tile.shape->head_dim;
  const int64_t pages = pages_of(kBlockTokens * dim);
  ByteProduct product{};
  product.a_stride = byte_query_stride(dim);
  product.a = work.query + row * product.a_stride;
  product.low = dim;
  product.num_matrices = 1;
  product.depth = dim / kQuad;
  product.columns = kBlockTokens;
  product.out_stride = kChunkTokens;
  for (int i = 0; i < kRows; ++i) {
    const ByteQuery& query = query_at(product.a + i * product.a_stride, dim);
    product.scale[i] = query.scale;
    for (int part = 0; part < 2; ++part) product.start[i][part] = query.start[part];
  }
  for (int64_t block = range.begin; block < range.end; ++block) {
    product.matrices[0] = chunk.keys[block];
    product.out = scores + (block - range.begin) * kBlockTokens;
    if (chunk.path != nullptr) product.path = chunk.path + block * pages;
    multiply_bytes<kRows, true>(product);
  }
}

template <int kRows>
void add_values(const TileWork<ByteDot>& work, const Chunk<ByteDot>& chunk, int64_t row,
                Range range, const float* weights, const float* factors) {
  const int64_t dim = work.tile.shape->value_dim;
  const char* const* path = chunk.path;
  if (path != nullptr) path += chunk.num_blocks * pages_of(work.tile.shape->values_begin());
  alignas(64) uint8_t bytes[kRows * 2 * kChunkTokens];
  ByteProduct product{};
  product.a = bytes;
  product.a_stride = 2 * kChunkTokens;
  product.low = kChunkTokens;
  product.num_matrices = range.end - range.begin;
  product.depth = kBlockTokens / kQuad;
  product.out_stride = padded_head_dim(dim);
  product.factor = factors;
  for (int i = 0; i < kRows; ++i)
    product.scale[i] = pack_byte_weights(weights + i * kChunkTokens,
                                         product.num_matrices * kBlockTokens,
                                         bytes + i * product.a_stride);
  for (int64_t column = 0; column < dim; column += kValueColumns) {
    product.columns = smaller(dim - column, kValueColumns);
    product.out = work.state.out + row * product.out_stride + column;
    for (int64_t i = 0; i < product.num_matrices; ++i)
      product.matrices[i] = chunk.values[range.begin + i] + column * kBlockTokens;
    const int64_t pages = pages_of(kBlockTokens * product.columns);
    if (path != nullptr) {
      product.path = path + range.begin * pages;
      path += chunk.num_blocks * pages;
    }
    multiply_bytes<kRows, false>(product);
  }
}

#endif  // __AVX512VNNI__

/// One chunk for rows [row, row + kRows).
template <typename Dot, int kRows>
void attend_rows(const TileWork<Dot>& work, const Chunk<Dot>& chunk, int64_t row) {
  const AttentionTile& tile = work.tile;
  const AttentionShape& shape = *tile.shape;
  const auto [begin, end] = seen_blocks(tile, chunk, row, kRows);
  if (begin >= end) return;
  const int64_t count = (end - begin) * kBlockTokens;
  alignas(64) float scores[kRows * kChunkTokens];
  alignas(64) typename Dot::Weight weights[kRows * kChunkTokens];
  score_rows<kRows>(work, chunk, row, {begin, end}, scores);
  float factors[kRows];
  const int64_t origin = (chunk.first_block + begin) * kBlockTokens;
  for (int i = 0; i < kRows; ++i) {
    const int64_t position = tile.first_position + (row + i) / shape.group;
    const int64_t first = larger(position - shape.window + 1, 0) - origin;
    const int64_t last = position - origin;
    if constexpr (kIsScaled<typename Dot::C>)
      scale_row(scores + i * kChunkTokens, chunk.key_scales + begin * kBlockTokens, count);
    if (tile.tokens == nullptr && (first > 0 || last < count - 1))
      mask_row(scores + i * kChunkTokens, count, first, last);
    factors[i] = softmax_row<Dot>(
        scores + i * kChunkTokens, count, shape.scale_log2e, work.state.max + row + i,
        work.state.parts + (row + i) * kSumParts, chunk.value_scales + begin * kBlockTokens,
        weights + i * kChunkTokens);
  }
  add_values<kRows>(work, chunk, row, {begin, end}, weights, factors);
}

template <typename Dot>
void attend_some_rows(const TileWork<Dot>& work, const Chunk<Dot>& chunk, int64_t row,
                      int64_t count) {
  if constexpr (Dot::kMaxRows > 6) {
    switch (count) {
      case 8:
        return attend_rows<Dot, 8>(work, chunk, row);
      case 7:
        return attend_rows<Dot, 7>(work, chunk, row);
      default:
        break;
    }
  }
  switch (count) {
    case 6:
      return attend_rows<Dot, 6>(work, chunk, row);
    case 5:
      return attend_rows<Dot, 5>(work, chunk, row);
    case 4:
      return attend_rows<Dot, 4>(work, chunk, row);
    case 3:
      return attend_rows<Dot, 3>(work, chunk, row);
    case 2:
      return attend_rows<Dot, 2>(work, chunk, row);
    default:
      return attend_rows<Dot, 1>(work, chunk, row);
  }
}

/// The addresses of two chunks, in the order in which they are read, one for each page.
class Path {
 public:
  const char* const* pages() const { return has_room_ ? pages_ : nullptr; }

  template <typename C>
  void add_chunk(const C* const* keys, int64_t num_blocks, const AttentionShape& shape) {
    add(keys, num_blocks, kBlockTokens * shape.head_dim, 0);
    for (int64_t column = 0; column < shape.value_dim; column += kValueColumns)
      add(keys, num_blocks, kBlockTokens * smaller(shape.value_dim - column, kValueColumns),
          shape.values_begin() + column * kBlockTokens);
  }

  template <typename C>
  void add_keys(const C* keys, const AttentionShape& shape) {
    add(&keys, 1, kBlockTokens * shape.head_dim, 0);
  }

  /// Repeats the last address as often as one can look beyond it.
  void end() {
    for (int64_t i = 0; i < kMaxPagesAhead; ++i) add_page(pages_[size_ - 1]);
  }

 private:
  /// Heads of more than a KiB fill it; they are long enough for the hardware's own prefetchers.
  static constexpr int64_t kMaxPages = 160;

  template <typename C>
  void add(const C* const* keys, int64_t num_blocks, int64_t elements, int64_t offset) {
    const int64_t pages = pages_of(elements * static_cast<int64_t>(sizeof(C)));
    for (int64_t block = 0; block < num_blocks; ++block) {
      const char* from = reinterpret_cast<const char*>(keys[block] + offset);
      for (int64_t page = 0; page < pages; ++page) add_page(from + page * kPageBytes);
    }
  }

  void add_page(const char* page) {
    has_room_ = has_room_ && size_ < kMaxPages;
    if (has_room_) pages_[size_++] = page;
  }

  const char* pages_[kMaxPages];
  int64_t size_ = 0;
  bool has_room_ = true;
};

/// Reads the factors of the chunk's tokens, and prefetches those of the next.
template <typename Dot>
void load_scales(Chunk<Dot>& chunk, const int8_t* const* next, const AttentionShape& shape) {
  for (int64_t block = 0; block < kChunkBlocks; ++block) {
    const int8_t* ahead = next[block] + shape.scales_begin();
    for (int64_t i = 0; i < kScaleBytes; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
    if (block >= chunk.num_blocks) continue;
    const auto* from = reinterpret_cast<const float*>(chunk.keys[block] + shape.scales_begin());
    for (int64_t i = 0; i < kBlockTokens; i += Vector::kLanes) {
      const int64_t token = block * kBlockTokens + i;
      Vector::store(chunk.key_scales + token, Vector::load(from + i));
      Vector::store(chunk.value_scales + token, Vector::load(from + kBlockTokens + i));
    }
  }
}

/// The blocks [first, end) of a chunk and the path through it; the tile goes on to block `last`.
template <typename Dot>
Chunk<Dot> make_chunk(const AttentionTile& tile, int64_t first, int64_t end, int64_t last,
                    Path& path) {
  using C = typename Dot::C;
  const AttentionShape& shape = *tile.shape;
  const auto keys_of = [&](int64_t block) {
    return static_cast<const C*>(tile.cache) + tile.block_table[block] * shape.block_stride;
  };
  Chunk<Dot> chunk;
  chunk.first_block = first;
  chunk.num_blocks = end - first;
  for (int64_t i = 0; i < chunk.num_blocks; ++i) {
    chunk.keys[i] = keys_of(first + i);
    chunk.values[i] = chunk.keys[i] + shape.values_begin();
  }
  const C* next[kChunkBlocks];
  for (int64_t i = 0; i < kChunkBlocks; ++i)
    next[i] = end + i < last ? keys_of(end + i) : static_cast<const C*>(tile.next_keys[i]);
  path.add_chunk(chunk.keys, chunk.num_blocks, shape);
  if (end == last && tile.next_append != nullptr)
    path.add_keys(static_cast<const C*>(tile.next_append), shape);
  path.add_chunk(next, kChunkBlocks, shape);
  path.end();
  chunk.path = path.pages();
  if constexpr (kIsScaled<C>) load_scales(chunk, next, shape);
  return chunk;
}

inline void pack_row(const bf16* from, int64_t count, bf16* to) {
  for (int64_t d = 0; d < count; d += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + d)));
}
template <typename Q>
inline void pack_row(const Q* from, int64_t count, float* to) {
  for (int64_t d = 0; d < count; d += 8) store8(to + d, load8(from + d));
}

template <typename Q, typename Dot>
void pack_queries(const TileWork<Dot>& work) {
  const AttentionTile& tile = work.tile;
  const AttentionShape& shape = *tile.shape;
  const int64_t width = shape.group * shape.head_dim;
  for (int64_t i = 0; i < tile.num_tokens; ++i) {
    const int64_t token = tile.tokens == nullptr ? i : tile.tokens[i];
    pack_row(static_cast<const Q*>(tile.query) + token * shape.query_stride, width,
             work.query + i * width);
    if constexpr (kIsScaled<typename Dot::C>)
      for (int64_t head = 0; head < shape.group; ++head)
        rotate_query(work.query + i * width + head * shape.head_dim, shape.head_dim);
  }
}

#if defined(__AVX512VNNI__)
template <typename Q>
void pack_queries(const TileWork<ByteDot>& work) {
  const AttentionTile& tile = work.tile;
  const AttentionShape& shape = *tile.shape;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const int64_t index = row / shape.group;
    const int64_t token = tile.tokens == nullptr ? index : tile.tokens[index];
    const Q* from = static_cast<const Q*>(tile.query) + token * shape.query_stride;
    // Behind the rows, where there is room for one of floats.
    auto* floats = reinterpret_cast<float*>(work.query +
                                            tile.num_rows() * byte_query_stride(shape.head_dim));
    pack_row(from + row % shape.group * shape.head_dim, shape.head_dim, floats);
    rotate_query(floats, shape.head_dim);
    pack_byte_query(floats, shape.head_dim, work.query + row * byte_query_stride(shape.head_dim));
  }
}
#endif

inline void clear_sums(const AttentionTile& tile, const AttentionState& state) {
  const int64_t rows = tile.num_rows();
  const int64_t out_size = rows * padded_head_dim(tile.shape->value_dim);
  for (int64_t i = 0; i < rows; ++i) state.max[i] = -__builtin_inff();
  for (int64_t i = 0; i < rows * kSumParts; ++i) state.parts[i] = 0;
  for (int64_t i = 0; i < out_size; ++i) state.out[i] = 0;
}

template <typename Dot, typename Q>
void attend(const AttentionTile& tile, const BlockRange& range, const AttentionState& state,
            float* scratch) {
  const int64_t rows = tile.num_rows();
  const TileWork<Dot> work{tile, state, reinterpret_cast<typename Dot::A*>(scratch)};
  pack_queries<Q>(work);
  if (range.begins) clear_sums(tile, state);
  const int64_t num_groups = (rows + Dot::kMaxRows - 1) / Dot::kMaxRows;
  int64_t block = range.first;
  while (block < range.end) {
    const int64_t end = smaller(range.end, (block / kChunkBlocks + 1) * kChunkBlocks);
    Path path;
    Chunk<Dot> chunk = make_chunk<Dot>(tile, block, end, range.end, path);
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t row = group * rows / num_groups;
      attend_some_rows(work, chunk, row, (group + 1) * rows / num_groups - row);
      chunk.path = nullptr;  // what the first rows have prefetched is there for the others
    }
    block = end;
  }
  if (range.ends)
    for (int64_t row = 0; row < rows; ++row)
      state.sum[row] = Vector::reduce_add(Vector::load(state.parts + row * kSumParts));
}

template <typename Q>
void store(const AttentionTile& tile, const AttentionState& state) {
  const AttentionShape& shape = *tile.shape;
  const int64_t dim = shape.value_dim;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const float* from = state.out + row * padded_head_dim(dim);
    Q* to =
        static_cast<Q*>(tile.out) + row / shape.group * shape.out_stride + row % shape.group * dim;
    const __m256 factor = _mm256_set1_ps(1.0f / state.sum[row]);
    for (int64_t d = 0; d < dim; d += 8) store8(to + d, _mm256_mul_ps(load8(from + d), factor));
  }
}

#if defined(__AVX512BF16__)

/// One instruction multiplies and adds a pair of bf16 in 16 lanes. Weights are rounded to bf16;
/// scores, sums and outputs are float32. The instruction takes subnormal operands as zero.
struct PairDot {
  using C = bf16;
  using A = bf16;
  using Weight = bf16;
  static constexpr int kMaxRows = Vector::kMaxRows;

  static void store_weights(Weight* to, Vector::Reg x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }

  template <int kRows, int kCols>
  static inline void multiply_add(Vector::Reg (&acc)[kRows][kCols], const A* a, int64_t a_stride,
                          const C* b, bool half) {
    __m512bh pairs[kCols];
    for (int j = 0; j < kCols; ++j)
      pairs[j] = reinterpret_cast<__m512bh>(Vector::load_pairs(b + j * 2 * Vector::kLanes, half));
    for (int i = 0; i < kRows; ++i) {
      int32_t pair;
      __builtin_memcpy(&pair, a + i * a_stride, sizeof pair);
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int j = 0; j < kCols; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, pairs[j]);
    }
  }
};

#endif  // __AVX512BF16__

#else  // without vectors

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

/// One row over positions [begin, end) of a chunk: scores, their maximum, exponentials, weighted sum.
template <typename C>
void attend_row(const AttentionTile& tile, const float* query, int64_t row, int64_t begin,
                int64_t end, const AttentionState& state) {
  const AttentionShape& shape = *tile.shape;
  const int64_t dim = shape.head_dim, value_dim = shape.value_dim;
  const auto keys_of = [&](int64_t position) {
    return static_cast<const C*>(tile.cache) +
           tile.block_table[position / kBlockTokens] * shape.block_stride;
  };
  [[maybe_unused]] const auto scales_of = [&](int64_t position) {  // of a key; a value's is B behind
    return reinterpret_cast<const float*>(keys_of(position) + shape.scales_begin()) +
           position % kBlockTokens;
  };
  float scores[kChunkTokens];
  float max = state.max[row];
  for (int64_t position = begin; position < end; ++position) {
    const C* keys = keys_of(position);
    float score = 0;
    for (int64_t d = 0; d < dim; ++d)
      score += query[d] * key_at(keys, position % kBlockTokens, d);
    if constexpr (kIsScaled<C>) score *= *scales_of(position);
    scores[position - begin] = score * shape.scale_log2e;
    max = std::max(max, scores[position - begin]);
  }
  const float factor = std::exp2(state.max[row] - max);
  float sum = state.sum[row] * factor;
  float* out = state.out + row * padded_head_dim(value_dim);
  for (int64_t d = 0; d < value_dim; ++d) out[d] *= factor;
  for (int64_t position = begin; position < end; ++position) {
    const C* values = keys_of(position) + shape.values_begin();
    float weight = std::exp2(scores[position - begin] - max);
    sum += weight;
    if constexpr (kIsScaled<C>) weight *= scales_of(position)[kBlockTokens];
    for (int64_t d = 0; d < value_dim; ++d)
      out[d] += weight * value_at(values, value_dim, position % kBlockTokens, d);
  }
  state.max[row] = max;
  state.sum[row] = sum;
}

/// The query of a row as its keys are: in float32, rotated for int8.
template <typename Q, typename C>
void read_query(const AttentionTile& tile, int64_t row, float* to) {
  const AttentionShape& shape = *tile.shape;
  const int64_t index = row / shape.group;
  const int64_t token = tile.tokens == nullptr ? index : tile.tokens[index];
  const Q* query = static_cast<const Q*>(tile.query) + token * shape.query_stride +
                   row % shape.group * shape.head_dim;
  for (int64_t d = 0; d < shape.head_dim; ++d) to[d] = to_float(query[d]);
  if constexpr (kIsScaled<C>) rotate_query(to, shape.head_dim);
}

template <typename Q, typename C>
void attend(const AttentionTile& tile, const BlockRange& range, const AttentionState& state,
            float* scratch) {
  const AttentionShape& shape = *tile.shape;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    read_query<Q, C>(tile, row, scratch);
    if (range.begins) {
      float* out = state.out + row * padded_head_dim(shape.value_dim);
      state.max[row] = -std::numeric_limits<float>::infinity();
      state.sum[row] = 0;
      std::fill(out, out + shape.value_dim, 0.0f);
    }
    int64_t begin = range.first * kBlockTokens, end = range.end * kBlockTokens;
    if (tile.tokens == nullptr) {
      const int64_t position = tile.first_position + row / shape.group;
      begin = std::max(begin, position - shape.window + 1);
      end = std::min(end, position + 1);
    }
    for (int64_t next; begin < end; begin = next) {
      next = std::min(end, (begin / kChunkTokens + 1) * kChunkTokens);
      attend_row<C>(tile, scratch, row, begin, next, state);
    }
  }
}

template <typename Q>
void store(const AttentionTile& tile, const AttentionState& state) {
  const AttentionShape& shape = *tile.shape;
  const int64_t dim = shape.value_dim;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const float* from = state.out + row * padded_head_dim(dim);
    Q* to =
        static_cast<Q*>(tile.out) + row / shape.group * shape.out_stride + row % shape.group * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] = from_float<Q>(from[d] / state.sum[row]);
  }
}

#endif  // __AVX2__

#if !defined(__AVX512BF16__)
#if defined(__AVX2__)
template <typename Q>
constexpr AttentionKernel kScaledKernel = {attend<WideDot<int8_t>, Q>, store<Q>};
#else
template <typename Q>
constexpr AttentionKernel kScaledKernel = {attend<Q, int8_t>, store<Q>};
#endif

AttentionKernel kernel_of_scaled(DType query) {
  if (query == DType::kBFloat16) return kScaledKernel<bf16>;
  if (query == DType::kFloat16) return kScaledKernel<fp16>;
  return kScaledKernel<float>;
}
#endif

AttentionKernel kernel_of(DType query, DType cache) {
#if defined(__AVX512BF16__)
  if (query == DType::kBFloat16 && cache == DType::kBFloat16)
    return {attend<PairDot, bf16>, store<bf16>};
  if (query == DType::kBFloat16 && cache == DType::kInt8)
    return {attend<ByteDot, bf16>, store<bf16>};
  return attention_kernel_avx512(query, cache);
#elif defined(__AVX2__)
  if (cache == DType::kInt8) return kernel_of_scaled(query);
  if (query == DType::kBFloat16) return {attend<WideDot<bf16>, bf16>, store<bf16>};
  if (query == DType::kFloat16) return {attend<WideDot<fp16>, fp16>, store<fp16>};
  if (cache == DType::kBFloat16) return {attend<WideDot<bf16>, float>, store<float>};
  if (cache == DType::kFloat16) return {attend<WideDot<fp16>, float>, store<float>};
  return {attend<WideDot<float>, float>, store<float>};
#else
  if (cache == DType::kInt8) return kernel_of_scaled(query);
  if (query == DType::kBFloat16) return {attend<bf16, bf16>, store<bf16>};
  if (query == DType::kFloat16) return {attend<fp16, fp16>, store<fp16>};
  if (cache == DType::kBFloat16) return {attend<float, bf16>, store<float>};
  if (cache == DType::kFloat16) return {attend<float, fp16>, store<float>};
  return {attend<float, float>, store<float>};
#endif
}

}  // namespace

RAYMOE_DEFINE_KERNELS(AttentionKernelOf, attention_kernel) = kernel_of;

}  // namespace raymoe
