// Choosing tokens: checks, and rows shared among the workers.
#include "raymoe/sampling.h"

#include <stdexcept>
#include <string>

#include "parallel.h"

namespace raymoe {
namespace {

Logits logits_of(const char* what, const TensorView& logits) {
  logits.expect_rank(what, 2);
  return Logits{logits.raw(), logits.stride(0), logits.size(1)};
}

template <typename T>
T* column(const char* what, const TensorView& view, int64_t rows) {
  view.expect(what, DTypeOf<T>::value, 1).expect_size(what, 0, rows);
  return view.data<T>();
}

template <typename Args, typename Kernel>
void run(const TensorView& logits, const Args& args, Kernel kernel) {
  for_row_ranges(logits.size(0), logits.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace

void argmax(const TensorView& logits, const TensorView& ids) {
  const auto kernel = sampling_kernels().argmax.of(logits.dtype(), "argmax: logits");
  const ArgMax args{logits_of("argmax: logits", logits),
                    column<int64_t>("argmax: ids", ids, logits.size(0))};
  run(logits, args, kernel);
}

void gumbel_argmax(const GumbelViews& views) {
  const TensorView& logits = views.logits;
  const auto kernel = sampling_kernels().gumbel_argmax.of(logits.dtype(), "gumbel_argmax: logits");
  const Logits rows = logits_of("gumbel_argmax: logits", logits);
  const int64_t count = logits.size(0);
  const GumbelArgMax args{
      rows,
      views.scale ? column<float>("gumbel_argmax: scale", *views.scale, count) : nullptr,
      column<int64_t>("gumbel_argmax: seed", views.seed, count),
      column<int64_t>("gumbel_argmax: row_key", views.row_key, count),
      column<int32_t>("gumbel_argmax: sample", views.sample, count),
      column<int32_t>("gumbel_argmax: position", views.position, count),
      column<int64_t>("gumbel_argmax: ids", views.ids, count)};
  run(logits, args, kernel);
}

void log_sum_exp(const TensorView& logits, const TensorView& out) {
  const auto kernel = sampling_kernels().log_sum_exp.of(logits.dtype(), "log_sum_exp: logits");
  const LogSumExp args{logits_of("log_sum_exp: logits", logits),
                       column<float>("log_sum_exp: out", out, logits.size(0))};
  run(logits, args, kernel);
}

void top_k(const TensorView& logits, const TensorView& ids, const TensorView& values) {
  const auto kernel = sampling_kernels().top_k.of(logits.dtype(), "top_k: logits");
  const Logits rows = logits_of("top_k: logits", logits);
  ids.expect("top_k: ids", DType::kInt64, 2).expect_size("top_k: ids", 0, logits.size(0));
  ids.expect_contiguous("top_k: ids");
  const int64_t k = ids.size(1);
  values.expect("top_k: values", DType::kFloat32, 2).expect_contiguous("top_k: values");
  values.expect_size("top_k: values", 0, logits.size(0)).expect_size("top_k: values", 1, k);
  if (k < 1 || k > rows.size)
    throw std::invalid_argument("top_k: k is " + std::to_string(k) + ", rows have " +
                                std::to_string(rows.size) + " logits");
  run(logits, TopK{rows, k, ids.data<int64_t>(), values.data<float>()}, kernel);
}

}  // namespace raymoe
