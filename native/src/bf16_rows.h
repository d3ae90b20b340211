// Rows of bfloat16 activations as the tiles of AVX512-BF16 read them. Included only by kernel files
// of that instruction set; everything here has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "row_pointers.h"

namespace raymoe {
namespace {

inline __m512bh broadcast_pair(const char* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

}  // namespace
}  // namespace raymoe
