// Sizes of packed weights: panels of 32 outputs, inputs in pairs. The layout is described in
// gemm.h.
#pragma once

#include <cstdint>

namespace raymoe {

constexpr int64_t kPanelColumns = 32;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t num_pairs(int64_t inputs) { return ceil_div(inputs, 2); }
inline int64_t num_panels(int64_t outputs) { return ceil_div(outputs, kPanelColumns); }
inline int64_t panel_elements(int64_t inputs) { return num_pairs(inputs) * kPanelColumns * 2; }

}  // namespace raymoe
