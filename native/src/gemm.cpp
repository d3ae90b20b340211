// Which kernels the matrix products use.
#include "gemm.h"

namespace raymoe {

const GemmKernels& gemm_kernels() {
#if defined(RAYMOE_X86_KERNELS)
  if (active_isa() == Isa::kAvx512Bf16) return gemm_kernels_avx512_bf16();
#endif
  return gemm_kernels_scalar();
}

}  // namespace raymoe
