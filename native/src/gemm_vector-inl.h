// The matrix product on vectors without bfloat16 dot products, written once on vec_f32.h.
//
// A pair of weights is a lane of 32 bits: shifted up it is the first weight in float32, without its
// lower half the second. Activations are widened once for all the columns of a chunk of inputs,
// into a buffer that stays in L1. Sums run over the inputs in the order of gemm_scalar.cpp, each
// product fused with its addition: results differ from the scalar file by float32 rounding.
#pragma once

#include <array>
#include <utility>

#include "gemm.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

constexpr int kSideBySide = 2;  // vectors of columns
// Rows whose sums stay in registers: 14 x 2 of 32, or 6 x 2 of 16.
constexpr int kRegisterRows = kLanes == 16 ? 14 : 6;
constexpr int64_t kChunkPairs = 128;
// Of a widened row, first inputs before second ones: with a line more than the chunk, rows fall
// into different sets of the cache.
constexpr int64_t kWideStride = 2 * kChunkPairs + 16;
constexpr int64_t kPairBytes = kPanelColumns * 2 * sizeof(bf16);

/// sum += a * b, fused. Left to itself GCC sums into the register of `a`, and spills.
inline void add_product(F32& sum, F32 a, F32 b) {
#if defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#endif
}

inline I32 load_pairs(const char* p) { return load(reinterpret_cast<const int32_t*>(p), Whole{}); }
inline F32 first_of(I32 pairs) { return from_bits(shift_left<16>(pairs)); }
inline F32 second_of(I32 pairs) {
  return from_bits(bit_and(pairs, splat(static_cast<int32_t>(0xffff0000u))));
}

/// Some rows of a chunk of inputs times two vectors of columns.
struct Chunk {
  const float* wide;    // [rows][kWideStride]
  const char* weights;  // of the first pair, at the first of the columns
  int64_t num_pairs;
  float* sums;  // at the first of the columns
  bool accumulate;
  const char* prefetch;
  int64_t lines_per_4_pairs;
};

template <int kRows>
inline __attribute__((always_inline)) void multiply_pair(F32 (&sums)[kRows][kSideBySide],
                                                         const float* wide, const char* weights) {
  constexpr int64_t kVectorBytes = 4 * kLanes;
  F32 left = second_of(load_pairs(weights)), right = second_of(load_pairs(weights + kVectorBytes));
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const F32 x = splat(wide[row * kWideStride + kChunkPairs]);
    add_product(sums[row][0], x, left);
    add_product(sums[row][1], x, right);
  }
  left = first_of(load_pairs(weights)), right = first_of(load_pairs(weights + kVectorBytes));
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const F32 x = splat(wide[row * kWideStride]);
    add_product(sums[row][0], x, left);
    add_product(sums[row][1], x, right);
  }
}

template <int kRows>
void multiply_chunk(Chunk chunk) {
  F32 sums[kRows][kSideBySide];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kSideBySide; ++v) {
      const float* start = chunk.sums + row * kPanelColumns + v * kLanes;
      sums[row][v] = chunk.accumulate ? load(start, Whole{}) : splat(0.0f);
    }
  for (int64_t pair = 0; pair < chunk.num_pairs; ++pair) {
    if (pair % 4 == 0)
      for (int64_t line = 0; line < chunk.lines_per_4_pairs; ++line, chunk.prefetch += 64)
        _mm_prefetch(chunk.prefetch, _MM_HINT_T1);
    multiply_pair<kRows>(sums, chunk.wide + pair, chunk.weights + pair * kPairBytes);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kSideBySide; ++v)
      store(chunk.sums + row * kPanelColumns + v * kLanes, sums[row][v], Whole{});
}

using MultiplyChunk = void (*)(Chunk);

template <int... kRows>
constexpr std::array<MultiplyChunk, kRegisterRows> chunk_table(
    std::integer_sequence<int, kRows...>) {
  return {multiply_chunk<kRows + 1>...};
}

