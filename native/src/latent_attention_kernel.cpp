// The latent attention kernel. Without vectors it works off one row after another.
//
// With vectors, a tile is worked off in chunks of 4 blocks (128 positions): scores = K Q^T with a
// position in each row and a head in each lane, online softmax of all lanes at once, out = factor *
// out + P V with a head in each row. So the cached rows are read as they lie, and nothing is summed
// across lanes. A row's arithmetic never depends on the rest of its tile: positions that only other
// rows see score -inf, get weight 0 and add 0.
#include "raymoe/latent_attention.h"

#if defined(__AVX2__)
#include <array>
#include <utility>

#include "attention_vector.h"
#else
#include <algorithm>
#include <cmath>
#include <limits>
#endif

namespace raymoe {
namespace {

#if defined(__AVX2__)

using Reg = Vector::Reg;

constexpr int64_t kLineBytes = 64;
constexpr int64_t kLanes = Vector::kLanes;
constexpr int kPanelVectors = 2;
constexpr int64_t kPanelColumns = kPanelVectors * kLanes;
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // of a register block: 12 x 2 of 32 registers
#else
constexpr int kMaxRows = 6;
#endif

constexpr int64_t kPartBytes = 16384;  // of a panel of queries: half of a first-level cache

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

/// Where a tile keeps what it works on; A is the type of the operands, of which `pair` are
/// multiplied together. R rows of the tile, padded to whole vectors.
template <typename A>
struct Workspace {
  A* queries;      // panels of R columns, each [width / pair][columns][pair]
  A* values;       // a chunk of the cache as the right operand of P V
  A* gathered;     // a chunk of rows that lie apart as the left operand of K Q^T
  A* weights;      // [kChunkTokens / pair][R][pair]
  float* scores;   // [kChunkTokens][R]
  float* factors;  // [R]
  float* max;      // [R], of `AttentionState`, whose rows are not padded
  float* sum;      // [R]
};

/// Up to 4 consecutive blocks of the cache.
template <typename A>
struct Chunk {
  const A* rows[kChunkBlocks];  // of runs of rows that lie together
  int64_t first;                // position
  int64_t count;
  int64_t run;  // rows of a run
  const char* next[kChunkBlocks];  // blocks of the cache to be prefetched
  int64_t block_bytes;
};

/// The right operand of P V from some column on: a row, or a pair of them, after every `stride`.
template <typename A>
struct Panel {
  const A* data;
  int64_t stride;
};

/// Prefetches the row that is gathered some rows after row `i`.
inline void prefetch_row(const void* const* rows, int64_t i, int64_t count, int64_t num_bytes) {
  constexpr int64_t kRowsAhead = 4;
  if (i + kRowsAhead >= count) return;
  const char* row = static_cast<const char*>(rows[i + kRowsAhead]);
  for (int64_t at = 0; at < num_bytes; at += kLineBytes) _mm_prefetch(row + at, _MM_HINT_T0);
}

template <typename C>
const C* block_at(const LatentTile& tile, int64_t index) {
  return static_cast<const C*>(tile.cache) + tile.block_table[index] * tile.shape->block_stride;
}

/// Operands are float32: cached rows are widened into `values`, which serve both products.
template <typename Cache>
struct Wide {
  using C = Cache;
  using A = float;
  static constexpr int64_t kPair = 1;

  static int64_t row_stride(const LatentShape& shape) { return shape.width + kRowPadding; }
  static Reg load(const A* b) { return Vector::load(b); }
  static Reg multiply_add(Reg acc, const A* a, Reg b) {
    return Vector::fma(Vector::set1(*a), b, acc);
  }
  static void store_weights(A* to, const Reg (&weights)[1]) { Vector::store(to, weights[0]); }

  static void gather(const LatentTile& tile, const Workspace<A>& work, Chunk<A>& chunk) {
    const LatentShape& shape = *tile.shape;
    for (int64_t i = 0; i < chunk.count; ++i) {
      const Cache* block = block_at<Cache>(tile, (chunk.first + i) / kBlockTokens);
      widen(block + (chunk.first + i) % kBlockTokens * shape.width, shape, i, work);
    }
    chunk.run = kBlockTokens;
    for (int64_t i = 0; i < chunk.count; i += kBlockTokens)
      chunk.rows[i / kBlockTokens] = work.values + i * row_stride(shape);
  }
  static void gather_rows(const LatentShape& shape, const void* const* rows,
                          const Workspace<A>& work, Chunk<A>& chunk) {
    for (int64_t i = 0; i < chunk.count; ++i) {
      prefetch_row(rows, i, chunk.count, shape.width * int64_t{sizeof(Cache)});
      widen(static_cast<const Cache*>(rows[i]), shape, i, work);
    }
    chunk.run = chunk.count;
    chunk.rows[0] = work.values;
  }
  static Panel<A> values(const LatentShape& shape, const Workspace<A>& work, int64_t column,
                         int64_t) {
    return {work.values + column, row_stride(shape)};
  }

