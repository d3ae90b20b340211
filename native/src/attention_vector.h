// The vectors of the attention kernels. Everything has internal linkage: no other file's copy is
// compiled for the wrong machine.
#pragma once

#include <immintrin.h>

#include "raymoe/bf16.h"

namespace raymoe {
namespace {

// Coefficients of 2^f on [-0.5, 0.5]; relative error 2e-9 before rounding, at most 1 ulp after.
constexpr float kExp2Coefficients[6] = {0.6931471824645996f,    0.24022647738456726f,
                                        0.055503323674201965f,  0.00961843691766262f,
                                        0.0013398875016719103f, 0.00015353361959569156f};
constexpr float kExp2Min = -126.0f;  // 2^x is zero below: no subnormal results

inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 load8(const fp16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline __m256 load8(const bf16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline void store8(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
inline void store8(fp16* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store8(bf16* to, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i low = _mm256_castsi256_si128(rounded);
  const __m128i high = _mm256_extracti128_si256(rounded, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}

#if defined(__AVX512F__)

struct Vector {
  using Reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kMaxRows = 8;      // of a register block: 8 x 2 of 32 registers
  static constexpr int kNarrowRows = 4;      // up to here, more columns
  static constexpr int kWideColumns = 4;  // vectors
  static constexpr int kColumns = 2;

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg set1(float x) { return _mm512_set1_ps(x); }
  static Reg load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Reg x) { _mm512_storeu_ps(to, x); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static void add_product(Reg& sum, Reg a, Reg b) { sum = fma(a, b, sum); }
  static Reg fms(Reg a, Reg b, Reg c) { return _mm512_fmsub_ps(a, b, c); }
  static float reduce_add(Reg x) { return _mm512_reduce_add_ps(x); }
  static float reduce_max(Reg x) { return _mm512_reduce_max_ps(x); }

  /// Lanes whose index lies in [first, last] keep x, the others become -inf.
  static Reg keep(Reg x, int first, int last) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 kept = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
                           _mm512_cmple_epi32_mask(lane, _mm512_set1_epi32(last));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), kept, x);
  }

  /// 2^x for x <= 0; NaN stays NaN.
  static Reg exp2(Reg x) {
    const __m512i whole = _mm512_cvtps_epi32(x);
    const Reg f = _mm512_sub_ps(x, _mm512_cvtepi32_ps(whole));
    Reg y = set1(kExp2Coefficients[5]);
    for (int i = 4; i >= 0; --i) y = fma(y, f, set1(kExp2Coefficients[i]));
    y = fma(y, f, set1(1.0f));
    const __mmask16 kept = _mm512_cmp_ps_mask(x, set1(kExp2Min), _CMP_NLT_UQ);
    return _mm512_castsi512_ps(
        _mm512_maskz_add_epi32(kept, _mm512_castps_si512(y), _mm512_slli_epi32(whole, 23)));
  }

  /// Element `p` of kLanes pairs of a row; `half` reads only the first 8 lanes, the rest is zero.
  static Reg widen(const float* from, bool half, int) {
    return half ? _mm512_zextps256_ps512(load8(from)) : load(from);
  }
  static Reg widen(const fp16* from, bool half, int) {
    return half ? _mm512_zextps256_ps512(load8(from))
                : _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Reg widen(const bf16* from, bool half, int p) {
    const __m512i pairs = load_pairs(from, half);
    return _mm512_castsi512_ps(p == 0 ? _mm512_slli_epi32(pairs, 16)
                                      : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
  }
  static Reg widen(const int8_t* from, bool half, int p) {
    const __m512i quads =
        half ? _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))
             : _mm512_loadu_si512(from);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, 24 - 8 * p), 24));
  }
  static __m512i load_pairs(const bf16* from, bool half) {
    return half ? _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))
                : _mm512_loadu_si512(from);
  }
};

#else

struct Vector {
  using Reg = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kMaxRows = 6;  // of a register block: 6 x 2 of 16 registers
  static constexpr int kNarrowRows = 2;
  static constexpr int kWideColumns = 4;
  static constexpr int kColumns = 2;

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set1(float x) { return _mm256_set1_ps(x); }
  static Reg load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Reg x) { _mm256_storeu_ps(to, x); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  /// sum += a * b, fused. Left to itself GCC sums into the register of `a`, and spills.
  static void add_product(Reg& sum, Reg a, Reg b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  }
  static Reg fms(Reg a, Reg b, Reg c) { return _mm256_fmsub_ps(a, b, c); }
  static float reduce_add(Reg x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_max(Reg x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }

  /// Lanes whose index lies in [first, last] keep x, the others become -inf.
  static Reg keep(Reg x, int first, int last) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i lost = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                         _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(last)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(-__builtin_inff()), _mm256_castsi256_ps(lost));
  }

  /// 2^x for x <= 0; NaN stays NaN.
  static Reg exp2(Reg x) {
    const __m256i whole = _mm256_cvtps_epi32(x);
    const Reg f = _mm256_sub_ps(x, _mm256_cvtepi32_ps(whole));
    Reg y = set1(kExp2Coefficients[5]);
    for (int i = 4; i >= 0; --i) y = fma(y, f, set1(kExp2Coefficients[i]));
    y = fma(y, f, set1(1.0f));
    const Reg kept = _mm256_cmp_ps(x, set1(kExp2Min), _CMP_NLT_UQ);
    const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(whole, 23));
    return _mm256_and_ps(_mm256_castsi256_ps(scaled), kept);
  }

  /// Element `p` of kLanes pairs of a row.
  static Reg widen(const float* from, bool, int) { return load8(from); }
  static Reg widen(const fp16* from, bool, int) { return load8(from); }
  static Reg widen(const bf16* from, bool, int p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_castsi256_ps(p == 0 ? _mm256_slli_epi32(pairs, 16)
                                      : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
  }
  static Reg widen(const int8_t* from, bool, int p) {
    const __m256i quads = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(quads, 24 - 8 * p), 24));
  }
};

#endif

}  // namespace
}  // namespace raymoe
