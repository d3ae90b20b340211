#include "gemm_vector-inl.h"

namespace raymoe {

const GemmKernels& gemm_kernels_avx512() {
  static const GemmKernels kernels = vector_kernels(decode_panel_avx512);
  return kernels;
}

}  // namespace raymoe