 private:
  static void widen(const Cache* from, const LatentShape& shape, int64_t i,
                    const Workspace<A>& work) {
    A* to = work.values + i * row_stride(shape);
    for (int64_t d = 0; d < shape.width; d += 8) store8(to + d, load8(from + d));
  }
};

/// out[rows][columns of a panel] = scale * out + A * B. `b` is a panel of B: row after row (pair of
/// rows after pair of rows) of its columns.
template <typename Format>
struct Product {
  const typename Format::A* a;
  int64_t a_row;   // elements between rows
  int64_t a_step;  // elements between columns, or pairs of them
  const typename Format::A* b;
  int64_t b_step;
  int64_t num_steps;
  float* out;
  int64_t out_row;
  bool adds;               // to out, else overwrites it
  const float* scale;      // [rows], of what it adds to; null: 1
  const char* ahead;       // a line of cache is prefetched with each of them
  const char* ahead_end;
};

/// Not inlined, so that every accumulator stays in a register.
template <typename Format, int kCols, int kRows>
__attribute__((noinline)) void multiply_block(const Product<Format>& product) {
  Reg acc[kRows][kCols];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j)
      acc[i][j] = product.adds ? Vector::load(product.out + i * product.out_row + j * kLanes)
                               : Vector::zero();
  if (product.scale != nullptr)
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kCols; ++j)
        acc[i][j] = Vector::mul(Vector::set1(product.scale[i]), acc[i][j]);
  const typename Format::A* a = product.a;
  const typename Format::A* b = product.b;
  const char* ahead = product.ahead;
  for (int64_t k = 0; k < product.num_steps; ++k) {
    if (ahead < product.ahead_end) {
      _mm_prefetch(ahead, _MM_HINT_T1);
      ahead += kLineBytes;
    }
    Reg columns[kCols];
    for (int j = 0; j < kCols; ++j) columns[j] = Format::load(b + j * kLanes * Format::kPair);
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kCols; ++j)
        acc[i][j] = Format::multiply_add(acc[i][j], a + i * product.a_row, columns[j]);
    a += product.a_step;
    b += product.b_step;
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j)
      Vector::store(product.out + i * product.out_row + j * kLanes, acc[i][j]);
}

template <typename Format>
using MultiplyBlock = void (*)(const Product<Format>&);

template <typename Format, int kCols, int... kRows>
constexpr std::array<MultiplyBlock<Format>, kMaxRows> block_table(
    std::integer_sequence<int, kRows...>) {
  return {multiply_block<Format, kCols, kRows + 1>...};
}

/// All rows of a product, in register blocks of nearly equal size. Returns where its prefetches
/// end.
template <typename Format>
const char* multiply(Product<Format> product, int64_t num_rows, bool is_half) {
  using Rows = std::make_integer_sequence<int, kMaxRows>;
  static constexpr auto kWhole = block_table<Format, kPanelVectors>(Rows());
  static constexpr auto kHalf = block_table<Format, 1>(Rows());
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  const Product<Format> all = product;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t first = block * num_rows / num_blocks;
    const int64_t rows = (block + 1) * num_rows / num_blocks - first;
    product.a = all.a + first * all.a_row;
    product.out = all.out + first * all.out_row;
    if (all.scale != nullptr) product.scale = all.scale + first;
    (is_half ? kHalf : kWhole)[static_cast<size_t>(rows - 1)](product);
    product.ahead += product.num_steps * kLineBytes;
  }
  return product.ahead;
}

/// Up to 8 operands of a query: elements, of which a row has a whole number of 8, or pairs of them.
template <typename Q>
inline __m256 load_operands(const Q* from, int64_t, const float*) {
  return load8(from);
}
inline __m256 load_operands(const bf16* from, int64_t count, const bf16*) {
  if (count == 8) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  return _mm256_zextps128_ps256(_mm_loadu_ps(reinterpret_cast<const float*>(from)));
}

