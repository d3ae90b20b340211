// Gates of results: checks, and rows shared among the workers.
#include "raymoe/gates.h"

#include <stdexcept>
#include <string>

#include "parallel.h"

namespace raymoe {
namespace {

constexpr int64_t kActivationCost = 8;  // of an element, in elements that are copied

/// Checks that `view` is [T, columns] of the type of `values`.
void expect_like(const std::string& what, const TensorView& view, const TensorView& values,
                 int64_t columns) {
  view.expect(what.c_str(), values.dtype(), 2)
      .expect_size(what.c_str(), 0, values.size(0))
      .expect_size(what.c_str(), 1, columns);
}

/// The width of each of `count` equal parts of the columns.
int64_t width_of(const std::string& operation, const TensorView& values, int64_t count) {
  if (count < 1 || values.size(1) % count != 0)
    throw std::invalid_argument(operation + ": values have " + std::to_string(values.size(1)) +
                                " columns, which are not " + std::to_string(count) +
                                " equal parts");
  return values.size(1) / count;
}

}  // namespace

void gate_values(const TensorView& values, const TensorView& gates, GateActivation activation,
                 const TensorView& out) {
  const auto kernel = gate_kernels().gate_values.of(values.dtype(), "gate_values: values");
  values.expect_rank("gate_values: values", 2);
  gates.expect_rank("gate_values: gates", 2);
  const int64_t num_gates = gates.size(1);
  expect_like("gate_values: gates", gates, values, num_gates);
  expect_like("gate_values: out", out, values, values.size(1));
  const GateValues args{values.raw(),      gates.raw(),     out.raw(),
                        values.stride(0),  gates.stride(0), out.stride(0),
                        num_gates,         width_of("gate_values", values, num_gates),
                        activation};
  for_row_ranges(values.size(0), values.size(1) + kActivationCost * num_gates,
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void norm_and_gate(const TensorView& values, const TensorView& weight, const TensorView& gates,
                   float eps, bool rounds_norm, GateActivation activation, const TensorView& out) {
  const auto kernel = gate_kernels().norm_and_gate.of(values.dtype(), "norm_and_gate: values");
  values.expect_rank("norm_and_gate: values", 2);
  weight.expect("norm_and_gate: weight", values.dtype(), 1);
  const int64_t width = weight.size(0), num_heads = width == 0 ? 0 : values.size(1) / width;
  width_of("norm_and_gate", values, num_heads);
  weight.expect_size("norm_and_gate: weight", 0, values.size(1) / num_heads);
  expect_like("norm_and_gate: gates", gates, values, values.size(1));
  expect_like("norm_and_gate: out", out, values, values.size(1));
  const NormAndGate args{values.raw(),    weight.raw(), gates.raw(), out.raw(), values.stride(0),
                         gates.stride(0), out.stride(0), num_heads,   width,     eps,
                         rounds_norm,     activation};
  for_row_ranges(values.size(0), (1 + kActivationCost) * values.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void gate_and_norm(const TensorView& values, const TensorView& weight, const TensorView& gates,
                   int64_t num_groups, float eps, const TensorView& out) {
  const auto kernel = gate_kernels().gate_and_norm.of(values.dtype(), "gate_and_norm: values");
  values.expect_rank("gate_and_norm: values", 2);
  const int64_t width = width_of("gate_and_norm", values, num_groups);
  if (width > kMaxGroupWidth)
    throw std::invalid_argument("gate_and_norm: groups of " + std::to_string(width) +
                                " columns, at most " + std::to_string(kMaxGroupWidth));
  weight.expect("gate_and_norm: weight", values.dtype(), 1)
      .expect_size("gate_and_norm: weight", 0, values.size(1));
  expect_like("gate_and_norm: gates", gates, values, values.size(1));
  expect_like("gate_and_norm: out", out, values, values.size(1));
  const GateAndNorm args{values.raw(),     weight.raw(),    gates.raw(),   out.raw(),
                         values.stride(0), gates.stride(0), out.stride(0), num_groups,
                         width,            eps};
  for_row_ranges(values.size(0), (1 + kActivationCost) * values.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace raymoe
