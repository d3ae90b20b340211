// Decoding of panels on AVX512: sixteen elements at a time, 8 columns x 2 inputs, looked up in a
// table of sixteen numbers or widened through float16, scaled in float32 and rounded in pairs of
// vectors. Everything before the rounding is exact but the product with a float32 scale.
//
// Written for all files of AVX512; each has its own `rounded`, the bfloat16 nearest to two vectors.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "code_panels.h"

namespace raymoe {
namespace {

__m512i rounded(__m512 left, __m512 right);

constexpr int kVectors = 4;  // of 8 columns x 2 inputs
constexpr int64_t kPrefetchBytes = 1024;

/// What a group does to the numbers of its codes: number * factor + shift.
struct GroupScales {
  __m512 factor[kVectors];
  __m512 shift[kVectors];
};

inline __m128i load_128(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline __m256i load_256(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

/// Sixteen scales as float32; those of FP8 times 256, which its numbers lack (see `e4m3_numbers`).
template <CodeKind kKind>
inline __m512 load_scales(const uint8_t* p) {
  if constexpr (kKind == CodeKind::kInt4Float16) return _mm512_cvtph_ps(load_256(p));
  if constexpr (kKind == CodeKind::kInt4BFloat16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  if constexpr (kKind == CodeKind::kE2m1) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load_128(p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
  }
  return _mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(256.0f));
}

/// The two scales of a group that each 16 columns share, in every lane of their half.
template <CodeKind kKind>
inline __m512 load_shared_scale(const uint8_t* p) {
  alignas(64) uint8_t line[64] = {};
  std::memcpy(line, p, static_cast<size_t>(scale_bytes(kKind)));
  return _mm512_broadcastss_ps(_mm512_castps512_ps128(load_scales<kKind>(line)));
}

/// Columns 0 to 7, or 8 to 15, of sixteen: each in two neighbouring lanes.
inline __m512 doubled(__m512 columns, int upper) {
  const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8 * upper)), columns);
}

/// Zero points of 16 columns as float32; `half` 1 for the upper ones.
inline __m512 load_zeros(const uint8_t* p, int half) {
  const __m512i bytes = _mm512_cvtepu8_epi32(load_128(p));
  const __m512i codes =
      half == 0 ? _mm512_and_si512(bytes, _mm512_set1_epi32(15)) : _mm512_srli_epi32(bytes, 4);
  return _mm512_cvtepi32_ps(codes);
}

template <CodeKind kKind>
GroupScales load_group(const CodePanel& panel, int64_t group) {
  const int64_t item = scale_bytes(kKind);
  GroupScales scales;
  for (int half = 0; half < 2; ++half) {
    const bool is_shared = panel.format->shares_scales;
    const uint8_t* source =
        panel.scales + item * (is_shared ? 2 * group + half : kPanelColumns * group + 16 * half);
    const __m512 factor = is_shared ? load_shared_scale<kKind>(source) : load_scales<kKind>(source);
    const __m512 zero = panel.zeros == nullptr ? _mm512_set1_ps(kInt4Zero)
                                               : load_zeros(panel.zeros + group * kHalfPanel, half);
    const __m512 shift = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), zero), factor);
    for (int upper = 0; upper < 2; ++upper) {
      scales.factor[2 * half + upper] = doubled(factor, upper);
      scales.shift[2 * half + upper] = doubled(shift, upper);
    }
  }
  return scales;
}

/// The first inputs of pairs from one group, the second ones from another.
inline GroupScales merged(const GroupScales& first, const GroupScales& second) {
  GroupScales scales;
  for (int v = 0; v < kVectors; ++v) {
    scales.factor[v] = _mm512_mask_mov_ps(first.factor[v], 0xaaaa, second.factor[v]);
    scales.shift[v] = _mm512_mask_mov_ps(first.shift[v], 0xaaaa, second.shift[v]);
  }
  return scales;
}

/// E4M3 is float16 without its upper exponent bit and seven of its fraction: moved there, the
/// number over 256, subnormals included.
inline __m512i e4m3_halves(__m256i bytes) {
  const __m512i high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
  const __m512i magnitude = _mm512_and_si512(high, _mm512_set1_epi16(0x7f00));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f00));
  const __m512i half =
      _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16(int16_t(0xbfff)));
  return _mm512_mask_mov_epi16(half, is_nan, _mm512_set1_epi16(0x7e00));
}

template <CodeKind kKind>
inline __m512 number_table() {
  if constexpr (kKind == CodeKind::kE2m1)
    return _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
  return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

template <CodeKind kKind>
inline void load_numbers(const uint8_t* codes, __m512 (&numbers)[kVectors]) {
  for (int half = 0; half < 2; ++half) {
    if constexpr (kKind == CodeKind::kE4m3) {
      const __m512i halves = e4m3_halves(load_256(codes + 32 * half));
      numbers[2 * half] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
      numbers[2 * half + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    } else {
      // The permutation looks at four bits of its indices.
      const __m512i bytes = _mm512_cvtepu8_epi32(load_128(codes + 16 * half));
      const __m512 table = number_table<kKind>();
      numbers[2 * half] = _mm512_permutexvar_ps(bytes, table);
      numbers[2 * half + 1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    }
  }
}

template <CodeKind kKind>
inline __m512 scaled(__m512 number, const GroupScales& scales, int v) {
  constexpr bool kHasZero = kKind == CodeKind::kInt4Float16 || kKind == CodeKind::kInt4BFloat16;
  if constexpr (kHasZero) return _mm512_fmadd_ps(number, scales.factor[v], scales.shift[v]);
  return _mm512_mul_ps(number, scales.factor[v]);
}

template <CodeKind kKind>
inline void decode_pairs(const CodePanel& panel, const GroupScales& scales, int64_t begin,
                         int64_t end, bf16* out) {
  const int64_t bytes = pair_bytes(kKind);
  const uint8_t* codes = panel.codes + begin * bytes;
  for (int64_t pair = begin; pair < end; ++pair, codes += bytes, out += 2 * kPanelColumns) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes), _MM_HINT_T0);
    __m512 numbers[kVectors];
    load_numbers<kKind>(codes, numbers);
    for (int half = 0; half < 2; ++half) {
      const __m512 left = scaled<kKind>(numbers[2 * half], scales, 2 * half);
      const __m512 right = scaled<kKind>(numbers[2 * half + 1], scales, 2 * half + 1);
      _mm512_storeu_si512(out + 32 * half, rounded(left, right));
    }
  }
}

template <CodeKind kKind>
void decode(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  while (begin < end) {
    const int64_t group = group_of(panel, 2 * begin), second = group_of(panel, 2 * begin + 1);
    GroupScales scales = load_group<kKind>(panel, group);
    if (second != group) scales = merged(scales, load_group<kKind>(panel, second));
    const int64_t stop = end_of_groups(panel, begin, end);
    decode_pairs<kKind>(panel, scales, begin, stop, out);
    out += (stop - begin) * 2 * kPanelColumns;
    begin = stop;
  }
}

void decode_panel(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  switch (panel.format->kind) {
    case CodeKind::kInt4Float16:
      return decode<CodeKind::kInt4Float16>(panel, begin, end, out);
    case CodeKind::kInt4BFloat16:
      return decode<CodeKind::kInt4BFloat16>(panel, begin, end, out);
    case CodeKind::kE2m1:
      return decode<CodeKind::kE2m1>(panel, begin, end, out);
    case CodeKind::kE4m3:
      return decode<CodeKind::kE4m3>(panel, begin, end, out);
  }
}

}  // namespace
}  // namespace raymoe