/// Row i of the result holds element i of each row.
inline void transpose8(__m256 (&rows)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      fours[i + 2 * k] = _mm256_shuffle_ps(pairs[i + k], pairs[i + k + 2], 0x44);
      fours[i + 2 * k + 1] = _mm256_shuffle_ps(pairs[i + k], pairs[i + k + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

/// The queries of a tile as the right operand: a row becomes a column. Operands are 4 bytes wide, 8
/// of 8 rows are transposed together.
template <typename Format, typename Q>
void pack_queries(const LatentTile& tile, typename Format::A* to) {
  using A = typename Format::A;
  constexpr int64_t pair = Format::kPair;
  const LatentShape& shape = *tile.shape;
  const int64_t num_rows = tile.num_rows(), padded = rounded_up(num_rows, kLanes);
  for (int64_t row = 0; row < padded; row += 8) {
    const int64_t panel = row / kPanelColumns * kPanelColumns;
    const int64_t columns = smaller(padded - panel, kPanelColumns);
    A* out = to + panel * shape.width + (row - panel) * pair;
    const Q* queries[8];
    for (int64_t i = 0; i < 8; ++i)
      queries[i] = row + i >= num_rows
                       ? nullptr
                       : static_cast<const Q*>(tile.query) + tile.query_offset(row + i);
    for (int64_t d = 0; d < shape.width; d += 8 * pair) {
      const int64_t count = smaller(8, (shape.width - d) / pair);
      __m256 block[8];
      for (int64_t i = 0; i < 8; ++i)
        block[i] = queries[i] == nullptr ? _mm256_setzero_ps()
                                         : load_operands(queries[i] + d, count, out);
      transpose8(block);
      for (int64_t k = 0; k < count; ++k, out += columns * pair)
        _mm256_storeu_ps(reinterpret_cast<float*>(out), block[k]);
    }
  }
}

/// scores[position][row of the tile] for the positions of a chunk. A part of the columns of a panel
/// of queries stays in the first-level cache while all rows of a run are multiplied with it.
template <typename Format>
void score_chunk(const LatentTile& tile, const Chunk<typename Format::A>& chunk,
                const Workspace<typename Format::A>& work) {
  constexpr int64_t kPartSteps = kPartBytes / (kPanelColumns * int64_t{sizeof(float)});
  const int64_t width = tile.shape->width, padded = rounded_up(tile.num_rows(), kLanes);
  const int64_t num_steps = width / Format::kPair;
  const int64_t num_parts = (num_steps + kPartSteps - 1) / kPartSteps;
  Product<Format> product{};
  product.a_row = Format::row_stride(*tile.shape);
  product.a_step = Format::kPair;
  product.out_row = padded;
  for (int64_t run = 0; run * chunk.run < chunk.count; ++run) {
    const int64_t rows = smaller(chunk.run, chunk.count - run * chunk.run);
    product.ahead = chunk.next[run];
    product.ahead_end = product.ahead + chunk.block_bytes;
    for (int64_t panel = 0; panel < padded; panel += kPanelColumns) {
      const int64_t columns = smaller(padded - panel, kPanelColumns);
      product.b_step = columns * Format::kPair;
      product.out = work.scores + run * chunk.run * padded + panel;
      for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t step = part * num_steps / num_parts;
        product.num_steps = (part + 1) * num_steps / num_parts - step;
        product.a = chunk.rows[run] + step * product.a_step;
        product.b = work.queries + panel * width + step * product.b_step;
        product.adds = part > 0;
        product.ahead = multiply(product, rows, columns < kPanelColumns);
      }
    }
  }
}

/// Positions after a row's own score -inf: rows of later tokens see them.
template <typename A>
void mask_chunk(const LatentTile& tile, const Chunk<A>& chunk, float* scores) {
  if (tile.tokens != nullptr) return;
  const int64_t padded = rounded_up(tile.num_rows(), kLanes);
  for (int64_t i = larger(tile.first_position + 1 - chunk.first, 0); i < chunk.count; ++i) {
    const int64_t first_row = (chunk.first + i - tile.first_position) * tile.num_heads;
    for (int64_t row = 0; row < smaller(first_row, padded); row += kLanes) {
      float* at = scores + i * padded + row;
      const int from = static_cast<int>(smaller(first_row - row, kLanes));
      Vector::store(at, Vector::keep(Vector::load(at), from, static_cast<int>(kLanes)));
    }
  }
}

/// Online softmax: weights of a chunk from its scores, and the factors of everything summed before.
template <typename Format>
void weigh_chunk(const LatentTile& tile, int64_t count,
                 const Workspace<typename Format::A>& work) {
  const int64_t padded = rounded_up(tile.num_rows(), kLanes);
  const Reg scale = Vector::set1(tile.shape->scale_log2e);
  const Reg lowest = Vector::set1(-3.0e38f);
  for (int64_t row = 0; row < padded; row += kLanes) {
    const float* scores = work.scores + row;
    Reg top = Vector::load(scores);
    for (int64_t i = 1; i < count; ++i) top = Vector::max(top, Vector::load(scores + i * padded));
    const Reg old_max = Vector::load(work.max + row);
    const Reg max = Vector::max(old_max, Vector::mul(top, scale));
    // A row that has seen nothing yet: any finite reference gives weights of zero.
    const Reg reference = Vector::max(max, lowest);
    const Reg factor = Vector::exp2(Vector::fms(old_max, Vector::set1(1.0f), reference));
    Reg sum = Vector::mul(Vector::load(work.sum + row), factor);
    for (int64_t i = 0; i < count; i += Format::kPair) {
      Reg weights[Format::kPair];
      for (int64_t p = 0; p < Format::kPair; ++p) {
        weights[p] = i + p < count
                         ? Vector::exp2(Vector::fms(Vector::load(scores + (i + p) * padded), scale,
                                                    reference))
                         : Vector::zero();
        sum = Vector::add(sum, weights[p]);
      }
      Format::store_weights(work.weights + (i * padded + row * Format::kPair), weights);
    }
    Vector::store(work.max + row, max);
    Vector::store(work.sum + row, sum);
    Vector::store(work.factors + row, factor);
  }
}

/// out = factors * out + P V.
template <typename Format>
void add_values(const LatentTile& tile, int64_t count, const Workspace<typename Format::A>& work,
                const AttentionState& state) {
  constexpr int64_t pair = Format::kPair;
  const LatentShape& shape = *tile.shape;
  const int64_t padded = rounded_up(tile.num_rows(), kLanes);
  const int64_t rank = rounded_up(shape.rank, kLanes);
  Product<Format> product{};
  product.a = work.weights;
  product.a_row = pair;
  product.a_step = padded * pair;
  product.num_steps = (count + pair - 1) / pair;
  product.out_row = padded_head_dim(shape.rank);
  product.adds = true;
  product.scale = work.factors;
  for (int64_t column = 0; column < rank; column += kPanelColumns) {
    const int64_t columns = smaller(rank - column, kPanelColumns);
    const auto panel = Format::values(shape, work, column, columns);
    product.b = panel.data;
    product.b_step = panel.stride;
    product.out = state.out + column;
    multiply(product, tile.num_rows(), columns < kPanelColumns);
  }
}

template <typename Format>
Workspace<typename Format::A> workspace_at(float* scratch, const LatentShape& shape,
                                           int64_t num_rows) {
  using A = typename Format::A;
  const int64_t padded = rounded_up(num_rows, kLanes);
  Workspace<A> work;
  work.factors = scratch;
  work.max = work.factors + padded;
  work.sum = work.max + padded;
  work.scores = work.sum + padded;
  float* next = work.scores + kChunkTokens * padded;
  if constexpr (Format::kPair == 1) {
    work.weights = work.scores;  // each takes the place of its score
  } else {
    work.weights = reinterpret_cast<A*>(next);
    next += kChunkTokens * padded / Format::kPair;
  }
  work.queries = reinterpret_cast<A*>(next);
  next += rounded_up(padded * shape.width, 16) / Format::kPair;
  work.values = reinterpret_cast<A*>(next);
  work.gathered = work.values + kChunkTokens * rounded_up(shape.rank, kLanes);
  return work;
}

/// The positions of a chunk, and the blocks that its thread reads after it.
template <typename Format>
Chunk<typename Format::A> make_chunk(const LatentTile& tile, int64_t first, int64_t end) {
  Chunk<typename Format::A> chunk;
  chunk.first = first;
  chunk.count = smaller(kChunkTokens, end - first);
  chunk.block_bytes = kBlockTokens * tile.shape->width * int64_t{sizeof(typename Format::C)};
  for (int64_t i = 0; i < kChunkBlocks; ++i) {
    const int64_t position = first + kChunkTokens + i * kBlockTokens;
    const void* next = position < end
                           ? block_at<typename Format::C>(tile, position / kBlockTokens)
                           : tile.next_blocks[i];
    chunk.next[i] = static_cast<const char*>(next);
  }
  return chunk;
}

inline void clear_sums(const LatentTile& tile, const AttentionState& state) {
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    state.max[row] = -__builtin_inff();
    state.sum[row] = 0;
  }
  const int64_t out_size = tile.num_rows() * padded_head_dim(tile.shape->rank);
  for (int64_t i = 0; i < out_size; ++i) state.out[i] = 0;
}

/// Of the rows of a tile, and nothing of those that whole vectors have beyond them.
template <typename A>
void load_sums(const LatentTile& tile, const AttentionState& state, const Workspace<A>& work) {
  const int64_t num_rows = tile.num_rows();
  for (int64_t row = 0; row < rounded_up(num_rows, kLanes); ++row) {
    work.max[row] = row < num_rows ? state.max[row] : -__builtin_inff();
    work.sum[row] = row < num_rows ? state.sum[row] : 0;
  }
}

template <typename A>
void store_sums(const LatentTile& tile, const Workspace<A>& work, const AttentionState& state) {
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    state.max[row] = work.max[row];
    state.sum[row] = work.sum[row];
  }
}

