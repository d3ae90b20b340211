// What codes, scales and zero points of a panel are. Included only by kernel files of one
// instruction set each; everything here has internal linkage.
#pragma once

#include <cmath>
#include <cstring>

#include "panels.h"
#if defined(__AVX2__)
#include "vec_f32.h"
#endif

namespace raymoe {
namespace {

#if defined(__AVX512F__)

inline __m128i load_128(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline __m256i load_256(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
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

inline __m512 powers_of_two(__m128i exponents) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(exponents), 23);
  return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
}

/// Sixteen scales as float32.
template <CodeKind kKind>
inline __m512 load_scales(const uint8_t* p) {
  if constexpr (kKind == CodeKind::kInt4Float16) return _mm512_cvtph_ps(load_256(p));
  if constexpr (kKind == CodeKind::kInt4BFloat16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  if constexpr (kKind == CodeKind::kE2m1 || kKind == CodeKind::kE4m3E8m0)
    return powers_of_two(load_128(p));
  if constexpr (kKind == CodeKind::kE4m3) return _mm512_loadu_ps(p);
  const __m512i halves = e4m3_halves(_mm256_castsi128_si256(load_128(p)));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_set1_ps(256.0f));
}

/// Scales of 16 columns times their multiplier over their divisor, one of which is 1.
inline __m512 with_factors(__m512 scales, const uint8_t* factors) {
  float multiplier, divisor;
  std::memcpy(&multiplier, factors, sizeof multiplier);
  std::memcpy(&divisor, factors + sizeof multiplier, sizeof divisor);
  return _mm512_div_ps(_mm512_mul_ps(scales, _mm512_set1_ps(multiplier)), _mm512_set1_ps(divisor));
}

/// The two scales of a group that each 16 columns share, in every lane of their half.
template <CodeKind kKind>
inline __m512 load_shared_scale(const uint8_t* p) {
  alignas(64) uint8_t line[64] = {};
  std::memcpy(line, p, static_cast<size_t>(scale_bytes(kKind)));
  return _mm512_broadcastss_ps(_mm512_castps512_ps128(load_scales<kKind>(line)));
}

/// The scales of a group and 16 columns; `half` 1 for the upper ones.
template <CodeKind kKind>
inline __m512 scales_of(const CodePanel& panel, int64_t group, int half) {
  const bool is_shared = panel.format->shares_scales;
  const int64_t place = is_shared ? 2 * group + half : kPanelColumns * group + kHalfPanel * half;
  const uint8_t* source = panel.scales + scale_bytes(kKind) * place;
  const __m512 scales = is_shared ? load_shared_scale<kKind>(source) : load_scales<kKind>(source);
  return has_factors(kKind) ? with_factors(scales, panel.factors + 8 * half) : scales;
}

/// Zero points of 16 columns as float32; `half` 1 for the upper ones.
inline __m512 load_zeros(const uint8_t* p, int half) {
  const __m512i bytes = _mm512_cvtepu8_epi32(load_128(p));
  const __m512i codes =
      half == 0 ? _mm512_and_si512(bytes, _mm512_set1_epi32(15)) : _mm512_srli_epi32(bytes, 4);
  return _mm512_cvtepi32_ps(codes);
}

#else  // __AVX512F__

// The scale and the zero point of one column, one at a time.

inline float float_at(const uint8_t* data, int64_t index) {
  float out;
  std::memcpy(&out, data + 4 * index, sizeof out);
  return out;
}

template <typename Half>
inline float half_at(const uint8_t* data, int64_t index) {
  Half half;
  std::memcpy(&half, data + 2 * index, sizeof half);
  return to_float(half);
}

/// Two to the power of an exponent plus 127.
inline float power_of_two(uint8_t exponent) {
  const uint32_t bits = exponent == 0 ? 0x00400000u : static_cast<uint32_t>(exponent) << 23;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline float e4m3_number(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  float number = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                               : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  if ((code & 0x7f) == 0x7f) number = std::nanf("");
  return code & 0x80 ? -number : number;
}

inline float scale_at(const CodePanel& panel, int64_t group, int64_t column) {
  const int64_t index = panel.format->shares_scales ? 2 * group + column / kHalfPanel
                                                    : kPanelColumns * group + column;
  switch (panel.format->kind) {
    case CodeKind::kInt4Float16:
      return half_at<fp16>(panel.scales, index);
    case CodeKind::kInt4BFloat16:
      return half_at<bf16>(panel.scales, index);
    case CodeKind::kE2m1:
    case CodeKind::kE4m3E8m0:
      return power_of_two(panel.scales[index]);
    case CodeKind::kE2m1E4m3: {
      const int64_t half = column / kHalfPanel;  // one of both factors is 1
      return e4m3_number(panel.scales[index]) * float_at(panel.factors, 2 * half) /
             float_at(panel.factors, 2 * half + 1);
    }
    case CodeKind::kE4m3:
    case CodeKind::kInt8:
      return float_at(panel.scales, index);
  }
  return 0.0f;
}

inline int nibble(const uint8_t* bytes, int64_t byte, bool is_above) {
  return is_above ? bytes[byte] >> 4 : bytes[byte] & 15;
}

inline int zero_at(const CodePanel& panel, int64_t group, int64_t column) {
  if (panel.zeros == nullptr) return kInt4Zero;
  return nibble(panel.zeros + group * kHalfPanel, column % kHalfPanel, column >= kHalfPanel);
}

inline int code_at(const CodePanel& panel, int64_t pair, int64_t column, int64_t half_pair) {
  const uint8_t* codes = panel.codes + pair * pair_bytes(panel.format->kind);
  if (!is_four_bits(panel.format->kind)) return codes[2 * column + half_pair];
  const int64_t in_half = column % kHalfPanel;
  const int64_t byte = column / kHalfPanel * kHalfPanel + in_half % 8 * 2 + half_pair;
  return nibble(codes, byte, in_half >= 8);
}

inline float number_of(const CodePanel& panel, int code, int64_t group, int64_t column) {
  static constexpr float kE2m1Numbers[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const CodeKind kind = panel.format->kind;
  if (!is_four_bits(kind)) return e4m3_number(code);
  if (kind == CodeKind::kE2m1 || kind == CodeKind::kE2m1E4m3)
    return code & 8 ? -kE2m1Numbers[code & 7] : kE2m1Numbers[code];
  return static_cast<float>(code - zero_at(panel, group, column));
}

#endif  // __AVX512F__

}  // namespace
}  // namespace raymoe
