#include "sampling-inl.h"

namespace raymoe {

const SamplingKernels kSamplingAvx2 = RAYMOE_SAMPLING_KERNELS;

}  // namespace raymoe
