#include "probe-inl.h"

#define RAYMOE_REGISTER(a) "x"(a)

namespace raymoe {
namespace {

double multiply_add_f32(int64_t iterations) {
  __m256 x = _mm256_set1_ps(1e-9f);
#define RAYMOE_STEP(a) _mm256_fmadd_ps(x, x, a)
  RAYMOE_PEAK_LOOP(__m256, _mm256_set1_ps, RAYMOE_STEP, asm volatile("" : "+x"(x)));
#undef RAYMOE_STEP
  return 2.0 * 8 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

}  // namespace

const ProbeKernels kProbeAvx2 = {read_share, multiply_add_f32, nullptr, nullptr};

}  // namespace raymoe
