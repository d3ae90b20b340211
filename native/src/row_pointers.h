// Addresses of the rows of a tile, for kernel files of AVX512.
#pragma once

#include <cstdint>

namespace raymoe {
namespace {

/// Rows are addressed as base[row / 3] + (row % 3) * stride, which x86 computes for free: five
/// pointers for 14 rows instead of 14, so nothing spills. A step is four bytes of each row.
template <int kRows>
struct RowPointers {
  static constexpr int kNumBases = (kRows + 2) / 3;
  const char* base[kNumBases];
  int64_t stride;

  RowPointers(const void* a, int64_t stride_bytes) : stride(stride_bytes) {
    for (int group = 0; group < kNumBases; ++group)
      base[group] = static_cast<const char*>(a) + 3 * group * stride;
  }
  const char* at(int row, int step) const { return base[row / 3] + (row % 3) * stride + 4 * step; }
  void advance(int steps) {
#pragma GCC unroll 8
    for (int group = 0; group < kNumBases; ++group) {
      base[group] += 4 * steps;
      asm("" : "+r"(base[group]));  // keeps the compiler from making a pointer of every row
    }
  }
};

}  // namespace
}  // namespace raymoe
