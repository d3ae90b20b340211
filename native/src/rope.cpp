#include "raymoe/rope.h"

#include "parallel_rows.h"

namespace raymoe {
namespace {

const FloatKernels<QkvRope>& kernels() {
#if defined(RAYMOE_X86_KERNELS)
  return kernels_of(kQkvRopeScalar, kQkvRopeAvx2, kQkvRopeAvx512);
#else
  return kQkvRopeScalar;
#endif
}

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

void check_positions(const QkvRopeViews& views) {
  const int32_t* positions = views.positions.data<int32_t>();
  for (int64_t row = 0; row < views.positions.size(0); ++row)
    if (positions[row] < 0 || positions[row] >= views.cosine.size(0))
      throw std::invalid_argument("qkv_rope: positions[" + std::to_string(row) + "] is " +
                                  std::to_string(positions[row]) + ", the tables have " +
                                  std::to_string(views.cosine.size(0)) + " rows");
}

/// Whether the norm spans all heads; both weights must agree on it.
bool check_shapes(const QkvRopeViews& views) {
  const TensorView& qkv = views.qkv.expect_rank("qkv_rope: qkv", 2);
  check_heads("qkv_rope: query", views.query, qkv);
  check_heads("qkv_rope: key", views.key, qkv);
  check_heads("qkv_rope: value", views.value, qkv);
  const int64_t heads = views.query.size(1), dim = views.query.size(2);
  const int64_t kv_heads = views.key.size(1);
  for (const TensorView* kv : {&views.key, &views.value})
    kv->expect_size("qkv_rope: key or value", 1, kv_heads)
        .expect_size("qkv_rope: key or value", 2, dim);
  qkv.expect_size("qkv_rope: qkv", 1, (heads + 2 * kv_heads) * dim);
  views.positions.expect("qkv_rope: positions", DType::kInt32, 1)
      .expect_size("qkv_rope: positions", 0, qkv.size(0));
  check_tables(views, dim);
  check_positions(views);
  const bool spans = (views.query_norm && views.query_norm->num_elements() != dim) ||
                     (views.key_norm && views.key_norm->num_elements() != dim);
  check_norm("qkv_rope: q_norm", views.query_norm, qkv, spans ? heads * dim : dim);
  check_norm("qkv_rope: k_norm", views.key_norm, qkv, spans ? kv_heads * dim : dim);
  return spans;
}

}  // namespace

void qkv_rope(const QkvRopeViews& views, const QkvRopeOptions& options) {
  const auto kernel = kernels().of(views.qkv.dtype(), "qkv_rope: qkv");
  QkvRope args{};
  args.norm_spans_heads = check_shapes(views);
  args.norm_follows = options.norm_follows;
  args.interleaved = options.interleaved;
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
  args.half_dims = views.cosine.size(1);
  args.eps = options.eps;
  args.clip = options.clip;
  for_row_ranges(views.qkv.size(0), views.qkv.size(1),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace raymoe
