// Sizes and layouts of packed weights: panels of 32 outputs, inputs in pairs. Those of bfloat16 are
// described in gemm.h; here is what differs with codes in place of bfloat16 weights.
//
// A packed matrix is, where inputs name their groups, int32 [2 * pairs] of them; then its panels.
// A panel of 32 columns is
//   codes   [pairs][32][2] bytes, of int8 [words][32][4]; or, of four bits, [pairs][2][16] bytes:
//           byte b of half h holds input b % 2 of column 16 h + b / 2 below and of column
//           16 h + 8 + b / 2 above
//   scales  [groups][32], or [groups][2] where 16 columns share them
//   zeros   [groups][16] bytes: byte b holds column b below and column 16 + b above
//   factors [2][2] float32, with E4M3 scales: multiplier and divisor of the scales of 16 columns
// and both the order and each panel begin at a multiple of 64 bytes. Tails decode to finite
// numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "raymoe/bf16.h"
#include "raymoe/codes.h"
#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

constexpr int64_t kPanelColumns = 32;
constexpr int64_t kPackedAlignment = 64;  // bytes

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t num_pairs(int64_t inputs) { return ceil_div(inputs, 2); }
inline int64_t num_panels(int64_t outputs) { return ceil_div(outputs, kPanelColumns); }
inline int64_t panel_elements(int64_t inputs) { return num_pairs(inputs) * kPanelColumns * 2; }

constexpr int64_t kHalfPanel = kPanelColumns / 2;
constexpr int kInt4Zero = 8;

constexpr bool is_four_bits(CodeKind kind) {
  return kind != CodeKind::kE4m3 && kind != CodeKind::kE4m3E8m0 && kind != CodeKind::kInt8;
}
constexpr bool has_factors(CodeKind kind) { return kind == CodeKind::kE2m1E4m3; }

constexpr bool is_int4(CodeKind kind) {
  return kind == CodeKind::kInt4Float16 || kind == CodeKind::kInt4BFloat16;
}

constexpr int64_t scale_bytes(CodeKind kind) {
  if (kind == CodeKind::kE4m3 || kind == CodeKind::kInt8) return 4;
  return is_int4(kind) ? 2 : 1;
}

/// Bytes of the codes of two inputs of all columns.
inline int64_t pair_bytes(CodeKind kind) {
  return is_four_bits(kind) ? kPanelColumns : 2 * kPanelColumns;
}

/// Bytes of the codes of a panel.
inline int64_t code_bytes(CodeKind kind, int64_t inputs) {
  if (kind == CodeKind::kInt8) return ceil_div(inputs, 4) * 4 * kPanelColumns;
  return num_pairs(inputs) * pair_bytes(kind);
}

/// Offsets in bytes.
struct CodeLayout {
  int64_t num_groups;
  int64_t scales_of_group;  // 32 or 2
  int64_t scales, zeros, factors;  // from the begin of a panel
  int64_t panel_bytes;
  int64_t panels;  // from the begin of the matrix

  CodeLayout(const CodeFormat& format, int64_t inputs) {
    num_groups = ceil_div(inputs, format.group_size);
    scales_of_group = format.shares_scales ? 2 : kPanelColumns;
    scales = code_bytes(format.kind, inputs);
    zeros = scales + num_groups * scales_of_group * scale_bytes(format.kind);
    factors = zeros + (format.has_zeros ? num_groups * kHalfPanel : 0);
    panel_bytes = factors + (has_factors(format.kind) ? 4 * static_cast<int64_t>(sizeof(float)) : 0);
    panel_bytes = ceil_div(panel_bytes, 64) * 64;
    panels = format.has_order ? ceil_div(8 * num_pairs(inputs), 64) * 64 : 0;
  }
};

/// The memory of packed weights; throws unless it is `num_bytes` bytes and aligned.
uint8_t* packed_data(const char* what, const TensorView& packed, int64_t num_bytes);

/// One panel.
struct CodePanel {
  const CodeFormat* format;
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;    // null: none
  const uint8_t* factors;  // null: none
  const int32_t* order;    // null: neighbours
  int64_t num_groups;
};

inline CodePanel code_panel(const CodeFormat& format, const CodeLayout& layout,
                            const uint8_t* matrix, int64_t index) {
  const uint8_t* panel = matrix + layout.panels + index * layout.panel_bytes;
  return {&format,
          panel,
          panel + layout.scales,
          format.has_zeros ? panel + layout.zeros : nullptr,
          has_factors(format.kind) ? panel + layout.factors : nullptr,
          format.has_order ? reinterpret_cast<const int32_t*>(matrix) : nullptr,
          layout.num_groups};
}