/// All rows and columns of a chunk of inputs; returns where the prefetch has come.
inline const char* multiply_columns(int64_t rows, const float* wide, Chunk chunk) {
  static constexpr auto kTable = chunk_table(std::make_integer_sequence<int, kRegisterRows>());
  const char* const weights = chunk.weights;
  float* const sums = chunk.sums;
  const int64_t num_groups = ceil_div(rows, kRegisterRows);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = group * rows / num_groups;
    const int64_t count = (group + 1) * rows / num_groups - first;
    for (int64_t column = 0; column < kPanelColumns; column += kSideBySide * kLanes) {
      chunk.wide = wide + first * kWideStride;
      chunk.weights = weights + column * 2 * static_cast<int64_t>(sizeof(bf16));
      chunk.sums = sums + first * kPanelColumns + column;
      kTable[static_cast<size_t>(count - 1)](chunk);
      if (group == 0 && column == 0) {
        chunk.prefetch += 64 * chunk.lines_per_4_pairs * ceil_div(chunk.num_pairs, 4);
        chunk.lines_per_4_pairs = 0;  // once is enough
      }
    }
  }
  return chunk.prefetch;
}

inline void widen_row(const bf16* row, int64_t num_pairs, float* wide) {
  const char* pairs = reinterpret_cast<const char*>(row);
  int64_t pair = 0;
  for (; pair + kLanes <= num_pairs; pair += kLanes) {
    const I32 both = load_pairs(pairs + 4 * pair);
    store(wide + pair, first_of(both), Whole{});
    store(wide + kChunkPairs + pair, second_of(both), Whole{});
  }
  for (; pair < num_pairs; ++pair) {
    wide[pair] = to_float(row[2 * pair]);
    wide[kChunkPairs + pair] = to_float(row[2 * pair + 1]);
  }
}

void tile_vector(int64_t rows, const GemmTile& tile) {
  alignas(64) float wide[kTileRows * kWideStride];
  const char* prefetch = reinterpret_cast<const char*>(tile.prefetch);
  for (int64_t pair = 0; pair < tile.num_pairs; pair += kChunkPairs) {
    const int64_t count = std::min(kChunkPairs, tile.num_pairs - pair);
    for (int64_t row = 0; row < rows; ++row)
      widen_row(tile.a + row * tile.a_stride + 2 * pair, count, wide + row * kWideStride);
    const char* weights = reinterpret_cast<const char*>(tile.panel) + pair * kPairBytes;
    const bool accumulate = tile.accumulate || pair > 0;
    const Chunk chunk{nullptr, weights, count, tile.sums, accumulate, prefetch,
                      tile.lines_per_4_pairs};
    prefetch = multiply_columns(rows, wide, chunk);
  }
}

void store_vector(int64_t rows, const StoreTile& tile) {
  for (int64_t row = 0; row < rows; ++row)
    for_lanes(tile.columns, [&](int64_t i, auto part) {
      F32 sum = load(tile.sums + row * kPanelColumns + i, part);
      if (tile.bias != nullptr) sum = add(sum, load(tile.bias + i, part));
      if (tile.wide != nullptr)
        store(tile.wide + row * tile.out_stride + i, sum, part);
      else
        store(tile.out + row * tile.out_stride + i, sum, part);
    });
}

void gate_vector(int64_t rows, const GateTile& tile) {
  const F32 limit = splat(tile.gating.limit), least = splat(-tile.gating.limit);
  const F32 offset = splat(tile.gating.offset), gain = splat(-tile.gating.gain);
  for (int64_t row = 0; row < rows; ++row)
    for_lanes(kHalfPanel, [&](int64_t i, auto part) {
      const float* sums = tile.sums + row * kPanelColumns + i;
      // Operand order: min and max return their second operand when one is NaN.
      const F32 gate = min(limit, add(load(sums, part), load(tile.bias + i, part)));
      const F32 up =
          min(limit, add(load(sums + kHalfPanel, part), load(tile.bias + kHalfPanel + i, part)));
      const F32 silu = div(gate, add(splat(1.0f), exp_of(mul(gain, gate))));
      store(tile.out + row * tile.out_stride + i, mul(silu, add(max(least, up), offset)), part);
    });
}

void scatter_vector(int64_t rows, const ScatterTile& tile) {
  for (int64_t row = 0; row < rows; ++row) {
    float* accumulator = tile.accumulator + tile.tokens[row] * kPanelColumns;
    const F32 weight = splat(tile.weights[row]);
    for_lanes(kPanelColumns, [&](int64_t i, auto part) {
      const F32 sum =
          add(load(tile.sums + row * kPanelColumns + i, part), load(tile.bias + i, part));
      F32 total = load(accumulator + i, part);
      add_product(total, weight, sum);
      store(accumulator + i, total, part);
    });
  }
}

GemmKernels vector_kernels(decltype(GemmKernels::decode) decode) {
  return {tile_vector, store_vector, gate_vector, scatter_vector, decode};
}

}  // namespace
}  // namespace raymoe
