// Attention to last rows and entries, and their pooling, under the sanitizers: every kernel against
// a double-precision reference, with buffers that end where the data ends.
#include "raymoe/compressed_attention.h"

#include <cmath>
#include <limits>
#include <vector>

#include "paged_step.h"

using namespace raymoe;

namespace {

constexpr int64_t kWidth = 24, kHalf = 4, kWindow = 40;

/// One step; `Q` and `C` are the types of query and cache. Memory without rows or entries is NaN.
template <typename Q, typename C>
struct Problem : PagedStep {
  int64_t heads, ratio, block_entries;
  std::vector<Q> query, out;
  std::vector<C> history, new_rows, rows, entries;  // history: all rows of each sequence
  std::vector<float> sinks, cosine, sine;
  std::vector<int32_t> slots;
  int64_t longest;

  Problem(std::vector<Sequence> list, int64_t heads_, int64_t ratio_)
      : PagedStep(std::move(list)), heads(heads_), ratio(ratio_),
        block_entries(ratio < kBlockTokens ? kBlockTokens / ratio : 1),
        longest(table_width * kBlockTokens) {
    const C nan = from_float<C>(std::numeric_limits<float>::quiet_NaN());
    fill(query, num_tokens * heads * kWidth);
    fill(history, count() * longest * kWidth);
    fill(sinks, heads);
    fill(cosine, longest * kHalf);
    fill(sine, longest * kHalf);
    out.resize(query.size());
    rows.assign(static_cast<size_t>(count() * kWindow * kWidth), nan);
    entries.assign(static_cast<size_t>(num_blocks * block_entries * kWidth), nan);
    for (int64_t sequence = 0; sequence < count(); ++sequence) add_past(sequence);
  }

  void add_past(int64_t sequence) {
    const Sequence& shape = sequences[static_cast<size_t>(sequence)];
    slots.push_back(static_cast<int32_t>(sequence));
    const int64_t first = shape.context - shape.tokens;
    for (int64_t at = std::max<int64_t>(0, first - kWindow); at < first; ++at)
      for (int64_t d = 0; d < kWidth; ++d)
        rows[static_cast<size_t>(((count() - 1 - sequence) * kWindow + at % kWindow) * kWidth + d)] =
            row(sequence, at)[d];
    for (int64_t at = first; at < shape.context; ++at)
      new_rows.insert(new_rows.end(), row(sequence, at), row(sequence, at) + kWidth);
    std::vector<C> values;
    for (int64_t w = 0; w < shape.context / ratio; ++w) {
      fill(values, kWidth);
      std::copy(values.begin(), values.end(), entry(sequence, w));
    }
  }

  const C* row(int64_t sequence, int64_t position) const {
    return history.data() + (sequence * longest + position) * kWidth;
  }
  C* entry(int64_t sequence, int64_t w) {
    const int64_t last = (w + 1) * ratio - 1;
    return entries.data() +
           (block(sequence, last) * block_entries + last % kBlockTokens / ratio) * kWidth;
  }

  void run() {
    constexpr DType q = DTypeOf<Q>::value, c = DTypeOf<C>::value;
    append_and_attend_compressed(
        {view(query, q, {num_tokens, heads, kWidth}), view(new_rows, c, {num_tokens, kWidth}),
         view(sinks, DType::kFloat32, {heads}), nullptr, 0.25},
        view(rows, c, {count(), kWindow, kWidth}),
        view(entries, c, {num_blocks, block_entries, kWidth}),
        {view(starts, DType::kInt32, {count() + 1}), view(contexts, DType::kInt32, {count()}),
         view(table, DType::kInt32, {count(), table_width}), view(slots, DType::kInt32, {count()})},
        {view(cosine, DType::kFloat32, {longest, kHalf}),
         view(sine, DType::kFloat32, {longest, kHalf})},
        ratio, view(out, q, {num_tokens, heads, kWidth}));
  }

