// Attention kernel for AVX512: cache elements widened to float32, fused multiply-add.
#include "attention-inl.h"

namespace raymoe {

AttentionKernel attention_kernel_avx512(DType query, DType cache) {
  return wide_kernel(query, cache);
}

}  // namespace raymoe
