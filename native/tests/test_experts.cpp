// Projections and experts on every instruction set against double precision, in memory of exactly
// the promised size so that the address sanitizer sees every read and write outside.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "check.h"
#include "gemm.h"
#include "parallel.h"
#include "raymoe/experts.h"
#include "raymoe/isa.h"
#include "raymoe/linear.h"
#include "raymoe/worker_pool.h"

using namespace raymoe;

namespace {

uint32_t random_state = 1;

float random_value() {
  random_state = random_state * 1664525u + 1013904223u;
  return static_cast<float>(random_state >> 8) / 8388608.0f - 1.0f;
}

std::vector<bf16> random_matrix(int64_t rows, int64_t columns, float scale) {
  std::vector<bf16> values(static_cast<size_t>(rows * columns));
  for (bf16& value : values) value = from_float<bf16>(random_value() * scale);
  return values;
}

struct Free {
  void operator()(bf16* data) const { std::free(data); }
};
using Packed = std::unique_ptr<bf16, Free>;

/// Packed weights are whole cache lines, so the aligned block has exactly their size.
Packed allocate(int64_t bytes) {
  return Packed(static_cast<bf16*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
}

WeightSource source(const bf16* data, int64_t outputs, int64_t inputs) {
  return {data, outputs, inputs, inputs, 1};
}

const uint8_t* bytes_of(const Packed& packed) {
  return reinterpret_cast<const uint8_t*>(packed.get());
}

double dot(const bf16* a, const bf16* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double{to_float(a[i])} * double{to_float(b[i])};
  return sum;
}

void check_linear(int64_t rows, int64_t inputs, int64_t outputs, bool has_bias) {
  const auto x = random_matrix(rows, inputs, 1), weight = random_matrix(outputs, inputs, 1);
  const auto bias = random_matrix(1, outputs, 1);
  const Packed packed = allocate(packed_bytes(outputs, inputs));
  pack_weight(source(weight.data(), outputs, inputs), packed.get());
  std::vector<bf16> out(static_cast<size_t>(rows * outputs));
  packed_linear({x.data(), inputs, rows, bytes_of(packed), nullptr, outputs, inputs,
                 has_bias ? bias.data() : nullptr, out.data(), outputs});
  std::vector<float> wide(out.size());
  packed_linear({x.data(), inputs, rows, bytes_of(packed), nullptr, outputs, inputs,
                 has_bias ? bias.data() : nullptr, nullptr, outputs, wide.data()});
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < outputs; ++column) {
      double want = dot(x.data() + row * inputs, weight.data() + column * inputs, inputs);
      if (has_bias) want += to_float(bias[static_cast<size_t>(column)]);
      CHECK_NEAR(to_float(out[static_cast<size_t>(row * outputs + column)]), want,
                 std::fabs(want) / 256 + 1e-4);
      CHECK_NEAR(wide[static_cast<size_t>(row * outputs + column)], want,
                 1e-6 * double(inputs) + 1e-5);
    }
}

struct Experts {
  int64_t hidden_size, expert_size, num_experts;
  Gating gating;
  std::vector<bf16> gate, up, down;
  Packed packed_gate_up, packed_down;
  std::vector<float> gate_up_bias, down_bias;  // empty for none

  Experts(int64_t hidden, int64_t expert, int64_t count, bool has_bias = false, Gating how = {})
      : hidden_size(hidden),
        expert_size(expert),
        num_experts(count),
        gating(how),
        gate(random_matrix(count * expert, hidden, 0.5f)),
        up(random_matrix(count * expert, hidden, 0.5f)),
        down(random_matrix(count * hidden, expert, 0.5f)),
        packed_gate_up(allocate(count * packed_gate_up_bytes(expert, hidden))),
        packed_down(allocate(count * packed_bytes(hidden, expert))) {
    const int64_t size = hidden * expert;
    if (has_bias) {
      gate_up_bias.resize(static_cast<size_t>(count * gate_panels() * kPanelColumns));
      down_bias.resize(static_cast<size_t>(count * num_panels(hidden) * kPanelColumns));
      for (float& value : gate_up_bias) value = random_value();
      for (float& value : down_bias) value = random_value();
    }
    for (int64_t e = 0; e < count; ++e) {
      pack_gate_up(source(gate.data() + e * size, expert, hidden),
                   source(up.data() + e * size, expert, hidden),
                   packed_gate_up.get() + e * packed_gate_up_bytes(expert, hidden) / 2);
      pack_weight(source(down.data() + e * size, hidden, expert),
                  packed_down.get() + e * packed_bytes(hidden, expert) / 2);
    }
  }

