#include "probe-inl.h"

namespace raymoe {
namespace {

double multiply_add_f32(int64_t iterations) {
  volatile float source = 1e-9f;
  const float x = source;
  float sum[RAYMOE_PEAK_STEPS];
  for (int k = 0; k < RAYMOE_PEAK_STEPS; ++k) sum[k] = static_cast<float>(k);
  for (int64_t i = 0; i < iterations; ++i)
    for (int k = 0; k < RAYMOE_PEAK_STEPS; ++k) sum[k] = sum[k] * x + x;
  for (float value : sum) source = value;
  return 2.0 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

}  // namespace

const ProbeKernels kProbeScalar = {read_share, multiply_add_f32, nullptr, nullptr};

}  // namespace raymoe
