// What gates do to the results of attention and of recurrent layers, row by row.
#pragma once

#include <cstdint>

#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

constexpr int64_t kMaxGroupWidth = 16384;  // of GateAndNorm

enum class GateActivation : int32_t { kSigmoid = 0, kSilu = 1 };

/// out = round(values * round(activation(gates))).
struct GateValues {
  const void* values;  // [T, num_gates * width]
  const void* gates;   // [T, num_gates]
  void* out;           // [T, num_gates * width]
  int64_t values_stride, gates_stride, out_stride, num_gates, width;
  GateActivation activation;
};

/// out = round(norm * activation(gates)), with one RMS norm per head. The norm is rounded before
/// and after its weight, or not at all.
struct NormAndGate {
  const void* values;  // [T, num_heads * width]
  const void* weight;  // [width]
  const void* gates;   // [T, num_heads * width]
  void* out;           // [T, num_heads * width]
  int64_t values_stride, gates_stride, out_stride, num_heads, width;
  float eps;
  bool rounds_norm;
  GateActivation activation;
};

/// out = round(weight * round(RMS norm of values * silu(gates))), with one norm per group.
struct GateAndNorm {
  const void* values;  // [T, num_groups * width]
  const void* weight;  // [num_groups * width]
  const void* gates;   // [T, num_groups * width]
  void* out;           // [T, num_groups * width]
  int64_t values_stride, gates_stride, out_stride, num_groups, width;
  float eps;
};

/// Check shapes, then split the tokens over the worker pool.
void gate_values(const TensorView& values, const TensorView& gates, GateActivation activation,
                 const TensorView& out);
void norm_and_gate(const TensorView& values, const TensorView& weight, const TensorView& gates,
                   float eps, bool rounds_norm, GateActivation activation, const TensorView& out);
void gate_and_norm(const TensorView& values, const TensorView& weight, const TensorView& gates,
                   int64_t num_groups, float eps, const TensorView& out);

struct GateKernels {
  FloatKernels<GateValues> gate_values;
  FloatKernels<NormAndGate> norm_and_gate;
  FloatKernels<GateAndNorm> gate_and_norm;
};
RAYMOE_DECLARE_KERNELS(GateKernels, gate_kernels);

}  // namespace raymoe
