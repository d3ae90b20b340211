// Paged latent attention under the sanitizers: every kernel against a double-precision reference,
// with buffers that end where the data ends.
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "raymoe/latent_attention.h"
#include "raymoe/worker_pool.h"

using namespace raymoe;

namespace {

struct Sequence {
  int64_t context;
  int64_t tokens;
};

/// One pass; `Q` and `C` are the types of query and cache. Rows that no token owns are NaN.
template <typename Q, typename C>
struct Problem {
  std::vector<Sequence> sequences;
  int64_t heads, rank, width;
  int64_t num_tokens = 0, table_width = 0, num_blocks = 0;
  std::vector<Q> query, latent, out;
  std::vector<C> cache;
  std::vector<int32_t> starts{0}, contexts, table;
  std::mt19937 random{7};

  Problem(std::vector<Sequence> list, int64_t heads_, int64_t rank_, int64_t rope)
      : sequences(std::move(list)), heads(heads_), rank(rank_), width(rank_ + rope) {
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
    fill(query, num_tokens * heads * width);
    fill(latent, num_tokens * width);
    fill(cache, num_blocks * kBlockTokens * width);
    forget_unowned_rows();
    out.resize(static_cast<size_t>(num_tokens * heads * rank));
  }

  template <typename T>
  void fill(std::vector<T>& data, int64_t size) {
    std::normal_distribution<float> normal;
    data.resize(static_cast<size_t>(size));
    for (T& x : data) x = from_float<T>(normal(random));
  }

  void forget_unowned_rows() {
    for (size_t i = 0; i < sequences.size(); ++i)
      for (int64_t position = sequences[i].context; position < table_width * kBlockTokens;
           ++position)
        for (int64_t d = 0; d < width; ++d)
          cache[at(static_cast<int64_t>(i), position, d)] =
              from_float<C>(std::numeric_limits<float>::quiet_NaN());
  }

  size_t at(int64_t sequence, int64_t position, int64_t d) const {
    const int64_t entry = sequence * table_width + position / kBlockTokens;
    const int64_t block = table[static_cast<size_t>(entry)];
    return static_cast<size_t>((block * kBlockTokens + position % kBlockTokens) * width + d);
  }

  template <typename T>
  static TensorView view(std::vector<T>& data, DType dtype, std::vector<int64_t> shape) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
    return TensorView(data.data(), dtype, std::move(shape), std::move(strides));
  }

  void run() {
    constexpr DType q = DTypeOf<Q>::value;
    const auto count = static_cast<int64_t>(sequences.size());
    append_and_attend_latent(
        view(query, q, {num_tokens, heads, width}), view(latent, q, {num_tokens, width}),
        view(cache, DTypeOf<C>::value, {num_blocks, kBlockTokens, width}),
        view(starts, DType::kInt32, {count + 1}), view(contexts, DType::kInt32, {count}),
        view(table, DType::kInt32, {count, table_width}),
        view(out, q, {num_tokens, heads, rank}), 1 / std::sqrt(double(width)));
  }

  /// One output row from the cache as it is after the pass.
  std::vector<double> reference_row(int64_t sequence, int64_t token, int64_t row) const {
    const Sequence& shape = sequences[static_cast<size_t>(sequence)];
    std::vector<double> sum(static_cast<size_t>(rank));
    double total = 0;
    for (int64_t past = 0; past <= shape.context - shape.tokens + token; ++past) {
      double score = 0;
      for (int64_t d = 0; d < width; ++d)
        score += to_float(query[static_cast<size_t>(row * width + d)]) *
                 to_float(cache[at(sequence, past, d)]);
      const double weight = std::exp(score / std::sqrt(double(width)));
      total += weight;
      for (int64_t d = 0; d < rank; ++d)
        sum[static_cast<size_t>(d)] += weight * to_float(cache[at(sequence, past, d)]);
    }
    for (double& x : sum) x /= total;
    return sum;
  }

  void check(double tolerance) const {
    for (size_t sequence = 0; sequence < sequences.size(); ++sequence)
      for (int64_t token = 0; token < sequences[sequence].tokens; ++token)
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t row = (starts[sequence] + token) * heads + head;
          const std::vector<double> want =
              reference_row(static_cast<int64_t>(sequence), token, row);
          for (int64_t d = 0; d < rank; ++d)
            CHECK_NEAR(to_float(out[static_cast<size_t>(row * rank + d)]),
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
    for (const auto& [heads, rank, rope] :
         {std::array<int64_t, 3>{1, 8, 8}, {5, 24, 16}, {20, 40, 8}}) {
      Problem<Q, C> problem(pass, heads, rank, rope);
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

void long_sequences_and_many_heads_are_split_among_threads() {
  set_num_threads(3);
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    Problem<float, float> problem({{4100, 1}, {3, 1}}, 2, 16, 8);
    problem.run();
    problem.check(1e-5);
    Problem<bf16, bf16> wide({{70, 1}, {3, 2}}, 130, 16, 8);
    wide.run();
    wide.check(4e-2);
  }
}

void bad_blocks_and_types_are_refused() {
  Problem<float, float> problem({{70, 2}}, 1, 8, 8);
  problem.table[2] = 3;
  CHECK_THROWS(problem.run());
  problem.table[2] = -1;
  CHECK_THROWS(problem.run());
  Problem<bf16, fp16> mixed({{70, 2}}, 1, 8, 8);
  CHECK_THROWS(mixed.run());
}

}  // namespace

int main() {
  every_kernel_agrees_with_the_reference();
  long_sequences_and_many_heads_are_split_among_threads();
  bad_blocks_and_types_are_refused();
  return 0;
}
