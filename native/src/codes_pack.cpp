// Packing of quantised matrices into panels of codes (layout: code_panels.h).
#include <algorithm>
#include <array>
#include <cstring>

#include "code_panels.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

/// Where the codes, scales and zero points of one column come from.
struct Column {
  const CodeSource* source = nullptr;  // null: zeros
  int64_t output = 0;
};
using Columns = std::array<Column, kPanelColumns>;

Column column_of(const CodeSource& source, int64_t output) {
  return output < source.outputs ? Column{&source, output} : Column{};
}

uint8_t code_at(const Column& column, int64_t input) {
  if (column.source == nullptr || input >= column.source->inputs) return 0;
  return column.source
      ->codes[column.output * column.source->output_stride + input * column.source->input_stride];
}

void pack_nibbles(const Columns& columns, int64_t pair, uint8_t* out) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t byte = 0; byte < kHalfPanel; ++byte) {
      const int64_t below = half * kHalfPanel + byte / 2, input = 2 * pair + byte % 2;
      const int code = code_at(columns[static_cast<size_t>(below)], input) |
                       code_at(columns[static_cast<size_t>(below + 8)], input) << 4;
      *out++ = static_cast<uint8_t>(code);
    }
}

void pack_bytes(const Columns& columns, int64_t pair, uint8_t* out) {
  for (const Column& column : columns)
    for (int64_t half_pair = 0; half_pair < 2; ++half_pair)
      *out++ = code_at(column, 2 * pair + half_pair);
}

void pack_scales(const CodeFormat& format, const Columns& columns, int64_t group, uint8_t* out) {
  const int64_t item = scale_bytes(format.kind);
  const size_t step = format.shares_scales ? kHalfPanel : 1;
  for (size_t index = 0; index < columns.size(); index += step, out += item) {
    const auto& [source, output] = columns[index];
    std::memset(out, 0, static_cast<size_t>(item));
    if (source == nullptr) continue;
    const int64_t place = output / source->scale_rows * source->scale_output_stride +
                          group * source->scale_group_stride;
    std::memcpy(out, source->scales + place * item, static_cast<size_t>(item));
  }
}

uint8_t zero_at(const Column& column, int64_t group) {
  const CodeSource* source = column.source;
  if (source == nullptr) return 0;
  return source
      ->zeros[column.output * source->zero_output_stride + group * source->zero_group_stride];
}

void pack_zeros(const Columns& columns, int64_t group, uint8_t* out) {
  for (size_t column = 0; column < kHalfPanel; ++column)
    *out++ = static_cast<uint8_t>(zero_at(columns[column], group) |
                                  zero_at(columns[column + kHalfPanel], group) << 4);
}

void pack_panel(const CodeFormat& format, const CodeLayout& layout, const Columns& columns,
                int64_t inputs, uint8_t* panel) {
  for (int64_t pair = 0; pair < num_pairs(inputs); ++pair) {
    uint8_t* out = panel + pair * pair_bytes(format.kind);
    is_four_bits(format.kind) ? pack_nibbles(columns, pair, out) : pack_bytes(columns, pair, out);
  }
  const int64_t scales = layout.scales_of_group * scale_bytes(format.kind);
  for (int64_t group = 0; group < layout.num_groups; ++group) {
    pack_scales(format, columns, group, panel + layout.scales + group * scales);
    if (format.has_zeros) pack_zeros(columns, group, panel + layout.zeros + group * kHalfPanel);
  }
}

void pack_order(const CodeSource& source, uint8_t* packed) {
  auto* order = reinterpret_cast<int32_t*>(packed);
  for (int64_t input = 0; input < 2 * num_pairs(source.inputs); ++input)
    order[input] = source.order[std::min(input, source.inputs - 1)];
}

/// Columns of a panel from `left` and, where there is a `right`, half of them from it.
Columns columns_of(const CodeSource& left, const CodeSource* right, int64_t panel) {
  Columns columns;
  const int64_t half = right == nullptr ? kPanelColumns : kHalfPanel;
  for (int64_t column = 0; column < half; ++column) {
    const auto index = static_cast<size_t>(column);
    columns[index] = column_of(left, panel * half + column);
    if (right != nullptr) columns[index + kHalfPanel] = column_of(*right, panel * half + column);
  }
  return columns;
}

void pack(const CodeFormat& format, const CodeSource& left, const CodeSource* right,
          uint8_t* packed) {
  const CodeLayout layout(format, left.inputs);
  const int64_t columns = right == nullptr ? kPanelColumns : kHalfPanel;
  if (format.has_order) pack_order(left, packed);
  worker_pool()->for_each(ceil_div(left.outputs, columns), 1, [&](int, int64_t panel) {
    pack_panel(format, layout, columns_of(left, right, panel), left.inputs,
               packed + layout.panels + panel * layout.panel_bytes);
  });
}

}  // namespace

int64_t packed_codes_bytes(const CodeFormat& format, int64_t outputs, int64_t inputs) {
  const CodeLayout layout(format, inputs);
  return layout.panels + num_panels(outputs) * layout.panel_bytes;
}

void pack_codes(const CodeFormat& format, const CodeSource& weight, uint8_t* packed) {
  pack(format, weight, nullptr, packed);
}

void pack_gate_up_codes(const CodeFormat& format, const CodeSource& gate, const CodeSource& up,
                        uint8_t* packed) {
  pack(format, gate, &up, packed);
}

}  // namespace raymoe
