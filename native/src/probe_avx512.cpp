#include "probe_avx512-inl.h"

namespace raymoe {

const ProbeKernels kProbeAvx512 = {read_share, multiply_add_f32, nullptr, dot_int8};

}  // namespace raymoe
