// Paged latent attention under the sanitizers: every kernel against a double-precision reference,
// with buffers that end where the data ends.
#include "raymoe/latent_attention.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "paged_step.h"

using namespace raymoe;

namespace {

/// One step; `Q` and `C` are the types of query and cache. Rows that no token owns are NaN.
template <typename Q, typename C>
struct Problem : PagedStep {
  int64_t heads, rank, width;
  std::vector<Q> query, latent, out;
  std::vector<C> cache;
  std::vector<float> sinks;  // empty: heads have none

  Problem(std::vector<Sequence> list, int64_t heads_, int64_t rank_, int64_t rope)
      : PagedStep(std::move(list)), heads(heads_), rank(rank_), width(rank_ + rope) {
    fill(query, num_tokens * heads * width);
    fill(latent, num_tokens * width);
    fill(cache, num_blocks * kBlockTokens * width);
    forget_unowned_rows();
    out.resize(static_cast<size_t>(num_tokens * heads * rank));
  }

  void forget_unowned_rows() {
    for (int64_t sequence = 0; sequence < count(); ++sequence)
      for (int64_t position = sequences[static_cast<size_t>(sequence)].context;
           position < table_width * kBlockTokens; ++position)
        for (int64_t d = 0; d < width; ++d)
          cache[at(sequence, position, d)] =
              from_float<C>(std::numeric_limits<float>::quiet_NaN());
  }

  size_t at(int64_t sequence, int64_t position, int64_t d) const {
    const int64_t row = block(sequence, position) * kBlockTokens + position % kBlockTokens;
    return static_cast<size_t>(row * width + d);
  }

  void add_sinks() { fill(sinks, heads); }

  void run() {
    constexpr DType q = DTypeOf<Q>::value;
    const TensorView sink_view = view(sinks, DType::kFloat32, {static_cast<int64_t>(sinks.size())});
    append_and_attend_latent(
        view(query, q, {num_tokens, heads, width}), view(latent, q, {num_tokens, width}),
        view(cache, DTypeOf<C>::value, {num_blocks, kBlockTokens, width}),
        view(starts, DType::kInt32, {count() + 1}), view(contexts, DType::kInt32, {count()}),
        view(table, DType::kInt32, {count(), table_width}),
        view(out, q, {num_tokens, heads, rank}), 1 / std::sqrt(double(width)),
        sinks.empty() ? nullptr : &sink_view);
  }

  /// One output row from the cache as it is after the step.
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
    if (!sinks.empty()) total += std::exp(double(sinks[static_cast<size_t>(row % heads)]));
    for (double& x : sum) x /= total;
    return sum;
  }

  void check(double tolerance) const {
    for_each_token([&](int64_t sequence, int64_t token, int64_t at_token) {
      for (int64_t row = at_token * heads; row < (at_token + 1) * heads; ++row) {
        const std::vector<double> want = reference_row(sequence, token, row);
        for (int64_t d = 0; d < rank; ++d)
          CHECK_NEAR(to_float(out[static_cast<size_t>(row * rank + d)]),
                     want[static_cast<size_t>(d)], tolerance);
      }
    });
  }
};

template <typename Q, typename C>
void agrees_with_the_reference(Types<Q, C>, double tolerance) {
  for (const auto& step : kSteps)
    for (const auto& [heads, rank, rope] :
         {std::array<int64_t, 3>{1, 8, 8}, {5, 24, 16}, {20, 40, 8}}) {
      Problem<Q, C> problem(step, heads, rank, rope);
      problem.run();
      problem.check(tolerance);
      problem.add_sinks();
      problem.run();
      problem.check(tolerance);
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
    wide.add_sinks();  // of another number of heads in each tile
    wide.run();
    wide.check(4e-2);
  }
}

void mixed_types_are_refused() {
  Problem<bf16, fp16> mixed({{70, 2}}, 1, 8, 8);
  CHECK_THROWS(mixed.run());
}

}  // namespace

int main() {
  for_every_kernel([](auto types, double tolerance) {
    agrees_with_the_reference(types, tolerance);
  });
  long_sequences_and_many_heads_are_split_among_threads();
  bad_blocks_are_refused(Problem<float, float>({{70, 2}}, 1, 8, 8));
  mixed_types_are_refused();
  return 0;
}
