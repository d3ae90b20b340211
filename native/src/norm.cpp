#include "raymoe/norm.h"

#include "parallel_rows.h"

namespace raymoe {
namespace {

const FloatKernels<RmsNorm>& kernels() {
#if defined(RAYMOE_X86_KERNELS)
  return kernels_of(kRmsNormScalar, kRmsNormAvx2, kRmsNormAvx512);
#else
  return kRmsNormScalar;
#endif
}

}  // namespace

void rms_norm(const TensorView& hidden, const TensorView* delta, const TensorView* weight,
              float eps, const TensorView& out) {
  const auto kernel = kernels().of(hidden.dtype(), "rms_norm: hidden");
  hidden.expect_rank("rms_norm: hidden", 2);
  const int64_t rows = hidden.size(0), size = hidden.size(1);
  out.expect("rms_norm: out", hidden.dtype(), 2).expect_size("rms_norm: out", 0, rows);
  out.expect_size("rms_norm: out", 1, size).expect_contiguous("rms_norm: out");
  if (delta != nullptr) {
    delta->expect("rms_norm: delta", hidden.dtype(), 2).expect_size("rms_norm: delta", 0, rows);
    delta->expect_size("rms_norm: delta", 1, size);
  }
  if (weight != nullptr)
    weight->expect("rms_norm: weight", hidden.dtype(), 1).expect_size("rms_norm: weight", 0, size);
  if (size == 0) return;
  const RmsNorm args{hidden.raw(), delta != nullptr ? delta->raw() : nullptr,
                     weight != nullptr ? weight->raw() : nullptr, out.raw(), hidden.stride(0),
                     delta != nullptr ? delta->stride(0) : 0, size, eps};
  for_row_ranges(rows, size,
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace raymoe
