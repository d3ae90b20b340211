// Latent attention kernel for AVX512: cached rows widened to float32, fused multiply-add.
#include "latent_attention-inl.h"

namespace raymoe {

LatentKernel latent_kernel_avx512(DType query, DType cache) { return wide_kernel(query, cache); }

}  // namespace raymoe
