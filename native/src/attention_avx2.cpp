// Attention kernel for AVX2: cache elements widened to float32, fused multiply-add.
#include "attention-inl.h"

namespace raymoe {

AttentionKernel attention_kernel_avx2(DType query, DType cache) {
  return wide_kernel(query, cache);
}

}  // namespace raymoe
