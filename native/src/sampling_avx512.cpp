#include "sampling-inl.h"

namespace raymoe {

const SamplingKernels kSamplingAvx512 = RAYMOE_SAMPLING_KERNELS;

}  // namespace raymoe
