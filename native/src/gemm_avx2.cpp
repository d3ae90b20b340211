#include "gemm_vector-inl.h"

namespace raymoe {

const GemmKernels& gemm_kernels_avx2() {
  static const GemmKernels kernels = vector_kernels(decode_panel_avx2);
  return kernels;
}

}  // namespace raymoe
