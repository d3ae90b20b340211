// The scale and the zero point of one column of a panel of codes, one at a time.
#pragma once

#include <cstring>

#include "code_panels.h"

namespace raymoe {
namespace {

inline float float_at(const uint8_t* data, int64_t index) {
  float out;
  std::memcpy(&out, data + 4 * index, sizeof out);
  return out;
}

template <typename Half>
inline float half_at(const uint8_t* data, int64_t index) {
  Half half;
  std::memcpy(&half, data + 2 * index, sizeof half);
  return to_float(half);
}

/// Two to the power of an exponent plus 127.
inline float power_of_two(uint8_t exponent) {
  const uint32_t bits = exponent == 0 ? 0x00400000u : static_cast<uint32_t>(exponent) << 23;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline float scale_at(const CodePanel& panel, int64_t group, int64_t column) {
  const int64_t index = panel.format->shares_scales ? 2 * group + column / kHalfPanel
                                                    : kPanelColumns * group + column;
  switch (panel.format->kind) {
    case CodeKind::kInt4Float16:
      return half_at<fp16>(panel.scales, index);
    case CodeKind::kInt4BFloat16:
      return half_at<bf16>(panel.scales, index);
    case CodeKind::kE2m1:
      return power_of_two(panel.scales[index]);
    case CodeKind::kE4m3:
      return float_at(panel.scales, index);
  }
  return 0.0f;
}

inline int nibble(const uint8_t* bytes, int64_t byte, bool is_above) {
  return is_above ? bytes[byte] >> 4 : bytes[byte] & 15;
}

inline int zero_at(const CodePanel& panel, int64_t group, int64_t column) {
  if (panel.zeros == nullptr) return kInt4Zero;
  return nibble(panel.zeros + group * kHalfPanel, column % kHalfPanel, column >= kHalfPanel);
}

}  // namespace
}  // namespace raymoe
