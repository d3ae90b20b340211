// From router logits to the experts of each token; and the gated addition of a shared expert.
#pragma once

#include <cstdint>

#include "raymoe/float_kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

constexpr int64_t kMaxExperts = 1024;

/// Softmax over all experts in float32; the top_k largest, descending, ties to the lower index,
/// NaN largest; optionally divided by their sum.
struct Route {
  const void* logits;  // [T, E], row stride logits_stride
  int32_t* ids;        // [T, K], contiguous; distinct within a token, whatever the logits
  float* weights;      // [T, K], contiguous
  int64_t logits_stride, num_experts, top_k;
  bool renormalize;
};

/// out += round(round(sigmoid(gate)) * shared), rounded.
struct GatedAdd {
  void* out;           // [T, size]
  const void* shared;  // [T, size]
  const void* gate;    // [T, 1]
  int64_t out_stride, shared_stride, gate_stride, size;
};

extern const FloatKernels<Route> kRouteScalar, kRouteAvx2, kRouteAvx512;
extern const FloatKernels<GatedAdd> kGatedAddScalar, kGatedAddAvx2, kGatedAddAvx512;

/// Check shapes, then split the tokens over the worker pool.
void route(const TensorView& logits, bool renormalize, const TensorView& ids,
           const TensorView& weights);
void add_gated(const TensorView& out, const TensorView& shared, const TensorView& gate);

}  // namespace raymoe
