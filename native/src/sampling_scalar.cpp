#include "sampling-inl.h"

namespace raymoe {

const SamplingKernels kSamplingScalar = RAYMOE_SAMPLING_KERNELS;

}  // namespace raymoe
