// The attention kernel of the vector instruction sets, over the `Vector` of this file's flags.
//
// A tile is worked off in steps of 4 blocks (128 positions) and, within a step, in groups of rows
// that fit the registers: scores = Q K^T, online softmax, out += P V. Both products are the same
// small matrix product, because a block of keys and a block of values are both packed matrices.
//
// A row's arithmetic never depends on its group: positions that only other rows see score -inf,
// get weight 0 and add 0.
#pragma once

#include "attention_vector-inl.h"
#include "raymoe/attention.h"

namespace raymoe {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/// Products of float32 operands: cache elements are widened.
template <typename Cache>
struct WideDot {
  using C = Cache;
  using A = float;

  static void store_weights(A* to, Vector::Reg x) { Vector::store(to, x); }

  /// acc += one row of pairs of the cache times the matching pair of each row of `a`.
  template <int kRows, int kCols>
  static inline void step(Vector::Reg (&acc)[kRows][kCols], const A* a, int64_t a_stride,
                          const C* b, bool half) {
    constexpr int pair = static_cast<int>(kPair<C>);
    Vector::Reg wide[kCols][pair];
    for (int j = 0; j < kCols; ++j) Vector::widen(b + j * Vector::kLanes * pair, half, wide[j]);
    for (int i = 0; i < kRows; ++i)
      for (int p = 0; p < pair; ++p) {
        const Vector::Reg x = Vector::set1(a[i * a_stride + p]);
        for (int j = 0; j < kCols; ++j) acc[i][j] = Vector::fma(x, wide[j][p], acc[i][j]);
      }
  }
};

/// out[rows][cols] = scale * out + a * (the blocks below one another).
template <typename Dot>
struct Product {
  const typename Dot::A* a;  // [rows][num_blocks * depth * pair]
  int64_t a_stride;
  const typename Dot::C* const* blocks;  // each [depth][b_stride]
  int64_t num_blocks;
  int64_t depth;  // rows of pairs in a block
  int64_t b_stride;
  float* out;
  int64_t out_stride;
  const float* scale;           // [rows]; null overwrites out
  const char* const* prefetch;  // one address for each block
  int64_t prefetch_step;        // bytes for each vector read; 0 if there is nothing to prefetch
};

/// Columns [column, column + kCols vectors) for kRows rows. Not inlined: constants that the
/// compiler keeps in registers across it would make the accumulators spill (30 % slower).
template <typename Dot, int kRows, int kCols>
__attribute__((noinline)) void multiply_columns(const Product<Dot>& product, int64_t column,
                                                bool half) {
  constexpr int64_t pair = kPair<typename Dot::C>;
  Vector::Reg acc[kRows][kCols];
  float* out = product.out + column;
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j)
      acc[i][j] =
          product.scale == nullptr
              ? Vector::zero()
              : Vector::mul(Vector::set1(product.scale[i]),
                            Vector::load(out + i * product.out_stride + j * Vector::kLanes));
  const typename Dot::A* a = product.a;
  for (int64_t block = 0; block < product.num_blocks; ++block) {
    const typename Dot::C* b = product.blocks[block] + column * pair;
    // To the second-level cache: what lies ahead is as large as the first.
    const char* ahead =
        product.prefetch[block] + column / Vector::kLanes * product.depth * product.prefetch_step;
    for (int64_t k = 0; k < product.depth; ++k, a += pair, b += product.b_stride) {
      for (int j = 0; j < kCols; ++j, ahead += product.prefetch_step)
        _mm_prefetch(ahead, _MM_HINT_T1);
      Dot::step(acc, a, product.a_stride, b, half);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j)
      Vector::store(out + i * product.out_stride + j * Vector::kLanes, acc[i][j]);
}

template <typename Dot, int kRows>
void multiply(const Product<Dot>& product, int64_t num_columns) {
  constexpr int64_t lanes = Vector::kLanes;
  constexpr int cols = kRows <= Vector::kFewRows ? Vector::kManyColumns : Vector::kColumns;
  int64_t column = 0;
  for (; column + cols * lanes <= num_columns; column += cols * lanes)
    multiply_columns<Dot, kRows, cols>(product, column, false);
  for (; column + 2 * lanes <= num_columns; column += 2 * lanes)
    multiply_columns<Dot, kRows, 2>(product, column, false);
  for (; column + lanes <= num_columns; column += lanes)
    multiply_columns<Dot, kRows, 1>(product, column, false);
  if (column < num_columns) multiply_columns<Dot, kRows, 1>(product, column, true);
}

/// Tile, split and buffers of one call.
template <typename Dot>
struct Pass {
  const AttentionTile& tile;
  const AttentionState& state;
  typename Dot::A* query;  // [rows][head_dim]
  float* sums;             // [rows][kLanes]: the sum of a row, one part for each lane
};

/// Up to 4 consecutive blocks of one step.
template <typename Dot>
struct Step {
  const typename Dot::C* keys[kStepBlocks];
  const typename Dot::C* values[kStepBlocks];
  const char* ahead_of_keys[kStepBlocks];    // the values of this step
  const char* ahead_of_values[kStepBlocks];  // the keys of the next step or tile
  int64_t first_block;
  int64_t num_blocks;
  int64_t prefetch_step;
};

/// Weights of one row from its scores; returns the factor of everything summed before.
template <typename Dot>
inline float softmax_row(const float* scores, int64_t count, float scale, float* max, float* sums,
                         typename Dot::A* weights) {
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
    const Vector::Reg weight =
        Vector::exp2(Vector::fms(Vector::load(scores + i), scales, references));
    sum = Vector::add(sum, weight);
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

/// One step for rows [row, row + kRows).
template <typename Dot, int kRows>
void attend_rows(const Pass<Dot>& pass, const Step<Dot>& step, int64_t row) {
  constexpr int64_t pair = kPair<typename Dot::C>;
  const AttentionTile& tile = pass.tile;
  const AttentionShape& shape = *tile.shape;
  const int64_t first_token = tile.first_position + row / shape.group;
  const int64_t last_token = tile.first_position + (row + kRows - 1) / shape.group;
  const int64_t visible = larger(first_token - shape.window + 1, 0);
  const int64_t begin = larger(visible / kBlockTokens - step.first_block, 0);
  const int64_t end = smaller(last_token / kBlockTokens - step.first_block + 1, step.num_blocks);
  if (begin >= end) return;
  const int64_t count = (end - begin) * kBlockTokens;
  alignas(64) float scores[kRows * kStepTokens];
  alignas(64) typename Dot::A weights[kRows * kStepTokens];
  for (int64_t block = begin; block < end; ++block)
    multiply<Dot, kRows>(
        {pass.query + row * shape.head_dim, shape.head_dim, step.keys + block, 1,
         shape.head_dim / pair, kBlockTokens * pair, scores + (block - begin) * kBlockTokens,
         kStepTokens, nullptr, step.ahead_of_keys + block, step.prefetch_step},
        kBlockTokens);
  float factors[kRows];
  const int64_t origin = (step.first_block + begin) * kBlockTokens;
  for (int i = 0; i < kRows; ++i) {
    const int64_t position = tile.first_position + (row + i) / shape.group;
    const int64_t first = larger(position - shape.window + 1, 0) - origin;
    const int64_t last = position - origin;
    if (first > 0 || last < count - 1) mask_row(scores + i * kStepTokens, count, first, last);
    factors[i] = softmax_row<Dot>(scores + i * kStepTokens, count, shape.scale_log2e,
                                  pass.state.max + row + i, pass.sums + (row + i) * Vector::kLanes,
                                  weights + i * kStepTokens);
  }
  const int64_t padded = padded_head_dim(shape.head_dim);
  multiply<Dot, kRows>({weights, kStepTokens, step.values + begin, end - begin, kBlockTokens / pair,
                        shape.head_dim * pair, pass.state.out + row * padded, padded, factors,
                        step.ahead_of_values + begin, step.prefetch_step},
                       shape.head_dim);
}

template <typename Dot>
void attend_some_rows(const Pass<Dot>& pass, const Step<Dot>& step, int64_t row, int64_t count) {
  if constexpr (Vector::kMaxRows > 4) {
    switch (count) {
      case 8:
        return attend_rows<Dot, 8>(pass, step, row);
      case 7:
        return attend_rows<Dot, 7>(pass, step, row);
      case 6:
        return attend_rows<Dot, 6>(pass, step, row);
      case 5:
        return attend_rows<Dot, 5>(pass, step, row);
      default:
        break;
    }
  }
  switch (count) {
    case 4:
      return attend_rows<Dot, 4>(pass, step, row);
    case 3:
      return attend_rows<Dot, 3>(pass, step, row);
    case 2:
      return attend_rows<Dot, 2>(pass, step, row);
    default:
      return attend_rows<Dot, 1>(pass, step, row);
  }
}

/// The blocks [first, end) of a step; the tile goes on to block `last`. What is multiplied next is
/// prefetched while something else is multiplied: cores do not read DRAM ahead across blocks.
template <typename Dot>
Step<Dot> make_step(const AttentionTile& tile, int64_t first, int64_t end, int64_t last) {
  using C = typename Dot::C;
  const AttentionShape& shape = *tile.shape;
  const auto keys_of = [&](int64_t block) {
    return static_cast<const C*>(tile.cache) + tile.block_table[block] * shape.block_stride;
  };
  Step<Dot> step;
  step.first_block = first;
  step.num_blocks = end - first;
  step.prefetch_step = Vector::kLanes * kPair<C> * static_cast<int64_t>(sizeof(C));
  for (int64_t i = 0; i < step.num_blocks; ++i) {
    step.keys[i] = keys_of(first + i);
    step.values[i] = step.keys[i] + shape.head_stride / 2;
    step.ahead_of_keys[i] = reinterpret_cast<const char*>(step.values[i]);
    const void* next = end + i < last ? keys_of(end + i) : tile.next_keys[i];
    step.ahead_of_values[i] = static_cast<const char*>(next);
  }
  return step;
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

template <typename Dot, typename Q>
void start(const Pass<Dot>& pass) {
  const AttentionShape& shape = *pass.tile.shape;
  const int64_t width = shape.group * shape.head_dim;
  for (int64_t token = 0; token < pass.tile.num_tokens; ++token)
    pack_row(static_cast<const Q*>(pass.tile.query) + token * shape.query_stride, width,
             pass.query + token * width);
  const int64_t rows = pass.tile.num_rows();
  const int64_t out_size = rows * padded_head_dim(shape.head_dim);
  for (int64_t i = 0; i < rows; ++i) pass.state.max[i] = -__builtin_inff();
  for (int64_t i = 0; i < rows * Vector::kLanes; ++i) pass.sums[i] = 0;
  for (int64_t i = 0; i < out_size; ++i) pass.state.out[i] = 0;
}

template <typename Dot, typename Q>
void attend(const AttentionTile& tile, int64_t split, const AttentionState& state, float* scratch) {
  const int64_t rows = tile.num_rows();
  const Pass<Dot> pass{
      tile, state, reinterpret_cast<typename Dot::A*>(scratch + rows * Vector::kLanes), scratch};
  start<Dot, Q>(pass);
  constexpr int64_t split_blocks = kSplitTokens / kBlockTokens;
  const int64_t last = smaller(tile.last_position() / kBlockTokens + 1, (split + 1) * split_blocks);
  int64_t block = larger(tile.first_visible() / kBlockTokens, split * split_blocks);
  while (block < last) {
    const int64_t end = smaller(last, (block / kStepBlocks + 1) * kStepBlocks);
    Step<Dot> step = make_step<Dot>(tile, block, end, last);
    for (int64_t row = 0; row < rows; row += Vector::kMaxRows) {
      attend_some_rows(pass, step, row, smaller(rows - row, Vector::kMaxRows));
      step.prefetch_step = 0;
    }
    block = end;
  }
  for (int64_t row = 0; row < rows; ++row)
    state.sum[row] = Vector::reduce_add(Vector::load(pass.sums + row * Vector::kLanes));
}

template <typename Q>
void store(const AttentionTile& tile, const AttentionState& state) {
  const AttentionShape& shape = *tile.shape;
  const int64_t dim = shape.head_dim;
  for (int64_t row = 0; row < tile.num_rows(); ++row) {
    const float* from = state.out + row * padded_head_dim(dim);
    Q* to =
        static_cast<Q*>(tile.out) + row / shape.group * shape.out_stride + row % shape.group * dim;
    const __m256 factor = _mm256_set1_ps(1.0f / state.sum[row]);
    for (int64_t d = 0; d < dim; d += 8) store8(to + d, _mm256_mul_ps(load8(from + d), factor));
  }
}

inline AttentionKernel wide_kernel(DType query, DType cache) {
  if (query == DType::kBFloat16) return {attend<WideDot<bf16>, bf16>, store<bf16>};
  if (query == DType::kFloat16) return {attend<WideDot<fp16>, fp16>, store<fp16>};
  if (cache == DType::kBFloat16) return {attend<WideDot<bf16>, float>, store<float>};
  if (cache == DType::kFloat16) return {attend<WideDot<fp16>, float>, store<float>};
  return {attend<WideDot<float>, float>, store<float>};
}

}  // namespace
}  // namespace raymoe
