// Norm, rotation and routing: checks, and rows shared among the workers.
#include "raymoe/elementwise.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace raymoe {
namespace {

void check_heads(const char* what, const TensorView& heads, const TensorView& qkv) {
  heads.expect(what, qkv.dtype(), 3).expect_size(what, 0, qkv.size(0)).expect_contiguous(what);
}

void check_norm(const char* what, const std::optional<TensorView>& weight, const TensorView& qkv,
                int64_t span) {
  if (weight) weight->expect(what, qkv.dtype(), 1).expect_size(what, 0, span);
}

void check_tables(const QkvRopeViews& views, int64_t head_dim) {
  views.cosine.expect("qkv_rope: cos", DType::kFloat32, 2);
  views.sine.expect("qkv_rope: sin", DType::kFloat32, 2);
  views.sine.expect_size("qkv_rope: sin", 0, views.cosine.size(0));
  views.sine.expect_size("qkv_rope: sin", 1, views.cosine.size(1));
  if (views.sine.stride(0) != views.cosine.stride(0))
    throw std::invalid_argument("qkv_rope: cos and sin must have the same strides");
  if (2 * views.cosine.size(1) > head_dim || head_dim > kMaxHeadDim)
    throw std::invalid_argument("qkv_rope: cos covers " + std::to_string(2 * views.cosine.size(1)) +
                                " dimensions, head_dim is " + std::to_string(head_dim) +
                                ", the kernel takes up to " + std::to_string(kMaxHeadDim));
}

void check_positions(const std::string& operation, const TensorView& view, int64_t num_positions) {
  const int32_t* positions = view.data<int32_t>();
  for (int64_t row = 0; row < view.size(0); ++row)
    if (positions[row] < 0 || positions[row] >= num_positions)
      throw std::invalid_argument(operation + ": positions[" + std::to_string(row) + "] is " +
                                  std::to_string(positions[row]) + ", the tables have " +
                                  std::to_string(num_positions) + " rows");
}

/// Whether the norm spans all heads; both weights must agree on it.
bool check_shapes(const QkvRopeViews& views, bool values_are_keys) {
  const TensorView& qkv = views.qkv.expect_rank("qkv_rope: qkv", 2);
  check_heads("qkv_rope: query", views.query, qkv);
  check_heads("qkv_rope: key", views.key, qkv);
  check_heads("qkv_rope: value", views.value, qkv);
  const int64_t heads = views.query.size(1), dim = views.query.size(2);
  const int64_t kv_heads = views.key.size(1);
  views.key.expect_size("qkv_rope: key", 2, dim);
  views.value.expect_size("qkv_rope: value", 1, kv_heads);
  const int64_t value_size = values_are_keys ? 0 : kv_heads * views.value.size(2);
  if (values_are_keys) views.value.expect_size("qkv_rope: value", 2, dim);
  qkv.expect_size("qkv_rope: qkv", 1, (heads + kv_heads) * dim + value_size);
  views.positions.expect("qkv_rope: positions", DType::kInt32, 1)
      .expect_size("qkv_rope: positions", 0, qkv.size(0));
  check_tables(views, dim);
  check_positions("qkv_rope", views.positions, views.cosine.size(0));
  const bool spans = (views.query_norm && views.query_norm->num_elements() != dim) ||
                     (views.key_norm && views.key_norm->num_elements() != dim);
  check_norm("qkv_rope: q_norm", views.query_norm, qkv, spans ? heads * dim : dim);
  check_norm("qkv_rope: k_norm", views.key_norm, qkv, spans ? kv_heads * dim : dim);
  return spans;
}

}  // namespace

