// Latent attention kernel for AVX512-BF16: one instruction multiplies and adds a pair of bf16 in 16
// lanes. Weights are rounded to bf16; scores, sums and outputs are float32. The instruction takes
// subnormal operands as zero.
//
// For the scores a pair is two neighbouring elements of a cached row, read in place; for P V it is
// the same element of two neighbouring rows, so the values of a step are interleaved first.
#include "latent_attention-inl.h"

namespace raymoe {
namespace {

inline __m512i as_bits(__m512bh x) { return reinterpret_cast<__m512i>(x); }

/// Lanes of two vectors by turns: the first halves of both, or the second.
inline __m512i interleave(__m512i first, __m512i second, int half) {
  const __m512i lane = _mm512_add_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_set1_epi32(16 * half));
  const __m512i order = _mm512_or_si512(
      lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(32)), 16));
  return _mm512_permutex2var_epi16(first, order, second);
}

struct Pairs {
  using C = bf16;
  using A = bf16;
  static constexpr int64_t kPair = 2;

  static Reg load(const A* b) { return _mm512_loadu_ps(b); }
  static Reg multiply_add(Reg acc, const A* a, Reg b) {
    int32_t pair;
    __builtin_memcpy(&pair, a, sizeof pair);
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                            reinterpret_cast<__m512bh>(b));
  }
  static void store_weights(A* to, const Reg (&weights)[2]) {
    const __m512i both = as_bits(_mm512_cvtne2ps_pbh(weights[1], weights[0]));
    const __m512i second = _mm512_castsi256_si512(_mm512_extracti64x4_epi64(both, 1));
    _mm512_storeu_si512(to, interleave(both, second, 0));
  }

  static void gather(const LatentTile& tile, const Workspace<A>& work, Step<A>& step) {
    for (int64_t i = 0; i < step.count; i += kBlockTokens) {
      const A* rows = block_at<A>(tile, (step.first + i) / kBlockTokens);
      step.rows[i / kBlockTokens] = rows;
      interleave_rows(*tile.shape, rows, smaller(kBlockTokens, step.count - i), i, work.values);
    }
  }
  static Panel<A> values(const LatentShape&, const Workspace<A>& work, int64_t column,
                         int64_t columns) {
    return {work.values + column * kStepTokens, columns * kPair};
  }

 private:
  /// Rows of one block as rows `first`, `first` + 1, ... of the values.
  static void interleave_rows(const LatentShape& shape, const A* rows, int64_t count, int64_t first,
                              A* values) {
    const int64_t rank = rounded_up(shape.rank, kLanes);
    for (int64_t i = 0; i < count; i += 2)
      for (int64_t column = 0; column < rank; column += kPanelColumns) {
        const int64_t columns = smaller(rank - column, kPanelColumns);
        const A* from = rows + i * shape.width + column;
        const auto lanes = first_elements(shape.rank - column);
        const __m512i row = _mm512_maskz_loadu_epi16(lanes, from);
        const __m512i next =
            i + 1 < count ? _mm512_maskz_loadu_epi16(lanes, from + shape.width)
                          : _mm512_setzero_si512();
        A* to = values + column * kStepTokens + (first + i) * columns;
        _mm512_storeu_si512(to, interleave(row, next, 0));
        if (columns == kPanelColumns) _mm512_storeu_si512(to + 32, interleave(row, next, 1));
      }
  }
  static __mmask32 first_elements(int64_t count) {
    return count >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint32_t{1} << count) - 1);
  }
};

}  // namespace

LatentKernel latent_kernel_avx512_bf16(DType query, DType cache) {
  if (query == DType::kBFloat16 && cache == DType::kBFloat16)
    return {attend<Pairs, bf16>, store<bf16>};
  return latent_kernel_avx512(query, cache);
}

}  // namespace raymoe
