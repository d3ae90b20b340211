// Decoding of panels without vectors: the readable reference of the other files.
#include <cmath>

#include "code_scales-inl.h"

namespace raymoe {
namespace {

int code_at(const CodePanel& panel, int64_t pair, int64_t column, int64_t half_pair) {
  const uint8_t* codes = panel.codes + pair * pair_bytes(panel.format->kind);
  if (!is_four_bits(panel.format->kind)) return codes[2 * column + half_pair];
  const int64_t in_half = column % kHalfPanel;
  const int64_t byte = column / kHalfPanel * kHalfPanel + in_half % 8 * 2 + half_pair;
  return nibble(codes, byte, in_half >= 8);
}

float e4m3_number(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  float number = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                               : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  if ((code & 0x7f) == 0x7f) number = std::nanf("");
  return code & 0x80 ? -number : number;
}

float number_of(const CodePanel& panel, int code, int64_t group, int64_t column) {
  static constexpr float kE2m1Numbers[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  if (panel.format->kind == CodeKind::kE4m3) return e4m3_number(code);
  if (panel.format->kind == CodeKind::kE2m1)
    return code & 8 ? -kE2m1Numbers[code & 7] : kE2m1Numbers[code];
  return static_cast<float>(code - zero_at(panel, group, column));
}

}  // namespace

void decode_panel_scalar(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  for (int64_t pair = begin; pair < end; ++pair)
    for (int64_t column = 0; column < kPanelColumns; ++column)
      for (int64_t half_pair = 0; half_pair < 2; ++half_pair) {
        const int64_t group = group_of(panel, 2 * pair + half_pair);
        const int code = code_at(panel, pair, column, half_pair);
        *out++ = from_float<bf16>(number_of(panel, code, group, column) *
                                  scale_at(panel, group, column));
      }
}

}  // namespace raymoe