void rms_norm(const TensorView& hidden, const TensorView* delta, const TensorView* weight,
              float eps, NormWeighting weighting, const TensorView& out) {
  const auto kernel = elementwise_kernels().rms_norm.of(hidden.dtype(), "rms_norm: hidden");
  hidden.expect_rank("rms_norm: hidden", 2);
  const int64_t rows = hidden.size(0), size = hidden.size(1);
  out.expect("rms_norm: out", hidden.dtype(), 2).expect_size("rms_norm: out", 0, rows);
  out.expect_size("rms_norm: out", 1, size);
  if (delta != nullptr) {
    delta->expect("rms_norm: delta", hidden.dtype(), 2).expect_size("rms_norm: delta", 0, rows);
    delta->expect_size("rms_norm: delta", 1, size);
  }
  if (weight != nullptr)
    weight->expect("rms_norm: weight", hidden.dtype(), 1).expect_size("rms_norm: weight", 0, size);
  if (size == 0) return;
  const RmsNorm args{hidden.raw(), delta != nullptr ? delta->raw() : nullptr,
                     weight != nullptr ? weight->raw() : nullptr, out.raw(), hidden.stride(0),
                     delta != nullptr ? delta->stride(0) : 0, out.stride(0), size, eps, weighting};
  for_row_ranges(rows, size,
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void qkv_rope(const QkvRopeViews& views, const QkvRopeOptions& options) {
  const auto kernel = elementwise_kernels().qkv_rope.of(views.qkv.dtype(), "qkv_rope: qkv");
  QkvRope args{};
  args.norm_spans_heads = check_shapes(views, options.values_are_keys);
  args.norm_follows = options.norm_follows;
  args.interleaved = options.interleaved;
  args.norms_values = options.norms_values;
  args.values_are_keys = options.values_are_keys;
  args.weighting = options.weighting;
  if (args.norm_spans_heads && args.norm_follows)
    throw std::invalid_argument("qkv_rope: a norm after the rotation must be one per head");
  args.qkv = views.qkv.raw();
  args.positions = views.positions.data<int32_t>();
  args.cosine = views.cosine.data<float>();
  args.sine = views.sine.data<float>();
  args.query_norm = views.query_norm ? views.query_norm->raw() : nullptr;
  args.key_norm = views.key_norm ? views.key_norm->raw() : nullptr;
  args.query = views.query.raw();
  args.key = views.key.raw();
  args.value = views.value.raw();
  args.qkv_stride = views.qkv.stride(0);
  args.table_stride = views.cosine.stride(0);
  args.num_heads = views.query.size(1);
  args.num_kv_heads = views.key.size(1);
  args.head_dim = views.query.size(2);
  args.value_dim = views.value.size(2);
  args.half_dims = views.cosine.size(1);
  args.eps = options.eps;
  args.clip = options.clip;
  for_row_ranges(views.qkv.size(0), views.qkv.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void rotate_ends(const TensorView& rows, const TensorView& positions, const TensorView& cosine,
                 const TensorView& sine, bool backwards, const TensorView& out) {
  const auto kernel = elementwise_kernels().rotate_ends.of(rows.dtype(), "rotate_ends: rows");
  rows.expect_rank("rotate_ends: rows", 3);
  out.expect("rotate_ends: out", rows.dtype(), 3);
  for (int64_t axis = 0; axis < 3; ++axis)
    out.expect_size("rotate_ends: out", axis, rows.size(axis));
  positions.expect("rotate_ends: positions", DType::kInt32, 1)
      .expect_size("rotate_ends: positions", 0, rows.size(0));
  cosine.expect("rotate_ends: cos", DType::kFloat32, 2);
  sine.expect("rotate_ends: sin", DType::kFloat32, 2)
      .expect_size("rotate_ends: sin", 0, cosine.size(0))
      .expect_size("rotate_ends: sin", 1, cosine.size(1));
  const int64_t half_dims = cosine.size(1);
  if (sine.stride(0) != cosine.stride(0) || 2 * half_dims > std::min(rows.size(2), kMaxHeadDim))
    throw std::invalid_argument("rotate_ends: cos covers " + std::to_string(2 * half_dims) +
                                " dimensions of rows of " + std::to_string(rows.size(2)) +
                                ", at most " + std::to_string(kMaxHeadDim) +
                                ", and sin has its strides");
  check_positions("rotate_ends", positions, cosine.size(0));
  const RotateEnds args{rows.raw(),
                        positions.data<int32_t>(),
                        cosine.data<float>(),
                        sine.data<float>(),
                        out.raw(),
                        rows.stride(0),
                        rows.stride(1),
                        out.stride(0),
                        out.stride(1),
                        cosine.stride(0),
                        rows.size(1),
                        rows.size(2),
                        half_dims,
                        backwards};
  for_row_ranges(rows.size(0), rows.size(1) * (rows.size(2) + 8 * half_dims),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void route(const TensorView& logits, bool renormalize, const TensorView& ids,
           const TensorView& weights) {
  const auto kernel = elementwise_kernels().route.of(logits.dtype(), "route: logits");
  logits.expect_rank("route: logits", 2);
  const int64_t rows = logits.size(0), num_experts = logits.size(1);
  ids.expect("route: ids", DType::kInt32, 2).expect_size("route: ids", 0, rows);
  ids.expect_contiguous("route: ids");
  const int64_t top_k = ids.size(1);
  weights.expect("route: weights", DType::kFloat32, 2).expect_size("route: weights", 0, rows);
  weights.expect_size("route: weights", 1, top_k).expect_contiguous("route: weights");
  if (num_experts > kMaxExperts || top_k > num_experts)
    throw std::invalid_argument("route: top_k " + std::to_string(top_k) + " of " +
                                std::to_string(num_experts) + " experts; at most " +
                                std::to_string(kMaxExperts) + " experts");
  const Route args{logits.raw(),     ids.data<int32_t>(), weights.data<float>(),
                   logits.stride(0), num_experts,         top_k,
                   renormalize};
  for_row_ranges(rows, 4 * num_experts + 8 * top_k,
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void add_gated(const TensorView& out, const TensorView& shared, const TensorView& gate) {
  const auto kernel = elementwise_kernels().gated_add.of(out.dtype(), "add_gated: out");
  out.expect_rank("add_gated: out", 2);
  const int64_t rows = out.size(0), size = out.size(1);
  shared.expect("add_gated: shared", out.dtype(), 2).expect_size("add_gated: shared", 0, rows);
  shared.expect_size("add_gated: shared", 1, size);
  gate.expect("add_gated: gate", out.dtype(), 2).expect_size("add_gated: gate", 0, rows);
  gate.expect_size("add_gated: gate", 1, 1);
  const GatedAdd args{out.raw(),        shared.raw(),    gate.raw(), out.stride(0),
                      shared.stride(0), gate.stride(0), size};
  for_row_ranges(rows, size, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace raymoe
