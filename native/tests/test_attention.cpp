// Paged attention under the sanitizers: every kernel against a double-precision reference, with
// buffers that end where the data ends.
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "raymoe/attention.h"
#include "raymoe/worker_pool.h"

using namespace raymoe;

namespace {

struct Sequence {
  int64_t context;
  int64_t tokens;
};

/// One pass with float32 masters of everything; `Q` and `C` are the types of query and cache.
template <typename Q, typename C>
struct Problem {
  std::vector<Sequence> sequences;
  int64_t kv_heads, group, dim, window;
  int64_t num_tokens = 0, width = 0, num_blocks = 0;
  std::vector<Q> query, key, value, out;
  std::vector<C> cache;
  std::vector<int32_t> starts{0}, contexts, table;
  std::vector<float> sinks;  // of each head, or none
  std::mt19937 random{7};

  Problem(std::vector<Sequence> list, int64_t kv_heads_, int64_t group_, int64_t dim_,
          int64_t window_)
      : sequences(std::move(list)), kv_heads(kv_heads_), group(group_), dim(dim_), window(window_) {
    for (const Sequence& sequence : sequences) {
      num_tokens += sequence.tokens;
      starts.push_back(static_cast<int32_t>(num_tokens));
      contexts.push_back(static_cast<int32_t>(sequence.context));
      width = std::max(width, (sequence.context + kBlockTokens - 1) / kBlockTokens);
    }
    table.resize(sequences.size() * static_cast<size_t>(width));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
    num_blocks = static_cast<int64_t>(table.size());
    fill(query, num_tokens * kv_heads * group * dim);
    fill(key, num_tokens * kv_heads * dim);
    fill(value, num_tokens * kv_heads * dim);
    fill(cache, num_blocks * kv_heads * 2 * kBlockTokens * dim);
    out.resize(query.size());
  }

  template <typename T>
  void fill(std::vector<T>& data, int64_t size) {
    std::normal_distribution<float> normal;
    data.resize(static_cast<size_t>(size));
    for (T& x : data) x = from_float<T>(normal(random));
  }

  template <typename T>
  static TensorView view(std::vector<T>& data, DType dtype, std::vector<int64_t> shape) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
    return TensorView(data.data(), dtype, std::move(shape), std::move(strides));
  }

  void run() {
    constexpr DType q = DTypeOf<Q>::value;
    const int64_t heads = kv_heads * group;
    const auto count = static_cast<int64_t>(sequences.size());
    const TensorView sink_view = view(sinks, DType::kFloat32, {heads});
    append_and_attend(
        view(query, q, {num_tokens, heads, dim}), view(key, q, {num_tokens, kv_heads, dim}),
        view(value, q, {num_tokens, kv_heads, dim}),
        view(cache, DTypeOf<C>::value, {num_blocks, kv_heads, 2, kBlockTokens * dim}),
        view(starts, DType::kInt32, {count + 1}), view(contexts, DType::kInt32, {count}),
        view(table, DType::kInt32, {count, width}), view(out, q, {num_tokens, heads * dim}),
        1 / std::sqrt(double(dim)), window, sinks.empty() ? nullptr : &sink_view);
  }

  double cached(int64_t sequence, int64_t position, int64_t head, bool is_value, int64_t d) const {
    constexpr int64_t pair = kPair<C>;
    const int64_t row = position % kBlockTokens;
    const int64_t block = table[static_cast<size_t>(sequence * width + position / kBlockTokens)];
    const int64_t at = is_value ? (row / pair * dim + d) * pair + row % pair
                                : (d / pair * kBlockTokens + row) * pair + d % pair;
    const int64_t half = (block * kv_heads + head) * 2 + (is_value ? 1 : 0);
    return to_float(cache[static_cast<size_t>(half * kBlockTokens * dim + at)]);
  }

