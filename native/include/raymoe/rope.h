// From the fused QKV projection to rotated queries, keys and values, in one pass over memory.
#pragma once

#include <cstdint>
#include <optional>

#include "raymoe/float_kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

constexpr int64_t kMaxHeadDim = 512;

/// Per token: split, RMS norm of queries and keys (if weights), clip (if finite), rotation of the
/// first 2 * half_dims dimensions of every query and key head. A pair is half_dims apart; where
/// interleaved, neighbours are a pair, and the first of all pairs come out before the second of
/// all. Every step is rounded to the storage type, cosines and sines too, where Hugging Face rounds.
struct QkvRope {
  const void* qkv;           // [T, (H + 2 G) * D], row stride qkv_stride
  const int32_t* positions;  // [T]
  const float* cosine;       // [P, half_dims], row stride table_stride; scaled already
  const float* sine;         // likewise
  const void* query_norm;    // [norm_span of queries] or null
  const void* key_norm;      // likewise
  void *query, *key, *value; // [T, H, D], [T, G, D], [T, G, D], contiguous
  int64_t qkv_stride, table_stride;
  int64_t num_heads, num_kv_heads, head_dim, half_dims;
  bool norm_spans_heads;     // one norm over all heads of a token (OLMoE), not one per head
  bool norm_follows;         // the norm, one per head, comes after the rotation (Hunyuan)
  bool interleaved;
  float eps, clip;           // clip is infinity for none
};

extern const FloatKernels<QkvRope> kQkvRopeScalar, kQkvRopeAvx2, kQkvRopeAvx512;

struct QkvRopeViews {
  TensorView qkv, positions, cosine, sine;
  std::optional<TensorView> query_norm, key_norm;
  TensorView query, key, value;
};

struct QkvRopeOptions {
  float eps, clip;
  bool norm_follows, interleaved;
};

/// Checks (positions against the tables too), splits the tokens over the worker pool.
void qkv_rope(const QkvRopeViews& views, const QkvRopeOptions& options);

}  // namespace raymoe
