// The matrix product on AVX512-BF16: 14 rows x 32 columns of float32 sums in 28 registers, two
// vectors of weights and one broadcast pair of activations in the rest.
//
// vdpbf16ps reads and writes denormals as zero and rounds each pair's sum once or twice, so
// results differ from the scalar file by float32 rounding.
#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "gemm.h"

namespace raymoe {
namespace {

constexpr int64_t kPairBytes = kPanelColumns * 2 * sizeof(bf16);
constexpr int kUnroll = 4;

inline __m512bh load_weights(const char* p) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
}

inline __m512bh broadcast_pair(const char* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

/// Rows are addressed as base[row / 3] + (row % 3) * stride, which x86 computes for free: five
/// pointers for 14 rows instead of 14, so nothing spills.
template <int kRows>
struct RowPointers {
  static constexpr int kNumBases = (kRows + 2) / 3;
  const char* base[kNumBases];
  int64_t stride;

  RowPointers(const bf16* a, int64_t stride_bytes) : stride(stride_bytes) {
    for (int group = 0; group < kNumBases; ++group)
      base[group] = reinterpret_cast<const char*>(a) + 3 * group * stride;
  }
  const char* at(int row, int pair) const { return base[row / 3] + (row % 3) * stride + 4 * pair; }
  void advance(int pairs) {
#pragma GCC unroll 8
    for (int group = 0; group < kNumBases; ++group) {
      base[group] += 4 * pairs;
      asm("" : "+r"(base[group]));  // keeps the compiler from making a pointer of every row
    }
  }
};

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

void tile_avx512_bf16(int64_t rows, const GemmTile& tile) {
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

void store_avx512_bf16(int64_t rows, const StoreTile& tile) {
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

/// x / (1 + exp(-gain * x)) to about 13 bits: the result is rounded to 8 bits at once.
inline __m512 silu(__m512 x, float gain) {
  __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f * gain));
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

void gate_avx512_bf16(int64_t rows, const GateTile& tile) {
  const __m512 gate_bias = _mm512_loadu_ps(tile.bias), up_bias = _mm512_loadu_ps(tile.bias + 16);
  const __m512 limit = _mm512_set1_ps(tile.gating.limit);
  const __m512 least = _mm512_set1_ps(-tile.gating.limit);
  const __m512 offset = _mm512_set1_ps(tile.gating.offset);
  for (int64_t row = 0; row < rows; ++row) {
    const float* sums = tile.sums + row * kPanelColumns;
    // Operand order: min and max return their second operand when one is NaN.
    const __m512 gate = _mm512_min_ps(limit, _mm512_add_ps(_mm512_loadu_ps(sums), gate_bias));
    __m512 up = _mm512_min_ps(limit, _mm512_add_ps(_mm512_loadu_ps(sums + 16), up_bias));
    up = _mm512_add_ps(_mm512_max_ps(least, up), offset);
    const __m512 product = _mm512_mul_ps(silu(gate, tile.gating.gain), up);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile.out + row * tile.out_stride),
                        round_to_bf16(product));
  }
}

void scatter_avx512_bf16(int64_t rows, const ScatterTile& tile) {
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

}  // namespace

const GemmKernels& gemm_kernels_avx512_bf16() {
  static const GemmKernels kernels{tile_avx512_bf16, store_avx512_bf16, gate_avx512_bf16,
                                   scatter_avx512_bf16, decode_panel_avx512_bf16};
  return kernels;
}

}  // namespace raymoe
