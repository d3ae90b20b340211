// The kernels of the matrix products: without vectors, the readable reference; on vectors of
// float32, written once on vec_f32.h; and with the dot products of AVX512-BF16.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "gemm.h"
#if defined(__AVX512BF16__)
#include "bf16_rows.h"
#elif defined(__AVX2__)
#include "vec_f32.h"
#endif

namespace raymoe {
namespace {

#if defined(__AVX512BF16__)

// 14 rows x 32 columns of float32 sums in 28 registers, two vectors of weights and one broadcast
// pair of activations in the rest. vdpbf16ps reads and writes denormals as zero and rounds each
// pair's sum once or twice, so results differ from the scalar kernel by float32 rounding.

constexpr int64_t kPairBytes = kPanelColumns * 2 * sizeof(bf16);
constexpr int kUnroll = 4;

inline __m512bh load_weights(const char* p) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
}

template <int kRows>
inline __attribute__((always_inline)) void multiply_pair(__m512 (&sums)[kRows][2],
                                                         const RowPointers<kRows>& rows,
                                                         const char* weights, int pair) {
  const __m512bh left = load_weights(weights + pair * kPairBytes);
  const __m512bh right = load_weights(weights + pair * kPairBytes + 64);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const __m512bh activation = broadcast_pair(rows.at(row, pair));
    sums[row][0] = _mm512_dpbf16_ps(sums[row][0], activation, left);
    sums[row][1] = _mm512_dpbf16_ps(sums[row][1], activation, right);
  }
}

template <int kRows>
void tile_rows(const GemmTile& tile) {
  RowPointers<kRows> rows(tile.a, tile.a_stride * static_cast<int64_t>(sizeof(bf16)));
  const char* weights = reinterpret_cast<const char*>(tile.panel);
  const char* prefetch = reinterpret_cast<const char*>(tile.prefetch);
  __m512 sums[kRows][2];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const float* start = tile.sums + row * kPanelColumns;
    sums[row][0] = tile.accumulate ? _mm512_loadu_ps(start) : _mm512_setzero_ps();
    sums[row][1] = tile.accumulate ? _mm512_loadu_ps(start + 16) : _mm512_setzero_ps();
  }
  int64_t pairs = tile.num_pairs;
  for (; pairs >= kUnroll; pairs -= kUnroll) {
    for (int64_t line = 0; line < tile.lines_per_4_pairs; ++line, prefetch += 64)
      _mm_prefetch(prefetch, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int pair = 0; pair < kUnroll; ++pair) multiply_pair<kRows>(sums, rows, weights, pair);
    weights += kUnroll * kPairBytes;
    rows.advance(kUnroll);
  }
  for (; pairs > 0; --pairs) {
    multiply_pair<kRows>(sums, rows, weights, 0);
    weights += kPairBytes;
    rows.advance(1);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    _mm512_storeu_ps(tile.sums + row * kPanelColumns, sums[row][0]);
    _mm512_storeu_ps(tile.sums + row * kPanelColumns + 16, sums[row][1]);
  }
}

using TileRows = void (*)(const GemmTile&);

template <int... kRows>
constexpr std::array<TileRows, kTileRows> tile_table(std::integer_sequence<int, kRows...>) {
  return {tile_rows<kRows + 1>...};
}

void multiply_tile(int64_t rows, const GemmTile& tile) {
  static constexpr auto kTable = tile_table(std::make_integer_sequence<int, kTileRows>());
  kTable[static_cast<size_t>(rows - 1)](tile);
}

inline __m256i round_to_bf16(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline __mmask16 first_columns(int64_t columns) {
  return static_cast<__mmask16>(columns >= 16 ? 0xffff : columns <= 0 ? 0 : (1 << columns) - 1);
}

inline __m512 load_bias(const bf16* bias, int64_t first, __mmask16 mask) {
  if (bias == nullptr) return _mm512_setzero_ps();
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias + first));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