  /// One output row, of the token at `position`.
  std::vector<double> reference_row(int64_t sequence, int64_t position, int64_t row_index) {
    std::vector<const C*> seen;
    for (int64_t at = std::max<int64_t>(0, position - kWindow + 1); at <= position; ++at)
      seen.push_back(row(sequence, at));
    for (int64_t w = 0; w < (position + 1) / ratio; ++w) seen.push_back(entry(sequence, w));
    std::vector<double> sum(static_cast<size_t>(kWidth));
    double total = std::exp(double(sinks[static_cast<size_t>(row_index % heads)]));
    for (const C* each : seen) {
      double score = 0;
      for (int64_t d = 0; d < kWidth; ++d)
        score += to_float(query[static_cast<size_t>(row_index * kWidth + d)]) * to_float(each[d]);
      const double weight = std::exp(score / 4);
      total += weight;
      for (int64_t d = 0; d < kWidth; ++d)
        sum[static_cast<size_t>(d)] += weight * to_float(each[d]);
    }
    for (double& x : sum) x /= total;
    for (int64_t i = 0; i < kHalf; ++i) {
      const double cos = cosine[static_cast<size_t>(position * kHalf + i)];
      const double sin = sine[static_cast<size_t>(position * kHalf + i)];
      double& first = sum[static_cast<size_t>(kWidth - 2 * kHalf + 2 * i)];
      double& second = sum[static_cast<size_t>(kWidth - 2 * kHalf + 2 * i + 1)];
      const double turned = first * cos + second * sin;
      second = second * cos - first * sin;
      first = turned;
    }
    return sum;
  }

  void check(double tolerance) {
    for_each_token([&](int64_t sequence, int64_t token, int64_t at_token) {
      const Sequence& shape = sequences[static_cast<size_t>(sequence)];
      const int64_t position = shape.context - shape.tokens + token;
      for (int64_t row_index = at_token * heads; row_index < (at_token + 1) * heads; ++row_index) {
        const std::vector<double> want = reference_row(sequence, position, row_index);
        for (int64_t d = 0; d < kWidth; ++d)
          CHECK_NEAR(to_float(out[static_cast<size_t>(row_index * kWidth + d)]),
                     want[static_cast<size_t>(d)], tolerance);
      }
    });
  }
};

template <typename Q, typename C>
void agrees_with_the_reference(Types<Q, C>, double tolerance) {
  for (const auto& step : kSteps)
    for (const auto& [heads, ratio] :
         {std::pair<int64_t, int64_t>{1, 4}, {5, 32}, {20, 64}}) {
      Problem<Q, C> problem(step, heads, ratio);
      problem.run();
      problem.check(3 * tolerance);  // the rotation is by any factors
    }
}

/// The entry of two tokens, and the sum of a third.
void pools(bool begins_anew) {
  constexpr int64_t kChannels = 8;
  std::vector<float> pooled(3 * 2 * kChannels), bias(2 * kChannels), norm(kChannels, 1.0f);
  std::vector<float> sums(3 * kChannels), entries(16 * kChannels), cosine(3, 1.0f), sine(3, 0.0f);
  for (size_t i = 0; i < pooled.size(); ++i) pooled[i] = static_cast<float>(i % 7) - 3;
  std::vector<int32_t> starts{0, 3}, contexts{begins_anew ? 3 : 5}, table{0}, slots{0};
  cosine.resize(8, 1.0f);
  sine.resize(8, 0.0f);
  if (!begins_anew) std::fill(sums.begin(), sums.begin() + kChannels, -1e30f);
  pool_entries({view(pooled, DType::kFloat32, {3, 2 * kChannels}),
                view(bias, DType::kFloat32, {2, kChannels}),
                view(norm, DType::kFloat32, {kChannels}), 0.0},
               view(sums, DType::kFloat32, {1, 1, 3, kChannels}),
               view(entries, DType::kFloat32, {1, 16, kChannels}),
               {view(starts, DType::kInt32, {2}), view(contexts, DType::kInt32, {1}),
                view(table, DType::kInt32, {1, 1}), view(slots, DType::kInt32, {1})},
               {view(cosine, DType::kFloat32, {8, 1}), view(sine, DType::kFloat32, {8, 1})}, 2);
  std::vector<double> want(kChannels);
  double squares = 0;
  for (size_t i = 0; i < kChannels; ++i) {
    const double first = std::exp(pooled[kChannels + i]);
    const double second = std::exp(pooled[3 * kChannels + i]);
    want[i] = (first * pooled[i] + second * pooled[2 * kChannels + i]) / (first + second);
    squares += want[i] * want[i] / kChannels;
  }
  const size_t entry = begins_anew ? 0 : 1;
  for (size_t i = 0; i < kChannels; ++i) {
    CHECK_NEAR(entries[entry * kChannels + i], want[i] / std::sqrt(squares), 1e-5);
    CHECK_NEAR(sums[i], pooled[5 * kChannels + i], 0);
    CHECK_NEAR(sums[kChannels + i], 1.0, 0);
    CHECK_NEAR(sums[2 * kChannels + i], pooled[4 * kChannels + i], 0);
  }
}

}  // namespace

int main() {
  for_every_kernel([](auto types, double tolerance) {
    agrees_with_the_reference(types, tolerance);
  });
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    pools(true);
    pools(false);
  }
  bad_blocks_are_refused(Problem<float, float>({{96, 2}}, 1, 4));
  return 0;
}
