// What the tests of paged attention have in common: steps of sequences, their blocks and types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "raymoe/attention.h"
#include "raymoe/worker_pool.h"

namespace raymoe {

struct Sequence {
  int64_t context;
  int64_t tokens;
};

/// Sequences with new and old tokens, in whole and cut blocks; short, ragged and long.
inline const std::vector<std::vector<Sequence>> kSteps = {
    {{1, 1}, {32, 32}, {33, 1}},
    {{65, 33}, {0, 0}, {40, 1}, {97, 90}},
    {{1100, 1}, {1030, 8}},
};

/// The sequences of one step, with blocks that lie in the cache in the reverse order.
struct PagedStep {
  std::vector<Sequence> sequences;
  int64_t num_tokens = 0, table_width = 0, num_blocks = 0;
  std::vector<int32_t> starts{0}, contexts, table;
  std::mt19937 random{7};

  explicit PagedStep(std::vector<Sequence> list) : sequences(std::move(list)) {
    for (const Sequence& sequence : sequences) {
      num_tokens += sequence.tokens;
      starts.push_back(static_cast<int32_t>(num_tokens));
      contexts.push_back(static_cast<int32_t>(sequence.context));
      table_width =
          std::max(table_width, (sequence.context + kBlockTokens - 1) / kBlockTokens);
    }
    table.resize(sequences.size() * static_cast<size_t>(table_width));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
    num_blocks = static_cast<int64_t>(table.size());
  }

  int64_t count() const { return static_cast<int64_t>(sequences.size()); }

  int64_t block(int64_t sequence, int64_t position) const {
    return table[static_cast<size_t>(sequence * table_width + position / kBlockTokens)];
  }

  template <typename T>
  void fill(std::vector<T>& data, int64_t size) {
    std::normal_distribution<float> normal;
    data.resize(static_cast<size_t>(size));
    for (T& x : data) x = from_float<T>(normal(random));
  }

  /// Calls `compare(sequence, token, row)` for each new token; its row is counted in the step.
  template <typename Compare>
  void for_each_token(Compare compare) const {
    for (int64_t sequence = 0; sequence < count(); ++sequence) {
      const auto index = static_cast<size_t>(sequence);
      for (int64_t token = 0; token < sequences[index].tokens; ++token)
        compare(sequence, token, starts[index] + token);
    }
  }
};

/// A packed tensor.
template <typename T>
TensorView view(std::vector<T>& data, DType dtype, std::vector<int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  return TensorView(data.data(), dtype, std::move(shape), std::move(strides));
}

/// Types of query and cache.
template <typename Q, typename C>
struct Types {};

/// Calls `check(types, tolerance)` for all types that kernels take, with every instruction set.
template <typename Check>
void for_every_kernel(Check check) {
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    check(Types<float, float>{}, 1e-5);
    check(Types<float, bf16>{}, 1e-5);
    check(Types<float, fp16>{}, 1e-5);
    check(Types<fp16, fp16>{}, 4e-3);
    check(Types<bf16, bf16>{}, 4e-2);
  }
}

/// For a problem with a sequence of three blocks.
template <typename Problem>
void bad_blocks_are_refused(Problem problem) {
  for (int32_t bad : {3, -1}) {
    problem.table[2] = bad;
    CHECK_THROWS(problem.run());
  }
}

}  // namespace raymoe
