// Checks and pointers of quantised matrices on tensors.
#include "raymoe/code_ops.h"

#include <algorithm>
#include <stdexcept>

#include "code_panels.h"

namespace raymoe {
namespace {

struct NamedKind {
  const char* name;
  CodeKind kind;
  DType scales;
};

constexpr NamedKind kKinds[] = {
    {"int4_float16", CodeKind::kInt4Float16, DType::kFloat16},
    {"int4_bfloat16", CodeKind::kInt4BFloat16, DType::kBFloat16},
    {"e2m1", CodeKind::kE2m1, DType::kUInt8},
    {"e4m3", CodeKind::kE4m3, DType::kFloat32},
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
  set_scales(what, format, weight, &source);
  if (format.has_zeros) set_zeros(what, *weight.zeros, &source);
  if (format.has_order) set_order(what, *weight.order, &source);
  return source;
}

uint8_t* packed_data(const char* what, const TensorView& packed, int64_t num_bytes) {
  packed.expect(what, DType::kUInt8, 1).expect_size(what, 0, num_bytes).expect_contiguous(what);
  if (reinterpret_cast<uintptr_t>(packed.raw()) % 64 != 0)
    fail(std::string(what) + " must be aligned to 64 bytes");
  return packed.data<uint8_t>();
}

}  // namespace

CodeFormat make_code_format(const std::string& kind, int64_t group_size, bool shares_scales,
                            bool has_zeros, bool has_order) {
  if (group_size < 1) fail("code format: group_size is " + std::to_string(group_size));
  for (const NamedKind& known : kKinds)
    if (kind == known.name) return {known.kind, group_size, shares_scales, has_zeros, has_order};
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
