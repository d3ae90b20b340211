// Convolutions and scans on every instruction set, on buffers without slack, against float64.
#include <cmath>
#include <memory>
#include <vector>

#include "check.h"
#include "raymoe/state.h"
#include "raymoe/worker_pool.h"

using raymoe::TensorView;

namespace {

/// A tensor in memory of exactly its size, so that the address sanitizer sees every overrun.
template <typename T>
struct Tensor {
  explicit Tensor(std::vector<int64_t> shape_in) : shape(std::move(shape_in)) {
    for (int64_t extent : shape) count *= extent;
    data.reset(new T[static_cast<size_t>(count)]());
  }
  TensorView view() const {
    std::vector<int64_t> strides(shape.size());
    int64_t step = 1;
    for (size_t axis = shape.size(); axis-- > 0;) {
      strides[axis] = step;
      step *= shape[axis];
    }
    return TensorView(data.get(), raymoe::DTypeOf<T>::value, shape, strides);
  }
  T& operator[](int64_t i) { return data[static_cast<size_t>(i)]; }

  std::vector<int64_t> shape;
  int64_t count = 1;
  std::unique_ptr<T[]> data;
};

Tensor<float> random(std::vector<int64_t> shape, uint32_t seed, float low, float high) {
  Tensor<float> tensor(std::move(shape));
  for (int64_t i = 0; i < tensor.count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    tensor[i] = low + (high - low) * static_cast<float>(seed >> 8) / 16777216.0f;
  }
  return tensor;
}

/// One sequence with a past and `tokens` new tokens, in slot 1 of 2.
struct Step {
  explicit Step(int32_t tokens) : starts({2}), contexts({1}), slots({1}) {
    starts[1] = tokens;
    contexts[0] = tokens + 5;
    slots[0] = 1;
  }
  Tensor<int32_t> starts, contexts, slots;
};

void scan_matches_float64(int64_t tokens, int64_t rows, int64_t columns, bool per_channel,
                          bool delta) {
  // One token of many heads: a task has several, and reads the next while it writes one.
  const int64_t heads = tokens == 1 ? 32 : 2, size = rows * columns;
  auto query = random({tokens, 1, rows}, 1, -1, 1), key = random({tokens, 1, rows}, 2, -1, 1);
  auto value = random({tokens, heads, columns}, 3, -1, 1);
  auto decay = per_channel ? random({tokens, heads, rows}, 4, -1, 0)
                           : random({tokens, heads}, 4, -1, 0);
  auto gain = random({tokens, heads}, 5, 0, 1);
  auto states = random({2, heads, rows, columns}, 6, -1, 1);
  std::vector<double> state(states.data.get() + heads * size, states.data.get() + 2 * heads * size);
  Tensor<float> out({tokens, heads, columns});
  Step step(static_cast<int32_t>(tokens));
  const TensorView starts = step.starts.view(), contexts = step.contexts.view();
  const TensorView slots = step.slots.view(), views[] = {query.view(), key.view(),  value.view(),
                                                         decay.view(), gain.view(), states.view()};
  raymoe::scan({views[0], views[1], views[2], views[3], views[4], views[5]},
               {starts, contexts, slots}, {0.25, delta, true}, out.view());
  for (int64_t t = 0; t < tokens; ++t) {
    double query_norm = 1e-6, key_norm = 1e-6;
    for (int64_t k = 0; k < rows; ++k) {
      query_norm += std::pow(query[t * rows + k], 2.0);
      key_norm += std::pow(key[t * rows + k], 2.0);
    }
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t v = 0; v < columns; ++v) {
        double* column = state.data() + head * size + v;
        double seen = 0, sum = 0;
        for (int64_t k = 0; k < rows; ++k) {
          const int64_t at = t * heads + head;
          column[k * columns] *= std::exp(double{decay[per_channel ? at * rows + k : at]});
          seen += column[k * columns] * key[t * rows + k] / std::sqrt(key_norm);
        }
        const double change = value[(t * heads + head) * columns + v] - (delta ? seen : 0);
        for (int64_t k = 0; k < rows; ++k) {
          column[k * columns] +=
              gain[t * heads + head] * change * key[t * rows + k] / std::sqrt(key_norm);
          sum += column[k * columns] * query[t * rows + k] / std::sqrt(query_norm) * 0.25;
        }
        CHECK_NEAR(out[(t * heads + head) * columns + v], sum, 1e-5);
      }
  }
  for (int64_t i = 0; i < heads * size; ++i)
    CHECK_NEAR(states[heads * size + i], state[static_cast<size_t>(i)], 1e-5);
}

