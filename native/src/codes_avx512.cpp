#include "codes_avx512-inl.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

inline __m512i rounded(__m512 left, __m512 right) {
  const bf16* type = nullptr;
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(type, left)), narrow(type, right), 1);
}

}  // namespace

void decode_panel_avx512(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  decode_panel(panel, begin, end, out);
}

}  // namespace raymoe
