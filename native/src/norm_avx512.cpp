#include "norm-inl.h"

namespace raymoe {

const FloatKernels<RmsNorm> kRmsNormAvx512 = {rms_norm_rows<float>, rms_norm_rows<fp16>,
                                        rms_norm_rows<bf16>};

}  // namespace raymoe
