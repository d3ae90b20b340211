// Vectors of float for the element-wise kernels: one thin set of operations per instruction set.
// Included only by kernel files of one instruction set each; everything here has internal linkage,
// so that no function compiled for one instruction set is ever linked into another.
//
// No operation here fuses a multiply with an add: apart from the order of sums, every instruction
// set computes the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "raymoe/bf16.h"

namespace raymoe {
namespace {

/// A whole vector, or its first `count` lanes (the tail of a row). Lanes beyond read as zero.
struct Whole {};
struct Part {
  int64_t count;
};

#if defined(__AVX512F__)

constexpr int64_t kLanes = 16;
using F32 = __m512;
using I32 = __m512i;

inline __mmask16 lanes(Part part) { return static_cast<__mmask16>((1u << part.count) - 1u); }

inline F32 splat(float x) { return _mm512_set1_ps(x); }
inline I32 splat(int32_t x) { return _mm512_set1_epi32(x); }
inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
inline F32 round_even(F32 a) { return _mm512_roundscale_ps(a, 0x08); }
inline I32 to_int(F32 a) { return _mm512_cvttps_epi32(a); }
inline F32 to_f32(I32 a) { return _mm512_cvtepi32_ps(a); }
inline I32 bits_of(F32 a) { return _mm512_castps_si512(a); }
inline F32 from_bits(I32 a) { return _mm512_castsi512_ps(a); }
inline I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
inline I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
inline I32 max(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
inline I32 bit_and(I32 a, I32 b) { return _mm512_and_si512(a, b); }
inline I32 bit_xor(I32 a, I32 b) { return _mm512_xor_si512(a, b); }
template <int N>
inline I32 shift_left(I32 a) { return _mm512_slli_epi32(a, N); }
template <int N>
inline I32 shift_right(I32 a) { return _mm512_srli_epi32(a, N); }
template <int N>
inline I32 shift_right_signed(I32 a) { return _mm512_srai_epi32(a, N); }
inline uint32_t mask_greater(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t mask_nan(F32 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline uint32_t mask_equal(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline uint32_t mask_equal(I32 a, I32 b) { return _mm512_cmpeq_epi32_mask(a, b); }
/// a < b ? yes : no
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline F32 where_nan(F32 a, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), no, yes);
}
/// a < 0 ? yes : no
inline F32 where_negative(I32 a, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(a), no, yes);
}

/// Lane i of lane i ^ kStep.
template <int kStep>
inline F32 swap_lanes(F32 a) {
  if constexpr (kStep < 4) return _mm512_permute_ps(a, kStep == 1 ? 0xb1 : 0x4e);
  return _mm512_shuffle_f32x4(a, a, kStep == 4 ? 0xb1 : 0x4e);
}

inline F32 load(const float* p, Whole) { return _mm512_loadu_ps(p); }
inline F32 load(const float* p, Part part) { return _mm512_maskz_loadu_ps(lanes(part), p); }
inline I32 load(const int32_t* p, Whole) { return _mm512_loadu_si512(p); }
inline void store(float* p, F32 x, Whole) { _mm512_storeu_ps(p, x); }
inline void store(float* p, F32 x, Part part) { _mm512_mask_storeu_ps(p, lanes(part), x); }
inline void store(int32_t* p, I32 x, Whole) { _mm512_storeu_si512(p, x); }

inline F32 widen(const bf16*, __m256i x) {
  return from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline F32 widen(const fp16*, __m256i x) { return _mm512_cvtph_ps(x); }
template <typename T>
inline F32 load(const T* p, Whole) {
  return widen(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <typename T>
inline F32 load(const T* p, Part part) {
  return widen(p, _mm256_maskz_loadu_epi16(lanes(part), p));
}

/// Upper halves hold the bfloat16 nearest to x, ties to even. NaN stays NaN if its low 16 bits are
/// zero, as in every NaN that arithmetic on 16-bit values makes or keeps.
inline I32 bf16_in_upper_half(F32 x) {
  const I32 bits = bits_of(x);
  const I32 lsb = bit_and(shift_right<16>(bits), splat(1));
  return add(add(bits, splat(0x7fff)), lsb);
}
/// Sum, halving: lane i + lane i + 8 first. Largest lane; NaN lanes give an unspecified result.
inline float sum_of(F32 x) { return _mm512_reduce_add_ps(x); }
inline float max_of(F32 x) { return _mm512_reduce_max_ps(x); }
inline int32_t max_of(I32 x) { return _mm512_reduce_max_epi32(x); }

inline __m256i narrow(const bf16*, F32 x) {
  return _mm512_cvtepi32_epi16(shift_right<16>(bf16_in_upper_half(x)));
}
inline __m256i narrow(const fp16*, F32 x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
template <typename T>
inline void store(T* p, F32 x, Whole) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(p, x));
}
template <typename T>
inline void store(T* p, F32 x, Part part) {
  _mm256_mask_storeu_epi16(p, lanes(part), narrow(p, x));
}

#elif defined(__AVX2__)

constexpr int64_t kLanes = 8;
using F32 = __m256;
using I32 = __m256i;

inline F32 splat(float x) { return _mm256_set1_ps(x); }
inline I32 splat(int32_t x) { return _mm256_set1_epi32(x); }
inline F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
inline F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
inline F32 round_even(F32 a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline I32 to_int(F32 a) { return _mm256_cvttps_epi32(a); }
inline F32 to_f32(I32 a) { return _mm256_cvtepi32_ps(a); }
inline I32 bits_of(F32 a) { return _mm256_castps_si256(a); }
inline F32 from_bits(I32 a) { return _mm256_castsi256_ps(a); }
inline I32 add(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
inline I32 sub(I32 a, I32 b) { return _mm256_sub_epi32(a, b); }
inline I32 max(I32 a, I32 b) { return _mm256_max_epi32(a, b); }
inline I32 bit_and(I32 a, I32 b) { return _mm256_and_si256(a, b); }
inline I32 bit_xor(I32 a, I32 b) { return _mm256_xor_si256(a, b); }
template <int N>
inline I32 shift_left(I32 a) { return _mm256_slli_epi32(a, N); }
template <int N>
inline I32 shift_right(I32 a) { return _mm256_srli_epi32(a, N); }
template <int N>
inline I32 shift_right_signed(I32 a) { return _mm256_srai_epi32(a, N); }
inline uint32_t mask_of(F32 a) { return static_cast<uint32_t>(_mm256_movemask_ps(a)); }
inline uint32_t mask_greater(F32 a, F32 b) { return mask_of(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline uint32_t mask_nan(F32 a) { return mask_of(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
inline uint32_t mask_equal(F32 a, F32 b) { return mask_of(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline uint32_t mask_equal(I32 a, I32 b) { return mask_of(from_bits(_mm256_cmpeq_epi32(a, b))); }
/// a < b ? yes : no
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline F32 where_nan(F32 a, F32 yes, F32 no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
/// a < 0 ? yes : no
inline F32 where_negative(I32 a, F32 yes, F32 no) {
  return _mm256_blendv_ps(no, yes, from_bits(a));
}

inline I32 lanes(Part part) {
  return _mm256_cmpgt_epi32(splat(static_cast<int32_t>(part.count)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
/// Lane i of lane i ^ kStep.
template <int kStep>
inline F32 swap_lanes(F32 a) {
  if constexpr (kStep < 4) return _mm256_permute_ps(a, kStep == 1 ? 0xb1 : 0x4e);
  return _mm256_permute2f128_ps(a, a, 1);
}

inline F32 load(const float* p, Whole) { return _mm256_loadu_ps(p); }
inline F32 load(const float* p, Part part) { return _mm256_maskload_ps(p, lanes(part)); }
inline I32 load(const int32_t* p, Whole) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline void store(float* p, F32 x, Whole) { _mm256_storeu_ps(p, x); }
inline void store(float* p, F32 x, Part part) { _mm256_maskstore_ps(p, lanes(part), x); }
inline void store(int32_t* p, I32 x, Whole) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}

inline F32 widen(const bf16*, __m128i x) {
  return from_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline F32 widen(const fp16*, __m128i x) { return _mm256_cvtph_ps(x); }
template <typename T>
inline F32 load(const T* p, Whole) {
  return widen(p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <typename T>
inline F32 load(const T* p, Part part) {
  T copy[kLanes] = {};
  std::memcpy(copy, p, static_cast<size_t>(part.count) * sizeof(T));
  return load(copy, Whole{});
}

/// Upper halves hold the bfloat16 nearest to x, ties to even. NaN stays NaN if its low 16 bits are
/// zero, as in every NaN that arithmetic on 16-bit values makes or keeps.
inline I32 bf16_in_upper_half(F32 x) {
  const I32 bits = bits_of(x);
  const I32 lsb = bit_and(shift_right<16>(bits), splat(1));
  return add(add(bits, splat(0x7fff)), lsb);
}
/// Sum, halving: lane i + lane i + 4 first. Largest lane; NaN lanes give an unspecified result.
inline float sum_of(F32 x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float max_of(F32 x) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline int32_t max_of(I32 x) {
  const __m128i half = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i quarter = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
}

inline __m128i narrow(const bf16*, F32 x) {
  const I32 halves = shift_right<16>(bf16_in_upper_half(x));
  return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline __m128i narrow(const fp16*, F32 x) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}
template <typename T>
inline void store(T* p, F32 x, Whole) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(p, x));
}
template <typename T>
inline void store(T* p, F32 x, Part part) {
  T copy[kLanes];
  store(copy, x, Whole{});
  std::memcpy(p, copy, static_cast<size_t>(part.count) * sizeof(T));
}

#else

constexpr int64_t kLanes = 1;
using F32 = float;
using I32 = int32_t;

inline F32 splat(float x) { return x; }
inline I32 splat(int32_t x) { return x; }
inline F32 add(F32 a, F32 b) { return a + b; }
inline F32 sub(F32 a, F32 b) { return a - b; }
inline F32 mul(F32 a, F32 b) { return a * b; }
inline F32 div(F32 a, F32 b) { return a / b; }
inline F32 max(F32 a, F32 b) { return a > b ? a : b; }
inline F32 min(F32 a, F32 b) { return a < b ? a : b; }
/// For |a| < 2^22, as the callers have: the adder rounds, ties to even.
inline F32 round_even(F32 a) { return (a + 12582912.0f) - 12582912.0f; }
inline I32 to_int(F32 a) { return static_cast<int32_t>(a); }
inline F32 to_f32(I32 a) { return static_cast<float>(a); }
inline I32 bits_of(F32 a) {
  int32_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  return bits;
}
inline F32 from_bits(I32 a) {
  float x;
  std::memcpy(&x, &a, sizeof x);
  return x;
}
inline I32 add(I32 a, I32 b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
inline I32 sub(I32 a, I32 b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}
inline I32 max(I32 a, I32 b) { return a > b ? a : b; }
inline I32 bit_and(I32 a, I32 b) { return a & b; }
inline I32 bit_xor(I32 a, I32 b) { return a ^ b; }
template <int N>
inline I32 shift_left(I32 a) { return static_cast<int32_t>(static_cast<uint32_t>(a) << N); }
template <int N>
inline I32 shift_right(I32 a) { return static_cast<int32_t>(static_cast<uint32_t>(a) >> N); }
template <int N>
inline I32 shift_right_signed(I32 a) { return a >> N; }
inline uint32_t mask_greater(F32 a, F32 b) { return a > b; }
inline uint32_t mask_nan(F32 a) { return a != a; }
inline uint32_t mask_equal(F32 a, F32 b) { return a == b; }
inline uint32_t mask_equal(I32 a, I32 b) { return a == b; }
/// a < b ? yes : no
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) { return a < b ? yes : no; }
inline F32 where_nan(F32 a, F32 yes, F32 no) { return a != a ? yes : no; }
/// a < 0 ? yes : no
inline F32 where_negative(I32 a, F32 yes, F32 no) { return a < 0 ? yes : no; }

template <typename T>
inline F32 load(const T* p, Whole) { return to_float(*p); }
template <typename T>
inline F32 load(const T* p, Part part) { return part.count > 0 ? to_float(*p) : 0.0f; }
inline I32 load(const int32_t* p, Whole) { return *p; }
template <typename T>
inline void store(T* p, F32 x, Whole) { *p = from_float<T>(x); }
template <typename T>
inline void store(T* p, F32 x, Part part) {
  if (part.count > 0) *p = from_float<T>(x);
}
inline void store(int32_t* p, I32 x, Whole) { *p = x; }

inline float sum_of(F32 x) { return x; }
inline float max_of(F32 x) { return x; }
inline int32_t max_of(I32 x) { return x; }

/// Upper half holds the bfloat16 nearest to x, ties to even.
inline I32 bf16_in_upper_half(F32 x) {
  return static_cast<int32_t>(static_cast<uint32_t>(from_float<bf16>(x).bits) << 16);
}

#endif

/// x rounded to the type T and back: what storing it would do.
template <typename T>
inline F32 rounded_to(F32 x);
template <>
inline F32 rounded_to<float>(F32 x) {
  return x;
}
template <>
inline F32 rounded_to<bf16>(F32 x) {
  return from_bits(bit_and(bf16_in_upper_half(x), splat(static_cast<int32_t>(0xffff0000u))));
}
template <>
inline F32 rounded_to<fp16>(F32 x) {
#if defined(__AVX2__)
  return widen(static_cast<const fp16*>(nullptr), narrow(static_cast<const fp16*>(nullptr), x));
#else
  return to_float(from_float<fp16>(x));
#endif
}

/// Like load, but lanes beyond the part read as `fill`.
template <typename T>
inline F32 load_filled(const T* p, Whole whole, float) {
  return load(p, whole);
}
template <typename T>
inline F32 load_filled(const T* p, Part part, float fill) {
  float lane[kLanes];
  store(lane, splat(fill), Whole{});
  store(lane, load(p, part), part);
  return load(lane, Whole{});
}

/// Calls body(offset, Whole or Part) for all lanes of [0, count), the tail last.
template <typename Body>
inline void for_lanes(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, Whole{});
  if (i < count) body(i, Part{count - i});
}

/// exp(x) for x <= 88, within 2 ulp; 0 below -87.3; NaN stays NaN.
/// Cody-Waite reduction and the degree-5 polynomial of Cephes' expf.
inline F32 exp_of(F32 x) {
  const F32 lowest = splat(-87.3f);
  const F32 clamped = max(min(x, splat(88.0f)), lowest);
  const F32 n = round_even(mul(clamped, splat(1.44269504088896341f)));
  F32 r = sub(clamped, mul(n, splat(0.693359375f)));
  r = sub(r, mul(n, splat(-2.12194440e-4f)));
  F32 p = splat(1.9875691500e-4f);
  p = add(mul(p, r), splat(1.3981999507e-3f));
  p = add(mul(p, r), splat(8.3334519073e-3f));
  p = add(mul(p, r), splat(4.1665795894e-2f));
  p = add(mul(p, r), splat(1.6666665459e-1f));
  p = add(mul(p, r), splat(5.0000001201e-1f));
  p = add(add(mul(mul(p, r), r), r), splat(1.0f));
  const F32 scale = from_bits(shift_left<23>(add(to_int(n), splat(127))));
  return where_nan(x, x, where_less(x, lowest, splat(0.0f), mul(p, scale)));
}

inline F32 sigmoid_of(F32 x) {
  const F32 one = splat(1.0f);
  return div(one, add(one, exp_of(sub(splat(0.0f), x))));
}

/// 1 / sqrt(mean of squares + eps) of one row; 4 partial sums per lane, float32.
template <typename T>
inline float inverse_rms(const T* row, int64_t size, float eps) {
  F32 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) {
      const F32 x = load(row + i + k * kLanes, Whole{});
      sum[k] = add(sum[k], mul(x, x));
    }
  for_lanes(size - i, [&](int64_t offset, auto part) {
    const F32 x = load(row + i + offset, part);
    sum[0] = add(sum[0], mul(x, x));
  });
  const float total = sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + eps);
}

}  // namespace
}  // namespace raymoe
