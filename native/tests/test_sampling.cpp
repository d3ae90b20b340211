// Token choice on every instruction set: Philox, agreement between sets, exact-size buffers.
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "../src/philox.h"
#include "check.h"
#include "raymoe/probe.h"
#include "raymoe/sampling.h"
#include "raymoe/worker_pool.h"

using raymoe::DType;
using raymoe::TensorView;

namespace {

void philox_gives_the_known_answers() {
  using raymoe::philox;
  const raymoe::Words zero = philox({{0, 0, 0, 0}}, 0, 0);
  CHECK(zero.word[0] == 0x6627e8d5u && zero.word[3] == 0x9b00dbd8u);
  const raymoe::Words ones = philox({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u);
  CHECK(ones.word[1] == 0x41c83b0eu && ones.word[2] == 0xa20bc7c6u);
  const raymoe::Words pi =
      philox({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u);
  CHECK(pi.word[0] == 0xd16cfe09u && pi.word[1] == 0x94fdccebu);
  CHECK(pi.word[2] == 0x5001e420u && pi.word[3] == 0x24126ea1u);
}

template <typename T>
TensorView vector_view(std::vector<T>& data) {
  const auto count = static_cast<int64_t>(data.size());
  return TensorView(data.data(), raymoe::DTypeOf<T>::value, {count}, {1});
}

/// Rows of logits in memory of exactly their size.
struct Rows {
  Rows(int64_t rows_in, int64_t size_in)
      : rows(rows_in), size(size_in), data(new float[static_cast<size_t>(rows_in * size_in)]) {
    uint32_t state = 5;
    for (int64_t i = 0; i < rows * size; ++i) {
      state = state * 1664525u + 1013904223u;
      data[static_cast<size_t>(i)] = static_cast<float>(state >> 8) / 2097152.0f - 4.0f;
    }
  }
  TensorView view() const {
    return TensorView(data.get(), DType::kFloat32, {rows, size}, {size, 1});
  }
  float at(int64_t row, int64_t i) const { return data[static_cast<size_t>(row * size + i)]; }

  int64_t rows, size;
  std::unique_ptr<float[]> data;
};

std::vector<int64_t> sample(const Rows& rows) {
  const auto count = static_cast<size_t>(rows.rows);
  std::vector<int64_t> seed(count), row_key(count), ids(count);
  std::vector<int32_t> index(count), position(count);
  for (size_t i = 0; i < count; ++i) {
    seed[i] = std::numeric_limits<int64_t>::min() + static_cast<int64_t>(i);
    row_key[i] = -static_cast<int64_t>(i);
    index[i] = static_cast<int32_t>(i % 3);
    position[i] = std::numeric_limits<int32_t>::max() - static_cast<int32_t>(i);
  }
  raymoe::gumbel_argmax({rows.view(), std::nullopt, vector_view(seed), vector_view(row_key),
                         vector_view(index), vector_view(position), vector_view(ids)});
  return ids;
}

void largest_and_sums_match_plain_loops(const Rows& rows) {
  std::vector<int64_t> ids(static_cast<size_t>(rows.rows));
  std::vector<float> sums(ids.size());
  raymoe::argmax(rows.view(), vector_view(ids));
  raymoe::log_sum_exp(rows.view(), vector_view(sums));
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t id = ids[static_cast<size_t>(row)];
    double sum = 0;
    for (int64_t i = 0; i < rows.size; ++i) {
      CHECK(i < id ? rows.at(row, i) < rows.at(row, id) : rows.at(row, i) <= rows.at(row, id));
      sum += std::exp(static_cast<double>(rows.at(row, i)));
    }
    CHECK_NEAR(sums[static_cast<size_t>(row)], std::log(sum), 2e-6 * (1 + std::fabs(std::log(sum))));
  }
}

void top_values_descend(const Rows& rows, int64_t k) {
  std::vector<int64_t> ids(static_cast<size_t>(rows.rows * k));
  std::vector<float> values(ids.size());
  raymoe::top_k(rows.view(), TensorView(ids.data(), DType::kInt64, {rows.rows, k}, {k, 1}),
                TensorView(values.data(), DType::kFloat32, {rows.rows, k}, {k, 1}));
  for (int64_t row = 0; row < rows.rows; ++row)
    for (int64_t j = 0; j < k; ++j) {
      const auto slot = static_cast<size_t>(row * k + j);
      CHECK(values[slot] == rows.at(row, ids[slot]));
      CHECK(j == 0 || values[slot] <= values[slot - 1]);
      int64_t larger = 0;
      for (int64_t i = 0; i < rows.size; ++i) larger += rows.at(row, i) > values[slot];
      CHECK(larger <= j);
    }
}

void probes_return_rates() {
  CHECK(raymoe::read_bandwidth_bytes_per_s(2, 0.01, 1 << 20) > 0);
  for (auto number : {raymoe::Number::kFloat32, raymoe::Number::kBFloat16, raymoe::Number::kInt8})
    CHECK(raymoe::peak_flop_per_s(1, 0.002, number) > 0);
  CHECK_THROWS(raymoe::read_bandwidth_bytes_per_s(0, 1, 1 << 20));
  CHECK_THROWS(raymoe::read_bandwidth_bytes_per_s(1, 1, 16));
  CHECK_THROWS(raymoe::peak_flop_per_s(1, 0, raymoe::Number::kInt8));
}

}  // namespace

int main() {
  philox_gives_the_known_answers();
  raymoe::set_num_threads(2);
  for (int64_t size : {1, 5, 16, 63, 64, 65, 511, 513, 3001}) {
    const Rows rows(7, size);
    std::vector<int64_t> first;
    for (raymoe::Isa isa : raymoe::supported_isas()) {
      raymoe::set_isa(isa);
      const std::vector<int64_t> ids = sample(rows);
      if (first.empty()) first = ids;
      CHECK(ids == first);
      largest_and_sums_match_plain_loops(rows);
      top_values_descend(rows, size < 6 ? size : 6);
      if (size == 1) probes_return_rates();
    }
  }
  return 0;
}
