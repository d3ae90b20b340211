// Arithmetic of the AVX512 probes: float32, and int8 where the processor has VNNI.
#pragma once

#include "probe-inl.h"

#define RAYMOE_REGISTER(a) "v"(a)

namespace raymoe {
namespace {

inline double multiply_add_f32(int64_t iterations) {
  __m512 x = _mm512_set1_ps(1e-9f);
#define RAYMOE_STEP(a) _mm512_fmadd_ps(x, x, a)
  RAYMOE_PEAK_LOOP(__m512, _mm512_set1_ps, RAYMOE_STEP, asm volatile("" : "+v"(x)));
#undef RAYMOE_STEP
  return 2.0 * 16 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

__attribute__((target("avx512vnni"))) inline double dot_int8_vnni(int64_t iterations) {
  __m512i x = _mm512_set1_epi8(1);
#define RAYMOE_STEP(a) _mm512_dpbusd_epi32(a, x, x)
  RAYMOE_PEAK_LOOP(__m512i, _mm512_set1_epi32, RAYMOE_STEP, asm volatile("" : "+v"(x)));
#undef RAYMOE_STEP
  return 2.0 * 64 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

inline double dot_int8(int64_t iterations) {
  return __builtin_cpu_supports("avx512vnni") ? dot_int8_vnni(iterations)
                                              : multiply_add_f32(iterations);
}

}  // namespace
}  // namespace raymoe
