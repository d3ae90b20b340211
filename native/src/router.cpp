#include "raymoe/router.h"

#include "parallel_rows.h"

namespace raymoe {
namespace {

#if defined(RAYMOE_X86_KERNELS)
const auto& route_kernels() { return kernels_of(kRouteScalar, kRouteAvx2, kRouteAvx512); }
const auto& gated_add_kernels() {
  return kernels_of(kGatedAddScalar, kGatedAddAvx2, kGatedAddAvx512);
}
#else
const auto& route_kernels() { return kRouteScalar; }
const auto& gated_add_kernels() { return kGatedAddScalar; }
#endif

}  // namespace

void route(const TensorView& logits, bool renormalize, const TensorView& ids,
           const TensorView& weights) {
  const auto kernel = route_kernels().of(logits.dtype(), "route: logits");
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
  const auto kernel = gated_add_kernels().of(out.dtype(), "add_gated: out");
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