  /// One output element from the cache as it is after the pass.
  std::vector<double> reference_row(int64_t sequence, int64_t token, int64_t head) const {
    const Sequence& shape = sequences[static_cast<size_t>(sequence)];
    const int64_t position = shape.context - shape.tokens + token;
    const int64_t row = (starts[static_cast<size_t>(sequence)] + token) * kv_heads * group + head;
    std::vector<double> sum(static_cast<size_t>(dim));
    double total = sinks.empty() ? 0 : std::exp(double{sinks[static_cast<size_t>(head)]});
    for (int64_t past = std::max<int64_t>(0, position - window + 1); past <= position; ++past) {
      double score = 0;
      for (int64_t d = 0; d < dim; ++d)
        score += to_float(query[static_cast<size_t>(row * dim + d)]) *
                 cached(sequence, past, head / group, false, d);
      const double weight = std::exp(score / std::sqrt(double(dim)));
      total += weight;
      for (int64_t d = 0; d < dim; ++d)
        sum[static_cast<size_t>(d)] += weight * cached(sequence, past, head / group, true, d);
    }
    for (double& x : sum) x /= total;
    return sum;
  }

  void check(double tolerance) const {
    for (size_t sequence = 0; sequence < sequences.size(); ++sequence)
      for (int64_t token = 0; token < sequences[sequence].tokens; ++token)
        for (int64_t head = 0; head < kv_heads * group; ++head) {
          const std::vector<double> want =
              reference_row(static_cast<int64_t>(sequence), token, head);
          const int64_t row = (starts[sequence] + token) * kv_heads * group + head;
          for (int64_t d = 0; d < dim; ++d)
            CHECK_NEAR(to_float(out[static_cast<size_t>(row * dim + d)]),
                       want[static_cast<size_t>(d)], tolerance);
        }
  }
};

template <typename Q, typename C>
void agrees_with_the_reference(double tolerance) {
  const std::vector<std::vector<Sequence>> passes = {
      {{1, 1}, {32, 32}, {33, 1}},
      {{65, 33}, {0, 0}, {40, 1}, {97, 90}},
      {{1100, 1}, {1030, 8}},
  };
  for (const auto& pass : passes)
    for (const auto& [group, dim] : {std::pair<int64_t, int64_t>{1, 8}, {3, 24}, {9, 40}})
      for (int64_t window : {int64_t{1} << 62, int64_t{33}}) {
        Problem<Q, C> problem(pass, 2, group, dim, window);
        problem.run();
        problem.check(tolerance);
        problem.fill(problem.sinks, 2 * group);
        problem.run();
        problem.check(tolerance);
      }
}

void every_kernel_agrees_with_the_reference() {
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    agrees_with_the_reference<float, float>(1e-5);
    agrees_with_the_reference<float, bf16>(1e-5);
    agrees_with_the_reference<float, fp16>(1e-5);
    agrees_with_the_reference<fp16, fp16>(4e-3);
    agrees_with_the_reference<bf16, bf16>(4e-2);
  }
}

void long_sequences_are_split_among_threads() {
  set_num_threads(3);
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    Problem<float, float> problem({{4100, 1}, {3, 1}}, 1, 2, 16, int64_t{1} << 62);
    problem.sinks = {3.0f, 7.0f};
    problem.run();
    problem.check(1e-5);
  }
}

void bad_blocks_and_types_are_refused() {
  Problem<float, float> problem({{70, 2}}, 1, 1, 8, 100);
  problem.table[2] = 3;
  CHECK_THROWS(problem.run());
  problem.table[2] = -1;
  CHECK_THROWS(problem.run());
  Problem<bf16, fp16> mixed({{70, 2}}, 1, 1, 8, 100);
  CHECK_THROWS(mixed.run());
}

}  // namespace

int main() {
  every_kernel_agrees_with_the_reference();
  long_sequences_are_split_among_threads();
  bad_blocks_and_types_are_refused();
  return 0;
}
