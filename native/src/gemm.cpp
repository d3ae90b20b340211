// Which kernels the matrix products use.
#include "gemm.h"

namespace raymoe {

const GemmKernels& gemm_kernels() {
#if defined(RAYMOE_X86_KERNELS)
  switch (active_isa()) {
    case Isa::kAvx2:
      return gemm_kernels_avx2();
    case Isa::kAvx512:
      return gemm_kernels_avx512();
    case Isa::kAvx512Bf16:
      return gemm_kernels_avx512_bf16();
    case Isa::kScalar:
      break;
  }
#endif
  return gemm_kernels_scalar();
}

}  // namespace raymoe