  int64_t gate_panels() const { return ceil_div(expert_size, kPanelColumns / 2); }

  /// Of output f of the gate (part 0) or of up (part 1).
  double gate_bias(int64_t expert, int64_t f, int64_t part) const {
    if (gate_up_bias.empty()) return 0;
    const int64_t half = kPanelColumns / 2, panel = expert * gate_panels() + f / half;
    return gate_up_bias[static_cast<size_t>(panel * kPanelColumns + part * half + f % half)];
  }

  void add(const bf16* x, int64_t expert, double weight, double* sums) const {
    std::vector<double> middle(static_cast<size_t>(expert_size));
    for (int64_t f = 0; f < expert_size; ++f) {
      const int64_t row = (expert * expert_size + f) * hidden_size;
      const double limit = gating.limit;
      const double value =
          std::min(dot(x, gate.data() + row, hidden_size) + gate_bias(expert, f, 0),
                   double{gating.gate_limit});
      const double other = dot(x, up.data() + row, hidden_size) + gate_bias(expert, f, 1);
      const double power = gating.gain * value * (1 + gating.cubic * value * value);
      middle[static_cast<size_t>(f)] = value / (1 + std::exp(-power)) *
                                       (std::clamp(other, -limit, limit) + gating.offset);
    }
    const int64_t columns = num_panels(hidden_size) * kPanelColumns;
    for (int64_t h = 0; h < hidden_size && !down_bias.empty(); ++h)
      sums[h] += weight * down_bias[static_cast<size_t>(expert * columns + h)];
    for (int64_t h = 0; h < hidden_size; ++h)
      for (int64_t f = 0; f < expert_size; ++f)
        sums[h] +=
            weight * middle[static_cast<size_t>(f)] *
            to_float(down[static_cast<size_t>((expert * hidden_size + h) * expert_size + f)]);
  }
};

void check_experts(const Experts& experts, int64_t num_tokens, int64_t top_k, bool is_dense) {
  const int64_t hidden_size = experts.hidden_size;
  const auto hidden = random_matrix(num_tokens, hidden_size, 1);
  std::vector<int32_t> ids(static_cast<size_t>(num_tokens * top_k));
  std::vector<float> weights(ids.size());
  for (size_t row = 0; row < ids.size(); ++row) {
    const auto token = static_cast<int64_t>(row) / top_k, slot = static_cast<int64_t>(row) % top_k;
    ids[row] = static_cast<int32_t>((token * token + slot) % experts.num_experts);
    weights[row] = random_value() + 1.5f;
  }
  std::vector<bf16> out(hidden.size());
  fused_experts({{bytes_of(experts.packed_gate_up), bytes_of(experts.packed_down), nullptr, nullptr,
                  experts.num_experts, hidden_size, experts.expert_size,
                  experts.gate_up_bias.empty() ? nullptr : experts.gate_up_bias.data(),
                  experts.down_bias.empty() ? nullptr : experts.down_bias.data()},
                 hidden.data(),
                 hidden_size,
                 is_dense ? nullptr : ids.data(),
                 is_dense ? nullptr : weights.data(),
                 num_tokens,
                 is_dense ? 1 : top_k,
                 out.data(),
                 hidden_size,
                 experts.gating});
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::vector<double> want(static_cast<size_t>(hidden_size), 0.0);
    const bf16* x = hidden.data() + token * hidden_size;
    for (int64_t slot = 0; slot < (is_dense ? 1 : top_k); ++slot) {
      const auto row = static_cast<size_t>(token * top_k + slot);
      experts.add(x, is_dense ? 0 : ids[row], is_dense ? 1.0 : double{weights[row]}, want.data());
    }
    double norm = 0;
    for (double value : want) norm = std::max(norm, std::fabs(value));
    for (int64_t h = 0; h < hidden_size; ++h)
      CHECK_NEAR(to_float(out[static_cast<size_t>(token * hidden_size + h)]),
                 want[static_cast<size_t>(h)], norm / 64 + 1e-3);
  }
}

