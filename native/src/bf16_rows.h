// Rows of bfloat16 activations as the tiles of AVX512-BF16 read them. Included only by kernel files
// of that instruction set; everything here has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "raymoe/bf16.h"

namespace raymoe {
namespace {

inline __m512bh broadcast_pair(const char* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

/// Rows are addressed as base[row / 3] + (row % 3) * stride, which x86 computes for free: five
/// pointers for 14 rows instead of 14, so nothing spills.
template <int kRows>
struct RowPointers {
  static constexpr int kNumBases = (kRows + 2) / 3;
  const char* base[kNumBases];
  int64_t stride;

  RowPointers(const bf16* a, int64_t stride_bytes) : stride(stride_bytes) {
    for (int group = 0; group < kNumBases; ++group)
      base[group] = reinterpret_cast<const char*>(a) + 3 * group * stride;
  }
  const char* at(int row, int pair) const { return base[row / 3] + (row % 3) * stride + 4 * pair; }
  void advance(int pairs) {
#pragma GCC unroll 8
    for (int group = 0; group < kNumBases; ++group) {
      base[group] += 4 * pairs;
      asm("" : "+r"(base[group]));  // keeps the compiler from making a pointer of every row
    }
  }
};

}  // namespace
}  // namespace raymoe
