#include "probe_avx512-inl.h"

namespace raymoe {
namespace {

double dot_bf16(int64_t iterations) {
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3000);
#define RAYMOE_STEP(a) _mm512_dpbf16_ps(a, x, x)
  RAYMOE_PEAK_LOOP(__m512, _mm512_set1_ps, RAYMOE_STEP, asm volatile("" : "+v"(x)));
#undef RAYMOE_STEP
  return 2.0 * 32 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

}  // namespace

const ProbeKernels kProbeAvx512Bf16 = {read_share, multiply_add_f32, dot_bf16, dot_int8};

}  // namespace raymoe
