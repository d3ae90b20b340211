// Norm, rope and routing on every instruction set, on buffers without slack, against float64.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "check.h"
#include "raymoe/elementwise.h"
#include "raymoe/worker_pool.h"

using raymoe::bf16;
using raymoe::DType;
using raymoe::TensorView;

namespace {

/// A tensor in memory of exactly its size, so that the address sanitizer sees every overrun.
template <typename T>
struct Tensor {
  explicit Tensor(std::vector<int64_t> shape_in, DType dtype_in = raymoe::DTypeOf<T>::value)
      : shape(std::move(shape_in)), dtype(dtype_in) {
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
    return TensorView(data.get(), dtype, shape, strides);
  }
  T& operator[](int64_t i) { return data[static_cast<size_t>(i)]; }

  std::vector<int64_t> shape;
  DType dtype;
  int64_t count = 1;
  std::unique_ptr<T[]> data;
};

/// Values in [-1, 1) that differ from element to element.
template <typename T>
void fill(Tensor<T>& tensor, uint32_t seed) {
  for (int64_t i = 0; i < tensor.count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    tensor[i] = raymoe::from_float<T>(static_cast<float>(seed >> 8) / 8388608.0f - 1.0f);
  }
}

template <typename T>
void norm_matches_float64(int64_t rows, int64_t size, double tolerance,
                          raymoe::NormWeighting weighting = {}) {
  Tensor<T> hidden({rows, size}), delta({rows, size}), weight({size}), out({rows, size});
  fill(hidden, 1);
  fill(delta, 2);
  fill(weight, 3);
  Tensor<T> sum({rows, size});
  for (int64_t i = 0; i < sum.count; ++i)
    sum[i] = raymoe::from_float<T>(raymoe::to_float(hidden[i]) + raymoe::to_float(delta[i]));
  const TensorView delta_view = delta.view(), weight_view = weight.view();
  raymoe::rms_norm(hidden.view(), &delta_view, &weight_view, 1e-5f, weighting, out.view());
  CHECK(std::memcmp(&hidden[0], &sum[0], static_cast<size_t>(sum.count) * sizeof(T)) == 0);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i)
      squares += std::pow(raymoe::to_float(sum[row * size + i]), 2.0);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-5);
    for (int64_t i = 0; i < size; ++i) {
      const double want =
          raymoe::to_float(sum[row * size + i]) * scale *
          (weighting.offset + raymoe::to_float(weight[i]));
      CHECK_NEAR(raymoe::to_float(out[row * size + i]), want, tolerance * (1 + std::fabs(want)));
    }
  }
}

void norms_match_on_every_tail() {
  for (int64_t size : {1, 3, 7, 8, 15, 16, 17, 63, 64, 65, 130, 1024}) {
    norm_matches_float64<float>(3, size, 1e-6);
    norm_matches_float64<float>(3, size, 1e-6, {true, 1.0f});
    norm_matches_float64<raymoe::fp16>(3, size, 2e-3);
    norm_matches_float64<bf16>(3, size, 1.6e-2);
  }
  norm_matches_float64<float>(200, 384, 1e-6);  // more than one chunk: the pool takes part
}

void rotation_turns_pairs_and_copies_the_rest(int64_t tokens, int64_t heads, int64_t kv_heads,
                                              int64_t dim, int64_t half, bool interleaved) {
  const int64_t width = (heads + 2 * kv_heads) * dim;
  Tensor<float> qkv({tokens, width}), cosine({9, half}), sine({9, half});
  Tensor<int32_t> positions({tokens});
  Tensor<float> query({tokens, heads, dim}), key({tokens, kv_heads, dim});
  Tensor<float> value({tokens, kv_heads, dim});
  fill(qkv, 4);
  fill(cosine, 5);
  fill(sine, 6);
  for (int64_t t = 0; t < tokens; ++t) positions[t] = static_cast<int32_t>(8 - t % 9);
  raymoe::qkv_rope({qkv.view(), positions.view(), cosine.view(), sine.view(), std::nullopt,
                    std::nullopt, query.view(), key.view(), value.view()},
                   {1e-6f, std::numeric_limits<float>::infinity(), false, interleaved, false, false,
                    {}});
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < dim; ++i) {
        const float* x = &qkv[t * width + h * dim];
        const float got = query[(t * heads + h) * dim + i];
        const int64_t pair = i < half ? i : i - half, angle = positions[t] * half + pair;
        const int64_t first = interleaved ? 2 * pair : pair;
        const int64_t second = interleaved ? 2 * pair + 1 : pair + half;
        float want = x[i];
        if (i < half) want = x[first] * cosine[angle] - x[second] * sine[angle];
        if (i >= half && i < 2 * half) want = x[second] * cosine[angle] + x[first] * sine[angle];
        CHECK_NEAR(got, want, 1e-6);
      }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < kv_heads * dim; ++i)
      CHECK(value[t * kv_heads * dim + i] == qkv[t * width + (heads + kv_heads) * dim + i]);
}

void routing_picks_the_largest(int64_t tokens, int64_t experts, int64_t top_k) {
  Tensor<float> logits({tokens, experts}), weights({tokens, top_k});
  Tensor<int32_t> ids({tokens, top_k});
  fill(logits, 7);
  raymoe::route(logits.view(), true, ids.view(), weights.view());
  for (int64_t t = 0; t < tokens; ++t) {
    double sum = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t id = ids[t * top_k + k];
      CHECK(id >= 0 && id < experts);
      sum += weights[t * top_k + k];
      int64_t larger = 0;
      for (int64_t e = 0; e < experts; ++e)
        larger += logits[t * experts + e] > logits[t * experts + id];
      CHECK(larger == k);
    }
    CHECK_NEAR(sum, 1.0, 1e-5);
  }
}

void gates_scale_the_shared_expert() {
  Tensor<float> out({3, 21}), shared({3, 21}), gate({3, 1});
  fill(shared, 8);
  fill(gate, 9);
  raymoe::add_gated(out.view(), shared.view(), gate.view());
  for (int64_t i = 0; i < out.count; ++i)
    CHECK_NEAR(out[i], shared[i] / (1 + std::exp(-gate[i / 21])), 1e-6);
}

void wrong_shapes_are_refused() {
  Tensor<float> hidden({2, 8}), weight({9}), out({2, 8});
  const TensorView weight_view = weight.view();
  CHECK_THROWS(raymoe::rms_norm(hidden.view(), nullptr, &weight_view, 1e-6f, {}, out.view()));
  Tensor<int32_t> ids({2, 9});
  Tensor<float> weights({2, 9});
  CHECK_THROWS(raymoe::route(hidden.view(), true, ids.view(), weights.view()));
}

}  // namespace

int main() {
  raymoe::set_num_threads(2);
  for (raymoe::Isa isa : raymoe::supported_isas()) {
    raymoe::set_isa(isa);
    norms_match_on_every_tail();
    for (bool interleaved : {false, true}) {
      rotation_turns_pairs_and_copies_the_rest(5, 2, 1, 64, 32, interleaved);
      rotation_turns_pairs_and_copies_the_rest(3, 3, 1, 24, 9, interleaved);
      rotation_turns_pairs_and_copies_the_rest(20, 4, 2, 8, 4, interleaved);
      rotation_turns_pairs_and_copies_the_rest(2, 1, 1, 512, 256, interleaved);
    }
    routing_picks_the_largest(40, 64, 8);
    routing_picks_the_largest(9, 3, 3);
    routing_picks_the_largest(2, 1024, 4);
    gates_scale_the_shared_expert();
    wrong_shapes_are_refused();
  }
  return 0;
}