template <typename Format, typename Q>
void attend(const LatentTile& tile, const BlockRange& range, const AttentionState& state,
            float* scratch) {
  const LatentShape& shape = *tile.shape;
  const auto work = workspace_at<Format>(scratch, shape, tile.num_rows());
  pack_queries<Format, Q>(tile, work.queries);
  if (range.begins) clear_sums(tile, state);
  load_sums(tile, state, work);
  int64_t end = range.end * kBlockTokens;
  if (tile.tokens == nullptr) end = smaller(end, tile.last_position() + 1);
  for (int64_t first = range.first * kBlockTokens; first < end; first += kChunkTokens) {
    auto chunk = make_chunk<Format>(tile, first, end);
    Format::gather(tile, work, chunk);
    score_chunk<Format>(tile, chunk, work);
    mask_chunk(tile, chunk, work.scores);
    weigh_chunk<Format>(tile, chunk.count, work);
    add_values<Format>(tile, chunk.count, work, state);
  }
  store_sums(tile, work, state);
}

template <typename Format, typename Q>
void attend_rows(const LatentTile& tile, const void* const* rows, int64_t count,
                 const AttentionState& state, float* scratch) {
  const LatentShape& shape = *tile.shape;
  const auto work = workspace_at<Format>(scratch, shape, tile.num_rows());
  pack_queries<Format, Q>(tile, work.queries);
  load_sums(tile, state, work);
  // Of one length, since a chunk of few rows costs almost as much as a long one.
  const int64_t num_chunks = (count + kChunkTokens - 1) / kChunkTokens;
  const int64_t size = num_chunks == 0 ? 1 : rounded_up((count + num_chunks - 1) / num_chunks, 2);
  for (int64_t first = 0; first < count; first += size) {
    Chunk<typename Format::A> chunk{};
    chunk.count = smaller(size, count - first);
    for (const char*& next : chunk.next) next = static_cast<const char*>(rows[0]);
    Format::gather_rows(shape, rows + first, work, chunk);
    score_chunk<Format>(tile, chunk, work);
    weigh_chunk<Format>(tile, chunk.count, work);
    add_values<Format>(tile, chunk.count, work, state);
  }
  store_sums(tile, work, state);
}