void store_tile(int64_t rows, const StoreTile& tile) {
  const __mmask16 left = first_columns(tile.columns), right = first_columns(tile.columns - 16);
  const __m512 left_bias = load_bias(tile.bias, 0, left);
  const __m512 right_bias = load_bias(tile.bias, 16, right);
  for (int64_t row = 0; row < rows; ++row) {
    const float* sums = tile.sums + row * kPanelColumns;
    const __m512 first = _mm512_add_ps(_mm512_loadu_ps(sums), left_bias);
    const __m512 second = _mm512_add_ps(_mm512_loadu_ps(sums + 16), right_bias);
    if (tile.wide != nullptr) {
      float* wide = tile.wide + row * tile.out_stride;
      _mm512_mask_storeu_ps(wide, left, first);
      if (right != 0) _mm512_mask_storeu_ps(wide + 16, right, second);
    } else {
      bf16* out = tile.out + row * tile.out_stride;
      _mm256_mask_storeu_epi16(out, left, round_to_bf16(first));
      if (right != 0) _mm256_mask_storeu_epi16(out + 16, right, round_to_bf16(second));
    }
  }
}

/// x * sigmoid(gain * x * (1 + cubic * x^2)) to about 13 bits: the result is rounded to 8 bits at
/// once.
inline __m512 activate(__m512 x, const Gating& gating) {
  __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f * gating.gain));
  if (gating.cubic != 0.0f) {
    const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(gating.cubic));
    power = _mm512_mul_ps(power, _mm512_fmadd_ps(scaled, x, _mm512_set1_ps(1.0f)));
  }
  // Operand order: max and min return their second operand when one is NaN.
  power = _mm512_max_ps(_mm512_set1_ps(-126.0f), power);
  power = _mm512_min_ps(_mm512_set1_ps(126.0f), power);
  const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(power, whole);
  // 2^part on [-1/2, 1/2], relative error below 3e-6.
  __m512 exp = _mm512_fmadd_ps(part, _mm512_set1_ps(0.00958284f), _mm512_set1_ps(0.05590644f));
  exp = _mm512_fmadd_ps(part, exp, _mm512_set1_ps(0.24024099f));
  exp = _mm512_fmadd_ps(part, exp, _mm512_set1_ps(0.69312419f));
  exp = _mm512_fmadd_ps(part, exp, _mm512_set1_ps(1.0f));
  const __m512 denominator = _mm512_add_ps(_mm512_scalef_ps(exp, whole), _mm512_set1_ps(1.0f));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(denominator));
}

void gate_tile(int64_t rows, const GateTile& tile) {
  const __m512 gate_bias = _mm512_loadu_ps(tile.bias), up_bias = _mm512_loadu_ps(tile.bias + 16);
  const __m512 limit = _mm512_set1_ps(tile.gating.limit);
  const __m512 gate_limit = _mm512_set1_ps(tile.gating.gate_limit);
  const __m512 minimum = _mm512_set1_ps(-tile.gating.limit);
  const __m512 offset = _mm512_set1_ps(tile.gating.offset);
  for (int64_t row = 0; row < rows; ++row) {
    const float* sums = tile.sums + row * kPanelColumns;
    // Operand order: min and max return their second operand when one is NaN.
    const __m512 gate = _mm512_min_ps(gate_limit, _mm512_add_ps(_mm512_loadu_ps(sums), gate_bias));
    __m512 up = _mm512_min_ps(limit, _mm512_add_ps(_mm512_loadu_ps(sums + 16), up_bias));
    up = _mm512_add_ps(_mm512_max_ps(minimum, up), offset);
    const __m512 product = _mm512_mul_ps(activate(gate, tile.gating), up);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile.out + row * tile.out_stride),
                        round_to_bf16(product));
  }
}

void scatter_tile(int64_t rows, const ScatterTile& tile) {
  const __m512 left_bias = _mm512_loadu_ps(tile.bias);
  const __m512 right_bias = _mm512_loadu_ps(tile.bias + 16);
  for (int64_t row = 0; row < rows; ++row) {
    const __m512 left = _mm512_add_ps(_mm512_loadu_ps(tile.sums + row * kPanelColumns), left_bias);
    const __m512 right =
        _mm512_add_ps(_mm512_loadu_ps(tile.sums + row * kPanelColumns + 16), right_bias);
    float* sum = tile.accumulator + tile.tokens[row] * kPanelColumns;
    const __m512 weight = _mm512_set1_ps(tile.weights[row]);
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(weight, left, _mm512_loadu_ps(sum)));
    _mm512_storeu_ps(sum + 16, _mm512_fmadd_ps(weight, right, _mm512_loadu_ps(sum + 16)));
  }
}

#elif defined(__AVX2__)

