// Paged attention under the sanitizers: every kernel against a double-precision reference, with
// buffers that end where the data ends.
#include "raymoe/attention.h"

#include <cmath>
#include <utility>
#include <vector>

#include "attention_step.h"
#include "paged_step.h"

using namespace raymoe;

namespace {

constexpr int64_t kNoWindow = int64_t{1} << 62;

/// One step; `Q` and `C` are the types of query and cache.
template <typename Q, typename C>
struct Problem : PagedStep {
  int64_t kv_heads, heads, dim, value_dim, window;
  std::vector<Q> query, key, value, out;
  std::vector<C> cache;
  std::vector<float> sinks;  // of each head, or none

  Problem(std::vector<Sequence> list, int64_t kv_heads_, int64_t group, int64_t dim_,
          int64_t value_dim_, int64_t window_)
      : PagedStep(std::move(list)),
        kv_heads(kv_heads_),
        heads(kv_heads_ * group),
        dim(dim_),
        value_dim(value_dim_),
        window(window_) {
    fill(query, num_tokens * heads * dim);
    fill(key, num_tokens * kv_heads * dim);
    fill(value, num_tokens * kv_heads * value_dim);
    fill(cache, num_blocks * kv_heads * kBlockTokens * (dim + value_dim));
    out.resize(static_cast<size_t>(num_tokens * heads * value_dim));
  }

  void run() {
    constexpr DType q = DTypeOf<Q>::value;
    const TensorView sink_view = view(sinks, DType::kFloat32, {heads});
    append_and_attend(
        view(query, q, {num_tokens, heads, dim}), view(key, q, {num_tokens, kv_heads, dim}),
        view(value, q, {num_tokens, kv_heads, value_dim}),
        view(cache, DTypeOf<C>::value, {num_blocks, kv_heads, kBlockTokens * (dim + value_dim)}),
        view(starts, DType::kInt32, {count() + 1}), view(contexts, DType::kInt32, {count()}),
        view(table, DType::kInt32, {count(), table_width}),
        view(out, q, {num_tokens, heads * value_dim}), 1 / std::sqrt(double(dim)), window,
        sinks.empty() ? nullptr : &sink_view);
  }

  double cached(int64_t sequence, int64_t position, int64_t head, bool is_value, int64_t d) const {
    constexpr int64_t pair = kPair<C>;
    const int64_t row = position % kBlockTokens;
    const int64_t at =
        is_value ? kBlockTokens * dim + (row / pair * value_dim + d) * pair + row % pair
                 : (d / pair * kBlockTokens + row) * pair + d % pair;
    const int64_t begin = block(sequence, position) * kv_heads + head;
    return to_float(cache[static_cast<size_t>(begin * kBlockTokens * (dim + value_dim) + at)]);
  }

  /// The output of one head of a token from the cache as it is after the step.
  std::vector<double> reference_row(int64_t sequence, int64_t token, int64_t row) const {
    const Sequence& shape = sequences[static_cast<size_t>(sequence)];
    const int64_t position = shape.context - shape.tokens + token;
    const int64_t head = row % heads, kv_head = head * kv_heads / heads;
    std::vector<double> sum(static_cast<size_t>(value_dim));
    double total = sinks.empty() ? 0 : std::exp(double{sinks[static_cast<size_t>(head)]});
    for (int64_t past = std::max<int64_t>(0, position - window + 1); past <= position; ++past) {
      double score = 0;
      for (int64_t d = 0; d < dim; ++d)
        score += to_float(query[static_cast<size_t>(row * dim + d)]) *
                 cached(sequence, past, kv_head, false, d);
      const double weight = std::exp(score / std::sqrt(double(dim)));
      total += weight;
      for (int64_t d = 0; d < value_dim; ++d)
        sum[static_cast<size_t>(d)] += weight * cached(sequence, past, kv_head, true, d);
    }
    for (double& x : sum) x /= total;
    return sum;
  }

  void check(double tolerance) const {
    for_each_token([&](int64_t sequence, int64_t token, int64_t at_token) {
      for (int64_t row = at_token * heads; row < (at_token + 1) * heads; ++row) {
        const std::vector<double> want = reference_row(sequence, token, row);
        for (int64_t d = 0; d < value_dim; ++d)
          CHECK_NEAR(to_float(out[static_cast<size_t>(row * value_dim + d)]),
                     want[static_cast<size_t>(d)], tolerance);
      }
    });
  }
};

template <typename Q, typename C>
void agrees_with_the_reference(Types<Q, C>, double tolerance) {
  for (const auto& step : kSteps)
    for (const auto& [group, dim] : {std::pair<int64_t, int64_t>{1, 8}, {3, 24}, {9, 40}})
      for (int64_t window : {kNoWindow, int64_t{33}}) {
        Problem<Q, C> problem(step, 2, group, dim, 56 - dim, window);
        problem.run();
        problem.check(tolerance);
        problem.fill(problem.sinks, problem.heads);
        problem.run();
        problem.check(tolerance);
      }
}

void long_sequences_are_split_among_threads() {
  set_num_threads(3);
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    Problem<float, float> problem({{4100, 1}, {3, 1}}, 1, 2, 16, 16, kNoWindow);
    problem.sinks = {3.0f, 7.0f};
    problem.run();
    problem.check(1e-5);
  }
}

void mixed_types_are_refused() {
  Problem<bf16, fp16> mixed({{70, 2}}, 1, 1, 8, 8, 100);
  CHECK_THROWS(mixed.run());
}

/// Who begins a block clears it: no other item may write to it.
void appends_end_where_blocks_do() {
  PagedStep paged({{900, 640}, {512, 512}, {700, 1}, {270, 2}});
  AttentionStep step;
  step.query_start = paged.starts.data();
  step.context_tokens = paged.contexts.data();
  step.block_table = paged.table.data();
  step.table_stride = paged.table_width;
  step.num_sequences = paged.count();
  step.num_kv_heads = step.group = 1;
  step.window = int64_t{1} << 40;
  AttentionPlan plan;
  plan.build(step, 2);
  std::vector<int64_t> done(static_cast<size_t>(paged.count()));
  for (const AppendItem& item : plan.appends()) {
    int64_t& tokens = done[static_cast<size_t>(item.sequence)];
    CHECK(item.first_token == tokens);
    tokens += item.num_tokens;
    const int64_t end = step.first_position(item.sequence) + tokens;
    CHECK(tokens == step.num_tokens(item.sequence) || end % kBlockTokens == 0);
  }
  CHECK(done == (std::vector<int64_t>{640, 512, 0, 2}));
}

}  // namespace

int main() {
  for_every_kernel([](auto types, double tolerance) {
    agrees_with_the_reference(types, tolerance);
  });
  long_sequences_are_split_among_threads();
  appends_end_where_blocks_do();
  bad_blocks_are_refused(Problem<float, float>({{70, 2}}, 1, 1, 8, 8, 100));
  mixed_types_are_refused();
  return 0;
}