void projections_are_right() {
  for (const bool has_bias : {false, true}) {
    check_linear(0, 4, 4, has_bias);
    check_linear(1, 1, 1, has_bias);
    check_linear(3, 7, 33, has_bias);
    check_linear(14, 64, 32, has_bias);
    check_linear(31, 4101, 17, has_bias);
    check_linear(270, 65, 100, has_bias);
  }
}

void experts_are_right() {
  const Experts odd(17, 13, 5), one(1, 1, 1), even(64, 48, 8), deep(10, 4098, 2);
  const Experts narrow(50, 8, 6);
  for (const bool is_dense : {false, true}) {
    check_experts(one, 1, 1, is_dense);
    check_experts(odd, 0, 2, is_dense);
    check_experts(odd, 1, 3, is_dense);
    check_experts(odd, 1200, 2, is_dense);
    check_experts(even, 90, 2, is_dense);
    check_experts(deep, 9, 2, is_dense);
    check_experts(narrow, 700, 3, is_dense);
  }
  const Gating limited{1.7f, 0.0f, 0.6f, 1.0f, 0.4f}, gelu{1.5957691f, 0.044715f};
  check_experts(Experts(64, 48, 8, false, gelu), 90, 2, true);
  check_experts(Experts(33, 16, 3, true, gelu), 20, 1, false);
  check_experts(Experts(17, 13, 5, true), 40, 3, false);
  check_experts(Experts(64, 48, 8, true, limited), 90, 2, false);
  check_experts(Experts(33, 16, 3, false, limited), 20, 1, false);
}

void bad_expert_ids_are_refused() {
  const Experts experts(4, 4, 2);
  const auto hidden = random_matrix(2, 4, 1);
  std::vector<bf16> out(8);
  const std::vector<float> weights{1, 1};
  for (const int32_t bad : {-1, 2}) {
    const std::vector<int32_t> ids{0, bad};
    CHECK_THROWS(fused_experts({{bytes_of(experts.packed_gate_up), bytes_of(experts.packed_down),
                                 nullptr, nullptr, 2, 4, 4},
                                hidden.data(),
                                4,
                                ids.data(),
                                weights.data(),
                                2,
                                1,
                                out.data(),
                                4}));
  }
}

void every_task_is_taken_once_from_own_or_other_ranges() {
  TaskRanges ranges;
  ranges.resize(3);
  ranges.set_even(100);
  std::vector<int> taken(100, 0);
  for (int i = 0; i < 10; ++i) CHECK(ranges.take(1) == 33 + i);
  for (int64_t task; (task = ranges.take(0)) >= 0;) ++taken[static_cast<size_t>(task)];
  CHECK(std::count(taken.begin(), taken.end(), 1) == 90);
  CHECK(ranges.take(1) == -1 && ranges.take(2) == -1);
  WorkerPool pool(3);
  std::vector<std::atomic<int>> counts(10000);
  ranges.set_even(10000);
  pool.run([&](int worker) {
    for (int64_t task; (task = ranges.take(worker)) >= 0;) counts[static_cast<size_t>(task)]++;
  });
  for (const auto& count : counts) CHECK(count == 1);
}

}  // namespace

int main() {
  every_task_is_taken_once_from_own_or_other_ranges();
  for (const int num_threads : {3, 1, 2}) {
    set_num_threads(num_threads);
    for (const Isa isa : supported_isas()) {
      if (isa == Isa::kAvx2 || isa == Isa::kAvx512) continue;  // these use the scalar kernels
      set_isa(isa);
      projections_are_right();
      experts_are_right();
      bad_expert_ids_are_refused();
    }
  }
  return 0;
}
