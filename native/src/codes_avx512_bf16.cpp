#include "codes_avx512-inl.h"

namespace raymoe {
namespace {

inline __m512i rounded(__m512 left, __m512 right) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right, left));
}

}  // namespace

void decode_panel_avx512_bf16(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  decode_panel(panel, begin, end, out);
}

}  // namespace raymoe
