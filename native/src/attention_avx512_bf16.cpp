// Attention kernel for AVX512-BF16: one instruction multiplies and adds a pair of bf16 in 16 lanes.
// Weights are rounded to bf16; scores, sums and outputs are float32. The instruction takes
// subnormal operands as zero.
#include "attention-inl.h"

namespace raymoe {
namespace {

struct PairDot {
  using C = bf16;
  using A = bf16;

  static void store_weights(A* to, Vector::Reg x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }

  template <int kRows, int kCols>
  static inline void step(Vector::Reg (&acc)[kRows][kCols], const A* a, int64_t a_stride,
                          const C* b, bool half) {
    __m512bh pairs[kCols];
    for (int j = 0; j < kCols; ++j)
      pairs[j] = reinterpret_cast<__m512bh>(Vector::load_pairs(b + j * 2 * Vector::kLanes, half));
    for (int i = 0; i < kRows; ++i) {
      int32_t pair;
      __builtin_memcpy(&pair, a + i * a_stride, sizeof pair);
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int j = 0; j < kCols; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, pairs[j]);
    }
  }
};

}  // namespace

AttentionKernel attention_kernel_avx512_bf16(DType query, DType cache) {
  if (query == DType::kBFloat16 && cache == DType::kBFloat16)
    return {attend<PairDot, bf16>, store<bf16>};
  return attention_kernel_avx512(query, cache);
}

}  // namespace raymoe