template <typename Q>
void store(const LatentTile& tile, const AttentionState& state) {
  const LatentShape& shape = *tile.shape;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const float* from = state.out + row * padded_head_dim(shape.rank);
    Q* to = static_cast<Q*>(tile.out) + row / tile.num_heads * shape.out_stride +
            row % tile.num_heads * shape.rank;
    const __m256 factor = _mm256_set1_ps(1.0f / state.sum[row]);
    for (int64_t d = 0; d < shape.rank; d += 8)
      store8(to + d, _mm256_mul_ps(load8(from + d), factor));
  }
}

template <typename Format, typename Q>
constexpr LatentKernel kernel() {
  return {attend<Format, Q>, attend_rows<Format, Q>, store<Q>};
}

#if defined(__AVX512BF16__)

inline __m512i as_bits(__m512bh x) { return reinterpret_cast<__m512i>(x); }

/// Lanes of two vectors by turns: the first halves of both, or the second.
inline __m512i interleave(__m512i first, __m512i second, int half) {
  const __m512i lane = _mm512_add_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_set1_epi32(16 * half));
  const __m512i order = _mm512_or_si512(
      lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(32)), 16));
  return _mm512_permutex2var_epi16(first, order, second);
}

/// One instruction multiplies and adds a pair of bf16 in 16 lanes. Weights are rounded to bf16;
/// scores, sums and outputs are float32. The instruction takes subnormal operands as zero.
///
/// For the scores a pair is two neighbouring elements of a cached row, read in place; for P V it is
/// the same element of two neighbouring rows, so the values of a chunk are interleaved first.
struct Pairs {
  using C = bf16;
  using A = bf16;
  static constexpr int64_t kPair = 2;