// A pair of weights is a lane of 32 bits: shifted up it is the first weight in float32, without its
// lower half the second. Activations are widened once for all the columns of a chunk of inputs,
// into a buffer that stays in L1. Sums run over the inputs in the order of the scalar kernel, each
// product fused with its addition: results differ from it by float32 rounding.

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

void multiply_tile(int64_t rows, const GemmTile& tile) {
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

void store_tile(int64_t rows, const StoreTile& tile) {
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

void gate_tile(int64_t rows, const GateTile& tile) {
  const F32 limit = splat(tile.gating.limit), minimum = splat(-tile.gating.limit);
  const F32 gate_limit = splat(tile.gating.gate_limit);
  const F32 offset = splat(tile.gating.offset), gain = splat(-tile.gating.gain);
  const F32 cubic = splat(tile.gating.cubic), one = splat(1.0f);
  for (int64_t row = 0; row < rows; ++row)
    for_lanes(kHalfPanel, [&](int64_t i, auto part) {
      const float* sums = tile.sums + row * kPanelColumns + i;
      // Operand order: min and max return their second operand when one is NaN.
      const F32 gate = min(gate_limit, add(load(sums, part), load(tile.bias + i, part)));
      const F32 up =
          min(limit, add(load(sums + kHalfPanel, part), load(tile.bias + kHalfPanel + i, part)));
      F32 power = mul(gain, gate);
      if (tile.gating.cubic != 0.0f) power = mul(power, add(one, mul(cubic, mul(gate, gate))));
      const F32 active = div(gate, add(one, exp_of(power)));
      store(tile.out + row * tile.out_stride + i, mul(active, add(max(minimum, up), offset)), part);
    });
}

void scatter_tile(int64_t rows, const ScatterTile& tile) {
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

#else  // without vectors

void multiply_tile(int64_t rows, const GemmTile& tile) {
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* a = tile.a + row * tile.a_stride;
    float* sums = tile.sums + row * kPanelColumns;
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      float sum = tile.accumulate ? sums[column] : 0.0f;
      for (int64_t pair = 0; pair < tile.num_pairs; ++pair) {
        const bf16* b = tile.panel + (pair * kPanelColumns + column) * 2;
        sum += to_float(a[2 * pair + 1]) * to_float(b[1]);
        sum += to_float(a[2 * pair]) * to_float(b[0]);
      }
      sums[column] = sum;
    }
  }
}

void store_tile(int64_t rows, const StoreTile& tile) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < tile.columns; ++column) {
      const float bias = tile.bias == nullptr ? 0.0f : to_float(tile.bias[column]);
      const float sum = tile.sums[row * kPanelColumns + column] + bias;
      if (tile.wide != nullptr)
        tile.wide[row * tile.out_stride + column] = sum;
      else
        tile.out[row * tile.out_stride + column] = from_float<bf16>(sum);
    }
}

void gate_tile(int64_t rows, const GateTile& tile) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < kPanelColumns / 2; ++column) {
      const int64_t other = column + kPanelColumns / 2;
      const float* sums = tile.sums + row * kPanelColumns;
      const Gating& gating = tile.gating;
      // Operand order: std::min and std::max return their first operand when one is NaN.
      const float gate = std::min(sums[column] + tile.bias[column], gating.gate_limit);
      const float up = std::min(sums[other] + tile.bias[other], gating.limit);
      const float shape = gating.cubic != 0.0f ? 1.0f + gating.cubic * gate * gate : 1.0f;
      tile.out[row * tile.out_stride + column] =
          from_float<bf16>(gate / (1.0f + std::exp(-gating.gain * gate * shape)) *
                           (std::max(up, -gating.limit) + gating.offset));
    }
}

void scatter_tile(int64_t rows, const ScatterTile& tile) {
  for (int64_t row = 0; row < rows; ++row) {
    float* accumulator = tile.accumulator + tile.tokens[row] * kPanelColumns;
    for (int64_t column = 0; column < kPanelColumns; ++column)
      accumulator[column] +=
          tile.weights[row] * (tile.sums[row * kPanelColumns + column] + tile.bias[column]);
  }
}

#endif  // __AVX512BF16__

}  // namespace

RAYMOE_DEFINE_KERNELS(GemmKernels, gemm_kernels) = {multiply_tile, store_tile, gate_tile,
                                                   scatter_tile};

}  // namespace raymoe
