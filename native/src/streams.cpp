// Streams of hidden states: checks, and rows shared among the workers.
#include "raymoe/streams.h"

#include <stdexcept>
#include <string>

#include "parallel.h"

namespace raymoe {
namespace {

/// How many streams of `size` columns there are.
int64_t count_of(const char* what, const TensorView& streams, int64_t size) {
  const int64_t count = size == 0 ? 0 : streams.size(1) / size;
  if (count < 1 || count > kMaxStreams || count * size != streams.size(1))
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(streams.size(1)) +
                                " columns, expected 1 to " + std::to_string(kMaxStreams) +
                                " times " + std::to_string(size));
  return count;
}

const TensorView& expect_rows(const char* what, const TensorView& view, DType dtype, int64_t rows) {
  return view.expect(what, dtype, 2).expect_size(what, 0, rows);
}

}  // namespace

void stream_logits(const TensorView& hidden, const TensorView& logits, const TensorView& scale,
                   const TensorView& base, float eps) {
  const auto kernel = stream_kernels().logits.of(hidden.dtype(), "stream_logits: hidden");
  hidden.expect_rank("stream_logits: hidden", 2);
  expect_rows("stream_logits: logits", logits, DType::kFloat32, hidden.size(0));
  const int64_t num_factors = logits.size(1);
  scale.expect("stream_logits: scale", DType::kFloat32, 1)
      .expect_size("stream_logits: scale", 0, num_factors);
  base.expect("stream_logits: base", DType::kFloat32, 1)
      .expect_size("stream_logits: base", 0, num_factors);
  const StreamLogits args{hidden.raw(),         logits.data<float>(), scale.data<float>(),
                          base.data<float>(),   hidden.stride(0),     logits.stride(0),
                          hidden.size(1),       num_factors,          eps};
  for_row_ranges(hidden.size(0), hidden.size(1) + num_factors,
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void read_streams(const TensorView& hidden, const TensorView& logits, float eps,
                  const TensorView& out) {
  const auto kernel = stream_kernels().read.of(hidden.dtype(), "read_streams: hidden");
  hidden.expect_rank("read_streams: hidden", 2);
  expect_rows("read_streams: out", out, hidden.dtype(), hidden.size(0));
  const int64_t count = count_of("read_streams: hidden", hidden, out.size(1));
  expect_rows("read_streams: logits", logits, DType::kFloat32, hidden.size(0))
      .expect_size("read_streams: logits", 1, count);
  const StreamRead args{hidden.raw(),     logits.data<float>(), out.raw(),
                        hidden.stride(0), logits.stride(0),     out.stride(0),
                        count,            out.size(1),          eps};
  for_row_ranges(hidden.size(0), hidden.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void read_gated_streams(const TensorView& normed, const TensorView& gates, const TensorView& out) {
  const auto kernel = stream_kernels().read_gated.of(normed.dtype(), "read_gated_streams: normed");
  normed.expect_rank("read_gated_streams: normed", 2);
  expect_rows("read_gated_streams: out", out, normed.dtype(), normed.size(0));
  expect_rows("read_gated_streams: gates", gates, normed.dtype(), normed.size(0))
      .expect_size("read_gated_streams: gates", 1, normed.size(1));
  const GatedStreamRead args{normed.raw(),
                             gates.raw(),
                             out.raw(),
                             normed.stride(0),
                             gates.stride(0),
                             out.stride(0),
                             count_of("read_gated_streams: normed", normed, out.size(1)),
                             out.size(1)};
  for_row_ranges(normed.size(0), 4 * normed.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void mixing_matrices(const TensorView& logits, int64_t iterations, float eps,
                     const TensorView& out) {
  out.expect("mixing_matrices: out", DType::kFloat32, 3).expect_contiguous("mixing_matrices: out");
  const int64_t count = out.size(1);
  out.expect_size("mixing_matrices: out", 2, count);
  if (count < 1 || count > kMaxStreams)
    throw std::invalid_argument("mixing_matrices: " + std::to_string(count) +
                                " streams, expected 1 to " + std::to_string(kMaxStreams));
  expect_rows("mixing_matrices: logits", logits, DType::kFloat32, out.size(0))
      .expect_size("mixing_matrices: logits", 1, count * count);
  const MixingMatrices args{logits.data<float>(), out.data<float>(), logits.stride(0), count,
                            iterations,           eps};
  const auto kernel = stream_kernels().mixing_matrices;
  for_row_ranges(out.size(0), 2 * iterations * count * count,
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void add_to_streams(const TensorView& hidden, const TensorView& delta, const TensorView& logits,
                    const TensorView* matrices, float magnitude, float eps) {
  const auto kernel = stream_kernels().add.of(hidden.dtype(), "add_to_streams: hidden");
  hidden.expect_rank("add_to_streams: hidden", 2);
  expect_rows("add_to_streams: delta", delta, hidden.dtype(), hidden.size(0));
  const int64_t count = count_of("add_to_streams: hidden", hidden, delta.size(1));
  expect_rows("add_to_streams: logits", logits, DType::kFloat32, hidden.size(0))
      .expect_size("add_to_streams: logits", 1, count);
  if (matrices != nullptr) {
    matrices->expect("add_to_streams: matrices", DType::kFloat32, 3)
        .expect_contiguous("add_to_streams: matrices");
    for (int64_t axis = 0; axis < 3; ++axis)
      matrices->expect_size("add_to_streams: matrices", axis, axis == 0 ? hidden.size(0) : count);
  }
  const StreamAdd args{hidden.raw(),
                       delta.raw(),
                       logits.data<float>(),
                       matrices == nullptr ? nullptr : matrices->data<float>(),
                       hidden.stride(0),
                       delta.stride(0),
                       logits.stride(0),
                       count,
                       delta.size(1),
                       magnitude,
                       eps};
  for_row_ranges(hidden.size(0), 2 * hidden.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace raymoe
