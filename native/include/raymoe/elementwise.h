// Kernels over rows: RMS norm, from the fused QKV projection to rotated heads, from router logits
// to experts, and the gated addition of a shared expert.
#pragma once

#include <cstdint>
#include <optional>

#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// How a norm applies its weight: to the normed value rounded to the storage type (Llama), or, as
/// offset + weight, to the normed float32 value, which is rounded once (OLMo-3, Gemma).
struct NormWeighting {
  bool rounds_once = false;
  float offset = 0.0f;
};

/// Rows of `size` elements; strides in elements. out may not overlap the others.
/// Sums are float32, in an order that depends only on `size` and the instruction set.
struct RmsNorm {
  void* hidden;       // [T, size]; hidden += delta first, rounded to the storage type, if delta
  const void* delta;  // [T, size] or null
  const void* weight; // [size] or null
  void* out;          // [T, size]
  int64_t hidden_stride, delta_stride, out_stride, size;
  float eps;
  NormWeighting weighting;
};

/// Checks, splits the rows over the worker pool. `delta` and `weight` may be null.
void rms_norm(const TensorView& hidden, const TensorView* delta, const TensorView* weight,
              float eps, NormWeighting weighting, const TensorView& out);

constexpr int64_t kMaxHeadDim = 512;

/// Per token: split, RMS norm of queries and keys (if weights) and of values (if norms_values,
/// without weight), clip (if finite), rotation of the first 2 * half_dims dimensions of every query and key head. A pair is half_dims apart; where
/// interleaved, neighbours are a pair, and the first of all pairs come out before the second of
/// all. Every result is rounded to the storage type, cosines and sines too, where Hugging Face
/// rounds.
struct QkvRope {
  const void* qkv;           // [T, (H + G) * D + G * V], row stride qkv_stride
  const int32_t* positions;  // [T]
  const float* cosine;       // [P, half_dims], row stride table_stride; scaled already
  const float* sine;         // likewise
  const void* query_norm;    // [norm_span of queries] or null
  const void* key_norm;      // likewise
  void *query, *key, *value; // [T, H, D], [T, G, D], [T, G, V], contiguous
  int64_t qkv_stride, table_stride;
  int64_t num_heads, num_kv_heads, head_dim, value_dim, half_dims;
  bool norm_spans_heads;     // one norm over all heads of a token (OLMoE), not one per head
  bool norm_follows;         // the norm, one per head, comes after the rotation (Hunyuan)
  bool interleaved;
  bool norms_values;         // one norm per head
  bool values_are_keys;      // qkv is [T, (H + G) * D]: values are the keys before norm and rotation
  float eps, clip;           // clip is infinity for none
  NormWeighting weighting;
};

struct QkvRopeViews {
  TensorView qkv, positions, cosine, sine;
  std::optional<TensorView> query_norm, key_norm;
  TensorView query, key, value;
};

struct QkvRopeOptions {
  float eps, clip;
  bool norm_follows, interleaved, norms_values, values_are_keys;
  NormWeighting weighting;
};

/// Checks (positions against the tables too), splits the tokens over the worker pool.
void qkv_rope(const QkvRopeViews& views, const QkvRopeOptions& options);

/// The last 2 * half_dims dimensions of rows, in pairs of neighbours, rotated by the position of
/// their token, or back; the others are copied. Computed in float32, rounded once. out may be rows.
struct RotateEnds {
  const void* rows;          // [T, N, size]
  const int32_t* positions;  // [T]
  const float *cosine, *sine;  // [P, half_dims], row stride table_stride
  void* out;                 // [T, N, size]
  int64_t token_stride, row_stride, out_token_stride, out_row_stride, table_stride;
  int64_t num_rows, size, half_dims;
  bool backwards;
};

/// Checks (positions against the tables too), splits the tokens over the worker pool.
void rotate_ends(const TensorView& rows, const TensorView& positions, const TensorView& cosine,
                 const TensorView& sine, bool backwards, const TensorView& out);

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

/// Check shapes, then split the tokens over the worker pool.
void route(const TensorView& logits, bool renormalize, const TensorView& ids,
           const TensorView& weights);
void add_gated(const TensorView& out, const TensorView& shared, const TensorView& gate);

struct ElementwiseKernels {
  FloatKernels<RmsNorm> rms_norm;
  FloatKernels<QkvRope> qkv_rope;
  FloatKernels<RotateEnds> rotate_ends;
  FloatKernels<Route> route;
  FloatKernels<GatedAdd> gated_add;
};
RAYMOE_DECLARE_KERNELS(ElementwiseKernels, elementwise_kernels);

}  // namespace raymoe
