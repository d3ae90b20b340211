// Gates of results, written once on vec_f32.h.
#include "raymoe/gates.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

inline F32 activate(GateActivation activation, F32 x) {
  const F32 factor = sigmoid_of(x);
  return activation == GateActivation::kSilu ? mul(x, factor) : factor;
}

template <typename T>
void gate_values_rows(const GateValues& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* values = static_cast<const T*>(args.values) + row * args.values_stride;
    const T* gates = static_cast<const T*>(args.gates) + row * args.gates_stride;
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    if (args.width == 1) {
      for_lanes(args.num_gates, [&](int64_t i, auto part) {
        const F32 gate = rounded_to<T>(activate(args.activation, load(gates + i, part)));
        store(out + i, mul(load(values + i, part), gate), part);
      });
      continue;
    }
    for (int64_t n = 0; n < args.num_gates; ++n) {
      const F32 gate = rounded_to<T>(activate(args.activation, splat(to_float(gates[n]))));
      const int64_t first = n * args.width;
      for_lanes(args.width, [&](int64_t i, auto part) {
        store(out + first + i, mul(load(values + first + i, part), gate), part);
      });
    }
  }
}

template <typename T>
void norm_and_gate_rows(const NormAndGate& args, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t row = begin; row < end; ++row)
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const int64_t first = head * args.width;
      const T* values = static_cast<const T*>(args.values) + row * args.values_stride + first;
      const T* gates = static_cast<const T*>(args.gates) + row * args.gates_stride + first;
      T* out = static_cast<T*>(args.out) + row * args.out_stride + first;
      const F32 factor = splat(inverse_rms(values, args.width, args.eps));
      for_lanes(args.width, [&](int64_t i, auto part) {
        F32 normed = mul(load(values + i, part), factor);
        if (args.rounds_norm) normed = rounded_to<T>(normed);
        normed = mul(load(weight + i, part), normed);
        if (args.rounds_norm) normed = rounded_to<T>(normed);
        store(out + i, mul(normed, activate(args.activation, load(gates + i, part))), part);
      });
    }
}

template <typename T>
void gate_and_norm_rows(const GateAndNorm& args, int64_t begin, int64_t end) {
  float gated[kMaxGroupWidth];
  for (int64_t row = begin; row < end; ++row)
    for (int64_t group = 0; group < args.num_groups; ++group) {
      const int64_t first = group * args.width;
      const T* values = static_cast<const T*>(args.values) + row * args.values_stride + first;
      const T* weight = static_cast<const T*>(args.weight) + first;
      const T* gates = static_cast<const T*>(args.gates) + row * args.gates_stride + first;
      T* out = static_cast<T*>(args.out) + row * args.out_stride + first;
      for_lanes(args.width, [&](int64_t i, auto part) {
        const F32 gate = activate(GateActivation::kSilu, load(gates + i, part));
        store(gated + i, mul(load(values + i, part), gate), part);
      });
      const F32 factor = splat(inverse_rms(gated, args.width, args.eps));
      for_lanes(args.width, [&](int64_t i, auto part) {
        const F32 normed = rounded_to<T>(mul(load(gated + i, part), factor));
        store(out + i, mul(load(weight + i, part), normed), part);
      });
    }
}

}  // namespace

RAYMOE_DEFINE_KERNELS(GateKernels, gate_kernels) = {RAYMOE_FLOAT_KERNELS(gate_values_rows),
                                                    RAYMOE_FLOAT_KERNELS(norm_and_gate_rows),
                                                    RAYMOE_FLOAT_KERNELS(gate_and_norm_rows)};

}  // namespace raymoe