/// States of bfloat16 equal those of float32 from the same values, rounded at the end of the step.
void bf16_states_round_float32(int64_t tokens, int64_t rows, int64_t columns, bool per_channel) {
  const int64_t heads = tokens == 1 ? 32 : 2;
  auto query = random({tokens, 1, rows}, 1, -1, 1), key = random({tokens, 1, rows}, 2, -1, 1);
  auto value = random({tokens, heads, columns}, 3, -1, 1);
  auto decay = per_channel ? random({tokens, heads, rows}, 4, -1, 0)
                           : random({tokens, heads}, 4, -1, 0);
  auto gain = random({tokens, heads}, 5, 0, 1);
  auto wide = random({2, heads, rows, columns}, 6, -1, 1);
  Tensor<raymoe::bf16> narrow(wide.shape);
  for (int64_t i = 0; i < wide.count; ++i) {
    narrow[i] = raymoe::from_float<raymoe::bf16>(wide[i]);
    wide[i] = raymoe::to_float(narrow[i]);
  }
  Tensor<float> out({tokens, heads, columns}), narrow_out({tokens, heads, columns});
  Step step(static_cast<int32_t>(tokens));
  const TensorView starts = step.starts.view(), contexts = step.contexts.view();
  const TensorView slots = step.slots.view(), inputs[] = {query.view(), key.view(), value.view(),
                                                          decay.view(), gain.view()};
  const auto run = [&](const TensorView& states, const TensorView& result) {
    raymoe::scan({inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], states},
                 {starts, contexts, slots}, {0.25, true, true}, result);
  };
  run(wide.view(), out.view());
  run(narrow.view(), narrow_out.view());
  for (int64_t i = 0; i < out.count; ++i) CHECK(out[i] == narrow_out[i]);
  for (int64_t i = 0; i < wide.count; ++i)
    CHECK(raymoe::from_float<raymoe::bf16>(wide[i]).bits == narrow[i].bits);
}

void convolution_matches_float64(int64_t tokens, int64_t channels, int64_t taps) {
  auto inputs = random({tokens, channels}, 1, -1, 1), weight = random({taps, channels}, 2, -1, 1);
  auto states = random({2, taps - 1, channels}, 3, -1, 1);
  std::vector<float> rows(states.data.get() + (taps - 1) * channels,
                          states.data.get() + 2 * (taps - 1) * channels);
  rows.insert(rows.end(), inputs.data.get(), inputs.data.get() + inputs.count);
  Tensor<float> out({tokens, channels});
  Step step(static_cast<int32_t>(tokens));
  const TensorView starts = step.starts.view(), contexts = step.contexts.view();
  const TensorView slots = step.slots.view();
  raymoe::causal_conv(inputs.view(), weight.view(), nullptr, states.view(),
                      {starts, contexts, slots}, true, out.view());
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t tap = 0; tap < taps; ++tap)
        sum += double{weight[tap * channels + c]} * rows[static_cast<size_t>((t + tap) * channels + c)];
      CHECK_NEAR(out[t * channels + c], sum / (1 + std::exp(-sum)), 1e-5);
    }
  for (int64_t i = 0; i < (taps - 1) * channels; ++i)
    CHECK(states[(taps - 1) * channels + i] == rows[static_cast<size_t>(tokens * channels + i)]);
}

}  // namespace

int main() {
  raymoe::set_num_threads(2);
  for (raymoe::Isa isa : raymoe::supported_isas()) {
    raymoe::set_isa(isa);
    for (int64_t tokens : {1, 2, 3, 40})
      for (int64_t rows : {8, 24, 128})
        for (int64_t columns : {8, 40, 72})
          for (int kind = 0; kind < 4; ++kind)
            scan_matches_float64(tokens, rows, columns, kind % 2 == 1, kind / 2 == 1);
    for (int64_t tokens : {1, 3, 40})
      for (int64_t rows : {8, 128})
        for (int64_t columns : {8, 40, 72})
          for (bool per_channel : {false, true})
            bf16_states_round_float32(tokens, rows, columns, per_channel);
    for (int64_t tokens : {1, 2, 3, 70})
      for (int64_t channels : {1, 24, 1030})
        for (int64_t taps : {1, 3, 4, 9}) convolution_matches_float64(tokens, channels, taps);
  }
  return 0;
}
