// Loops that read memory or multiply from registers as fast as an instruction set can.
#include "raymoe/probe.h"
#include "vec_f32.h"

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
        if (share.ahead > 0)
          __builtin_prefetch(reinterpret_cast<const char*>(p + line) + share.ahead);
        for (int64_t k = 0; k < kLineFloats; k += kLanes) {
          F32& total = sum[(line + k) / kLanes % 4];
          total = add(total, load(p + line + k, Whole{}));
        }
      }
    }
  return sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

inline void update_share(const UpdateShare& share) {
  const F32 factor = splat(1.0000001f);
  for (int64_t i = 0; i < share.size; i += kLineFloats) {
    if (share.ahead > 0)
      __builtin_prefetch(reinterpret_cast<const char*>(share.data + i) + share.ahead);
    for (int64_t k = 0; k < kLineFloats; k += kLanes)
      store(share.data + i + k, mul(factor, load(share.data + i + k, Whole{})), Whole{});
  }
}

#if defined(__AVX512F__)

#define RAYMOE_REGISTER(a) "v"(a)

double multiply_add_f32(int64_t iterations) {
  __m512 x = _mm512_set1_ps(1e-9f);
#define RAYMOE_STEP(a) _mm512_fmadd_ps(x, x, a)
  RAYMOE_PEAK_LOOP(__m512, _mm512_set1_ps, RAYMOE_STEP, asm volatile("" : "+v"(x)));
#undef RAYMOE_STEP
  return 2.0 * 16 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

__attribute__((target("avx512vnni"))) double dot_int8_vnni(int64_t iterations) {
  __m512i x = _mm512_set1_epi8(1);
#define RAYMOE_STEP(a) _mm512_dpbusd_epi32(a, x, x)
  RAYMOE_PEAK_LOOP(__m512i, _mm512_set1_epi32, RAYMOE_STEP, asm volatile("" : "+v"(x)));
#undef RAYMOE_STEP
  return 2.0 * 64 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

double dot_int8(int64_t iterations) {
  return __builtin_cpu_supports("avx512vnni") ? dot_int8_vnni(iterations)
                                              : multiply_add_f32(iterations);
}

#if defined(__AVX512BF16__)
double dot_bf16(int64_t iterations) {
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3000);
#define RAYMOE_STEP(a) _mm512_dpbf16_ps(a, x, x)
  RAYMOE_PEAK_LOOP(__m512, _mm512_set1_ps, RAYMOE_STEP, asm volatile("" : "+v"(x)));
#undef RAYMOE_STEP
  return 2.0 * 32 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}
#else
constexpr Arithmetic dot_bf16 = nullptr;
#endif

#elif defined(__AVX2__)

#define RAYMOE_REGISTER(a) "x"(a)

double multiply_add_f32(int64_t iterations) {
  __m256 x = _mm256_set1_ps(1e-9f);
#define RAYMOE_STEP(a) _mm256_fmadd_ps(x, x, a)
  RAYMOE_PEAK_LOOP(__m256, _mm256_set1_ps, RAYMOE_STEP, asm volatile("" : "+x"(x)));
#undef RAYMOE_STEP
  return 2.0 * 8 * RAYMOE_PEAK_STEPS * static_cast<double>(iterations);
}

constexpr Arithmetic dot_bf16 = nullptr, dot_int8 = nullptr;

#else

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

constexpr Arithmetic dot_bf16 = nullptr, dot_int8 = nullptr;

#endif

}  // namespace

RAYMOE_DEFINE_KERNELS(ProbeKernels, probe_kernels) = {read_share, update_share,
                                                    multiply_add_f32, dot_bf16, dot_int8};

}  // namespace raymoe
