#include "rope-inl.h"

namespace raymoe {

const FloatKernels<QkvRope> kQkvRopeAvx512 = {qkv_rope_rows<float>, qkv_rope_rows<fp16>,
                                        qkv_rope_rows<bf16>};

}  // namespace raymoe