  static int64_t row_stride(const LatentShape& shape) { return shape.width; }
  static Reg load(const A* b) { return _mm512_loadu_ps(b); }
  static Reg multiply_add(Reg acc, const A* a, Reg b) {
    int32_t pair;
    __builtin_memcpy(&pair, a, sizeof pair);
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                            reinterpret_cast<__m512bh>(b));
  }
  static void store_weights(A* to, const Reg (&weights)[2]) {
    const __m512i both = as_bits(_mm512_cvtne2ps_pbh(weights[1], weights[0]));
    const __m512i second = _mm512_castsi256_si512(_mm512_extracti64x4_epi64(both, 1));
    _mm512_storeu_si512(to, interleave(both, second, 0));
  }

  static void gather(const LatentTile& tile, const Workspace<A>& work, Chunk<A>& chunk) {
    chunk.run = kBlockTokens;
    for (int64_t i = 0; i < chunk.count; i += kBlockTokens) {
      const A* rows = block_at<A>(tile, (chunk.first + i) / kBlockTokens);
      chunk.rows[i / kBlockTokens] = rows;
      interleave_rows(*tile.shape, rows, smaller(kBlockTokens, chunk.count - i), i, work.values);
    }
  }
  static void gather_rows(const LatentShape& shape, const void* const* rows,
                          const Workspace<A>& work, Chunk<A>& chunk) {
    const int64_t num_bytes = shape.width * int64_t{sizeof(A)};
    for (int64_t i = 0; i < chunk.count; ++i) {
      prefetch_row(rows, i, chunk.count, num_bytes);
      __builtin_memcpy(work.gathered + i * shape.width, rows[i], static_cast<size_t>(num_bytes));
    }
    chunk.run = chunk.count;
    chunk.rows[0] = work.gathered;
    interleave_rows(shape, work.gathered, chunk.count, 0, work.values);
  }
  static Panel<A> values(const LatentShape&, const Workspace<A>& work, int64_t column,
                         int64_t columns) {
    return {work.values + column * kChunkTokens, columns * kPair};
  }

 private:
  /// Rows of a run as rows `first`, `first` + 1, ... of the values.
  static void interleave_rows(const LatentShape& shape, const A* rows, int64_t count, int64_t first,
                              A* values) {
    const int64_t rank = rounded_up(shape.rank, kLanes);
    for (int64_t i = 0; i < count; i += 2)
      for (int64_t column = 0; column < rank; column += kPanelColumns) {
        const int64_t columns = smaller(rank - column, kPanelColumns);
        const A* from = rows + i * shape.width + column;
        const auto lanes = first_elements(shape.rank - column);
        const __m512i row = _mm512_maskz_loadu_epi16(lanes, from);
        const __m512i next =
            i + 1 < count ? _mm512_maskz_loadu_epi16(lanes, from + shape.width)
                          : _mm512_setzero_si512();
        A* to = values + column * kChunkTokens + (first + i) * columns;
        _mm512_storeu_si512(to, interleave(row, next, 0));
        if (columns == kPanelColumns) _mm512_storeu_si512(to + 32, interleave(row, next, 1));
      }
  }
  static __mmask32 first_elements(int64_t count) {
    return count >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint32_t{1} << count) - 1);
  }
};

#endif  // __AVX512BF16__

#else  // without vectors

