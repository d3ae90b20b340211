// Quantised matrices: checks of tensors, and packing into panels of codes (layout: panels.h).
#include "raymoe/codes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "int8.h"
#include "panels.h"
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

/// Four inputs of each column, plus 128.
void pack_word(const Columns& columns, int64_t word, uint8_t* out) {
  for (const Column& column : columns)
    for (int64_t input = 4 * word; input < 4 * word + 4; ++input)
      *out++ = static_cast<uint8_t>(code_at(column, input) ^ kInt8Zero);
}

void pack_codes_of(CodeKind kind, const Columns& columns, int64_t inputs, uint8_t* panel) {
  if (kind == CodeKind::kInt8) {
    for (int64_t word = 0; word < ceil_div(inputs, 4); ++word)
      pack_word(columns, word, panel + word * 4 * kPanelColumns);
    return;
  }
  for (int64_t pair = 0; pair < num_pairs(inputs); ++pair) {
    uint8_t* out = panel + pair * pair_bytes(kind);
    is_four_bits(kind) ? pack_nibbles(columns, pair, out) : pack_bytes(columns, pair, out);
  }
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

/// The multiplier and the divisor of each half of the columns; those of absent columns are 1.
void pack_factors(const Columns& columns, uint8_t* out) {
  for (size_t column = 0; column < columns.size(); column += kHalfPanel) {
    const CodeSource* source = columns[column].source;
    const float factors[2] = {source == nullptr ? 1.0f : source->multiplier,
                              source == nullptr ? 1.0f : source->divisor};
    std::memcpy(out, factors, sizeof factors);
    out += sizeof factors;
  }
}

void pack_panel(const CodeFormat& format, const CodeLayout& layout, const Columns& columns,
                int64_t inputs, uint8_t* panel) {
  pack_codes_of(format.kind, columns, inputs, panel);
  const int64_t scales = layout.scales_of_group * scale_bytes(format.kind);
  for (int64_t group = 0; group < layout.num_groups; ++group) {
    pack_scales(format, columns, group, panel + layout.scales + group * scales);
    if (format.has_zeros) pack_zeros(columns, group, panel + layout.zeros + group * kHalfPanel);
  }
  if (has_factors(format.kind)) pack_factors(columns, panel + layout.factors);
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

struct NamedKind {
  const char* name;
  CodeKind kind;
  DType scales;
  bool is_rotated = false;
};

constexpr NamedKind kKinds[] = {
    {"int4_float16", CodeKind::kInt4Float16, DType::kFloat16},
    {"int4_bfloat16", CodeKind::kInt4BFloat16, DType::kBFloat16},
    {"e2m1", CodeKind::kE2m1, DType::kUInt8},
    {"e2m1_e4m3", CodeKind::kE2m1E4m3, DType::kUInt8},
    {"e4m3", CodeKind::kE4m3, DType::kFloat32},
    {"e4m3_e8m0", CodeKind::kE4m3E8m0, DType::kUInt8},
    {"int8", CodeKind::kInt8, DType::kFloat32},
    {"rotated_int8", CodeKind::kInt8, DType::kFloat32, true},
};

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

DType scale_dtype(CodeKind kind) {
  for (const NamedKind& known : kKinds)
    if (known.kind == kind) return known.scales;
  return DType::kFloat32;
}

void expect(const std::string& what, const TensorView& view, DType dtype, int64_t rank) {
  if (view.dtype() != dtype || view.rank() != rank)
    fail(what + " has dtype " + dtype_name(view.dtype()) + " and " + std::to_string(view.rank()) +
         " dimensions, expected " + dtype_name(dtype) + " and " + std::to_string(rank));
}

void set_scales(const std::string& what, const CodeFormat& format, const CodeTensors& weight,
                CodeSource* source) {
  const std::string name = what + " scales";
  expect(name, weight.scales, scale_dtype(format.kind), 2);
  if (weight.scale_rows < 1 || (format.shares_scales && weight.scale_rows % kHalfPanel != 0))
    fail(name + " are of " + std::to_string(weight.scale_rows) +
         " outputs each, which do not begin with those of a half panel");
  weight.scales.expect_size(name.c_str(), 0, ceil_div(source->outputs, weight.scale_rows));
  weight.scales.expect_size(name.c_str(), 1, source->num_groups);
  source->scales = static_cast<const uint8_t*>(weight.scales.raw());
  source->scale_rows = weight.scale_rows;
  source->scale_output_stride = weight.scales.stride(0);
  source->scale_group_stride = weight.scales.stride(1);
}

void set_zeros(const std::string& what, const TensorView& zeros, CodeSource* source) {
  const std::string name = what + " zeros";
  expect(name, zeros, DType::kUInt8, 2);
  zeros.expect_size(name.c_str(), 0, source->outputs);
  zeros.expect_size(name.c_str(), 1, source->num_groups);
  source->zeros = zeros.data<uint8_t>();
  source->zero_output_stride = zeros.stride(0);
  source->zero_group_stride = zeros.stride(1);
}

void set_order(const std::string& what, const TensorView& order, CodeSource* source) {
  const std::string name = what + " order";
  order.expect(name.c_str(), DType::kInt32, 1).expect_size(name.c_str(), 0, source->inputs);
  source->order = order.data<int32_t>();
  for (int64_t input = 0; input < source->inputs; ++input)
    if (source->order[input] < 0 || source->order[input] >= source->num_groups)
      fail(name + " has group " + std::to_string(source->order[input]) + " for input " +
           std::to_string(input) + ", there are " + std::to_string(source->num_groups));
}

CodeSource source_of(const std::string& what, const CodeFormat& format, const CodeTensors& weight) {
  const TensorView& codes = weight.codes;
  expect(what + " codes", codes, DType::kUInt8, 2);
  if (codes.size(0) < 1 || codes.size(1) < 1) fail(what + " is empty");
  if (format.has_zeros != (weight.zeros != nullptr) ||
      format.has_order != (weight.order != nullptr))
    fail(what + ": zero points and order must be given where the format has them");
  CodeSource source{};
  source.codes = codes.data<uint8_t>();
  source.outputs = codes.size(0);
  source.inputs = codes.size(1);
  source.output_stride = codes.stride(0);
  source.input_stride = codes.stride(1);
  source.num_groups = ceil_div(source.inputs, format.group_size);
  if (format.kind == CodeKind::kInt8 && (source.num_groups != 1 || source.inputs > kMaxInt8Inputs))
    fail(what + ": int8 takes a scale for each output and at most " +
         std::to_string(kMaxInt8Inputs) + " inputs");
  source.multiplier = weight.multiplier;
  source.divisor = weight.divisor;
  set_scales(what, format, weight, &source);
  if (format.has_zeros) set_zeros(what, *weight.zeros, &source);
  if (format.has_order) set_order(what, *weight.order, &source);
  return source;
}

}  // namespace

uint8_t* packed_data(const char* what, const TensorView& packed, int64_t num_bytes) {
  packed.expect(what, DType::kUInt8, 1).expect_size(what, 0, num_bytes).expect_contiguous(what);
  if (reinterpret_cast<uintptr_t>(packed.raw()) % kPackedAlignment != 0)
    fail(std::string(what) + " must be aligned to " + std::to_string(kPackedAlignment) + " bytes");
  return packed.data<uint8_t>();
}

int64_t packed_codes_bytes(const CodeFormat& format, int64_t outputs, int64_t inputs) {
  const CodeLayout layout(format, inputs);
  return layout.panels + num_panels(outputs) * layout.panel_bytes;
}

bool is_decoded(const CodeFormat& format) {
  return !has_spans(format) || !code_tile_kernels().takes(format);
}

void pack_codes(const CodeFormat& format, const CodeSource& weight, uint8_t* packed) {
  pack(format, weight, nullptr, packed);
}

void pack_gate_up_codes(const CodeFormat& format, const CodeSource& gate, const CodeSource& up,
                        uint8_t* packed) {
  pack(format, gate, &up, packed);
}

CodeFormat make_code_format(const std::string& kind, int64_t group_size, bool shares_scales,
                            bool has_zeros, bool has_order) {
  if (group_size < 1) fail("code format: group_size is " + std::to_string(group_size));
  for (const NamedKind& known : kKinds)
    if (kind == known.name)
      return {known.kind, group_size, shares_scales, has_zeros, has_order, known.is_rotated};
  fail("code format: unknown kind '" + kind + "'");
}

void pack_codes_op(const CodeFormat& format, const CodeTensors& weight, const TensorView& packed) {
  const CodeSource source = source_of("pack_codes: weight", format, weight);
  pack_codes(format, source,
             packed_data("pack_codes: packed", packed,
                         packed_codes_bytes(format, source.outputs, source.inputs)));
}

void pack_gate_up_codes_op(const CodeFormat& format, const CodeTensors& gate, const CodeTensors& up,
                           const TensorView& packed) {
  const CodeSource left = source_of("pack_gate_up_codes: gate", format, gate);
  const CodeSource right = source_of("pack_gate_up_codes: up", format, up);
  up.codes.expect_size("pack_gate_up_codes: up", 0, left.outputs);
  up.codes.expect_size("pack_gate_up_codes: up", 1, left.inputs);
  if (format.has_order && !std::equal(left.order, left.order + left.inputs, right.order))
    fail("pack_gate_up_codes: gate and up have different orders");
  pack_gate_up_codes(format, left, right,
                     packed_data("pack_gate_up_codes: packed", packed,
                                 packed_gate_up_codes_bytes(format, left.outputs, left.inputs)));
}

int64_t packed_gate_up_codes_bytes(const CodeFormat& format, int64_t expert_size,
                                   int64_t hidden_size) {
  return packed_codes_bytes(format, ceil_div(expert_size, kHalfPanel) * kPanelColumns, hidden_size);
}

}  // namespace raymoe
