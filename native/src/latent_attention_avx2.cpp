// Latent attention kernel for AVX2: cached rows widened to float32, fused multiply-add.
#include "latent_attention-inl.h"

namespace raymoe {

LatentKernel latent_kernel_avx2(DType query, DType cache) { return wide_kernel(query, cache); }

}  // namespace raymoe
