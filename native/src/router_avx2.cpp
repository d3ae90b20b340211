#include "router-inl.h"

namespace raymoe {

const FloatKernels<Route> kRouteAvx2 = {route_rows<float>, route_rows<fp16>, route_rows<bf16>};
const FloatKernels<GatedAdd> kGatedAddAvx2 = {gated_add_rows<float>, gated_add_rows<fp16>,
                                          gated_add_rows<bf16>};

}  // namespace raymoe
