// Loops of the probes, written once on vec_f32.h and compiled for each instruction set.
#pragma once

#include "raymoe/probe.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

constexpr int64_t kLineFloats = 16;
constexpr int64_t kStepFloats = 4 * kLineFloats;

inline float read_share(const ReadShare& share) {
  F32 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  const int64_t part = share.size / share.num_streams;
  for (int64_t i = 0; i + kStepFloats <= part; i += kStepFloats)
    for (int64_t stream = 0; stream < share.num_streams; ++stream) {
      const float* p = share.data + stream * part + i;
      for (int64_t line = 0; line < kStepFloats; line += kLineFloats) {
        if (share.ahead > 0) __builtin_prefetch(reinterpret_cast<const char*>(p + line) + share.ahead);
        for (int64_t k = 0; k < kLineFloats; k += kLanes)
          sum[(line + k) / kLanes % 4] = add(sum[(line + k) / kLanes % 4], load(p + line + k, Whole{}));
      }
    }
  return sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

}  // namespace
}  // namespace raymoe

// A loop of `iterations` in which 12 independent accumulators take one step each: enough to hide
// the latency of every multiply-add unit. They start from different values, or the compiler would
// merge them; `keep` stops it from hoisting the step.
#define RAYMOE_PEAK_LOOP(Vector, start, step, keep)                                  \
  Vector a0 = start(0), a1 = start(1), a2 = start(2), a3 = start(3), a4 = start(4);  \
  Vector a5 = start(5), a6 = start(6), a7 = start(7), a8 = start(8), a9 = start(9);  \
  Vector a10 = start(10), a11 = start(11);                                           \
  for (int64_t i = 0; i < iterations; ++i) {                                         \
    a0 = step(a0), a1 = step(a1), a2 = step(a2), a3 = step(a3), a4 = step(a4);       \
    a5 = step(a5), a6 = step(a6), a7 = step(a7), a8 = step(a8), a9 = step(a9);       \
    a10 = step(a10), a11 = step(a11);                                                \
    keep;                                                                            \
  }                                                                                  \
  asm volatile("" ::RAYMOE_REGISTER(a0), RAYMOE_REGISTER(a1), RAYMOE_REGISTER(a2),   \
               RAYMOE_REGISTER(a3), RAYMOE_REGISTER(a4), RAYMOE_REGISTER(a5),        \
               RAYMOE_REGISTER(a6), RAYMOE_REGISTER(a7), RAYMOE_REGISTER(a8),        \
               RAYMOE_REGISTER(a9), RAYMOE_REGISTER(a10), RAYMOE_REGISTER(a11))
#define RAYMOE_PEAK_STEPS 12