/// The group of an input; that of the last one for the zero after an odd number of inputs.
inline int64_t group_of(const CodePanel& panel, int64_t input) {
  if (panel.order != nullptr) return panel.order[input];
  return std::min(input / panel.format->group_size, panel.num_groups - 1);
}

/// The first pair from `begin` on whose inputs are not both of the groups of the pair `begin`.
inline int64_t end_of_groups(const CodePanel& panel, int64_t begin, int64_t end) {
  const int64_t group = group_of(panel, 2 * begin);
  if (group_of(panel, 2 * begin + 1) != group) return begin + 1;
  if (panel.order == nullptr && panel.format->group_size % 2 == 0)
    return std::min(end, (group + 1) * panel.format->group_size / 2);
  int64_t stop = begin + 1;
  while (stop < end && group_of(panel, 2 * stop) == group && group_of(panel, 2 * stop + 1) == group)
    ++stop;
  return stop;
}

struct CodeKernels {
  /// Decodes pairs [begin, end) of a panel to bfloat16 as gemm.h has them, [end - begin][32][2].
  void (*decode)(const CodePanel& panel, int64_t begin, int64_t end, bf16* out);
};
RAYMOE_DECLARE_KERNELS(CodeKernels, code_kernels);

// Inputs of one block: 2048 pairs x 128 bytes of a panel of bfloat16 stay in L2 while tiles of rows
// use them.
constexpr int64_t kBlockPairs = 2048;
// Pairs whose products are summed before they are scaled. Spans do not depend on each other, so a
// core works on several where rows are few: one row of FP8 is 1.1 times as fast with 32 as with 64.
// Many rows are 1.04 times as fast with 64 as with 32, because scaling takes the place of products.
constexpr int64_t kSpanPairs = 64;
constexpr int64_t kMinGroupSize = 16;  // of products without decoding
constexpr int64_t kScaleElements = kPanelColumns * (2 * kBlockPairs / kMinGroupSize + 1);

/// Whether groups have whole pairs of neighbours, and not too few.
inline bool has_pairs(const CodeFormat& format) {
  return !format.has_order && format.group_size % 2 == 0 && format.group_size >= kMinGroupSize;
}

/// Whether products scale sums of a format where the instruction set can.
inline bool has_spans(const CodeFormat& format) {
  return format.kind != CodeKind::kE2m1 && has_pairs(format);
}

/// Whether decoded weights are exact, and made in registers where the instruction set can.
inline bool is_exact(const CodeFormat& format) {
  return format.kind == CodeKind::kE2m1 && !format.shares_scales && has_pairs(format);
}

/// The first pair that is not of a group, at most `end`.
inline int64_t end_of_group(const CodePanel& panel, int64_t group, int64_t end) {
  const bool is_last = group + 1 == panel.num_groups;
  return is_last ? end : std::min(end, (group + 1) * panel.format->group_size / 2);
}

/// The end of the span that begins with a pair: at most kSpanPairs pairs of its group.
inline int64_t end_of_span(const CodePanel& panel, int64_t pair, int64_t end) {
  return std::min(pair + kSpanPairs, end_of_group(panel, group_of(panel, 2 * pair), end));
}

/// Rows times the codes of the pairs [begin, end) of a panel. The rows begin with that pair and
/// must be readable up to 2 * (end - begin).
struct CodeTile {
  const bf16* a;
  int64_t a_stride;  // elements
  const CodePanel* panel;
  int64_t begin, end;
  const float* scales;  // of the groups of these pairs, as the kernels wrote them
  float* sums;          // [rows][kPanelColumns], contiguous
  bool accumulate;      // start from `sums` instead of zero
  int64_t prefetch;     // distance in bytes of codes that are read into L2 meanwhile; 0: none
};

/// What an instruction set provides to multiply codes without decoding them into memory.
struct CodeTileKernels {
  bool (*takes)(const CodeFormat&);
  /// Writes the scales of the groups of pairs [begin, end), [groups][kPanelColumns].
  void (*scales)(const CodePanel&, int64_t begin, int64_t end, int64_t prefetch, float* out);
  void (*multiply)(int64_t rows, const CodeTile&);
};
RAYMOE_DECLARE_KERNELS(CodeTileKernels, code_tile_kernels);

}  // namespace raymoe