template <typename C>
const C* cached_row(const LatentTile& tile, int64_t position) {
  const LatentShape& shape = *tile.shape;
  const int64_t block = tile.block_table[position / kBlockTokens];
  return static_cast<const C*>(tile.cache) + block * shape.block_stride +
         position % kBlockTokens * shape.width;
}

/// Adds positions [begin, end) to the sums of one row by online softmax, a chunk of kChunkTokens at
/// a time. `cached(position)` is the cached row.
template <typename Q, typename Cached>
void attend_row(const LatentTile& tile, int64_t row, int64_t begin, int64_t end,
                const Cached& cached, const AttentionState& state) {
  const LatentShape& shape = *tile.shape;
  const Q* query = static_cast<const Q*>(tile.query) + tile.query_offset(row);
  float* out = state.out + row * padded_head_dim(shape.rank);
  float max = state.max[row], sum = state.sum[row];
  for (int64_t first = begin; first < end; first += kChunkTokens) {
    const int64_t count = std::min(kChunkTokens, end - first);
    float weights[kChunkTokens];
    float new_max = max;
    for (int64_t i = 0; i < count; ++i) {
      const auto* key = cached(first + i);
      float score = 0;
      for (int64_t d = 0; d < shape.width; ++d) score += to_float(query[d]) * to_float(key[d]);
      weights[i] = score * shape.scale_log2e;
      new_max = std::max(new_max, weights[i]);
    }
    const float factor = std::exp2(max - new_max);
    max = new_max;
    sum *= factor;
    for (int64_t d = 0; d < shape.rank; ++d) out[d] *= factor;
    for (int64_t i = 0; i < count; ++i) {
      const auto* value = cached(first + i);
      const float weight = std::exp2(weights[i] - max);
      sum += weight;
      for (int64_t d = 0; d < shape.rank; ++d) out[d] += weight * to_float(value[d]);
    }
  }
  state.max[row] = max;
  state.sum[row] = sum;
}

template <typename Q, typename C>
void attend(const LatentTile& tile, const BlockRange& range, const AttentionState& state, float*) {
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    if (range.begins) {
      state.max[row] = -std::numeric_limits<float>::infinity();
      state.sum[row] = 0;
      std::fill_n(state.out + row * padded_head_dim(tile.shape->rank), tile.shape->rank, 0.0f);
    }
    int64_t end = range.end * kBlockTokens;
    if (tile.tokens == nullptr)
      end = std::min(end, tile.first_position + row / tile.num_heads + 1);
    attend_row<Q>(
        tile, row, range.first * kBlockTokens, end,
        [&](int64_t at) { return cached_row<C>(tile, at); }, state);
  }
}

template <typename Q, typename C>
void attend_rows(const LatentTile& tile, const void* const* rows, int64_t count,
                 const AttentionState& state, float*) {
  for (int64_t row = 0; row < tile.num_rows(); ++row)
    attend_row<Q>(
        tile, row, 0, count, [&](int64_t i) { return static_cast<const C*>(rows[i]); }, state);
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

template <typename Q, typename C>
constexpr LatentKernel kernel() {
  return {attend<Q, C>, attend_rows<Q, C>, store<Q>};
}

#endif  // __AVX2__

LatentKernel kernel_of(DType query, DType cache) {
#if defined(__AVX512BF16__)
  if (query == DType::kBFloat16 && cache == DType::kBFloat16)
    return kernel<Pairs, bf16>();
  return latent_kernel_avx512(query, cache);
#elif defined(__AVX2__)
  if (query == DType::kBFloat16) return kernel<Wide<bf16>, bf16>();
  if (query == DType::kFloat16) return kernel<Wide<fp16>, fp16>();
  if (cache == DType::kBFloat16) return kernel<Wide<bf16>, float>();
  if (cache == DType::kFloat16) return kernel<Wide<fp16>, float>();
  return kernel<Wide<float>, float>();
#else
  if (query == DType::kBFloat16) return kernel<bf16, bf16>();
  if (query == DType::kFloat16) return kernel<fp16, fp16>();
  if (cache == DType::kBFloat16) return kernel<float, bf16>();
  if (cache == DType::kFloat16) return kernel<float, fp16>();
  return kernel<float, float>();
#endif
}

}  // namespace

RAYMOE_DEFINE_KERNELS(LatentKernelOf, latent_kernel) = kernel_of;

}  // namespace raymoe
