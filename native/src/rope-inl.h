// Split, QK norm, clip and rotation, written once on vec_f32.h for each instruction set.
#pragma once

#include "norm-inl.h"
#include "raymoe/rope.h"

namespace raymoe {
namespace {

/// Cosines and sines of one position, rounded to the storage type.
struct Angles {
  float cosine[kMaxHeadDim / 2];
  float sine[kMaxHeadDim / 2];
};

template <typename T>
inline void load_angles(const QkvRope& args, int64_t position, Angles& angles) {
  const float* cosine = args.cosine + position * args.table_stride;
  const float* sine = args.sine + position * args.table_stride;
  for_lanes(args.half_dims, [&](int64_t i, auto part) {
    store(angles.cosine + i, rounded_to<T>(load(cosine + i, part)), part);
    store(angles.sine + i, rounded_to<T>(load(sine + i, part)), part);
  });
}

/// x limited to [-limit, limit]; NaN stays NaN.
inline F32 clip_to(F32 x, F32 limit) {
  return where_nan(x, x, max(min(x, limit), sub(splat(0.0f), limit)));
}

/// One head, normed if weight: round(weight * round(x * scale)), then clipped, as float.
template <typename T>
inline void load_head(const QkvRope& args, const T* head, const T* weight, float scale,
                      float* out) {
  const F32 factor = splat(scale), limit = rounded_to<T>(splat(args.clip));
  const bool clips = args.clip < __builtin_inff();
  for_lanes(args.head_dim, [&](int64_t i, auto part) {
    F32 x = load(head + i, part);
    if (weight != nullptr)
      x = rounded_to<T>(mul(load(weight + i, part), rounded_to<T>(mul(x, factor))));
    if (clips) x = clip_to(x, limit);
    store(out + i, x, part);
  });
}

/// The first of all pairs of neighbours, then the second of all.
inline void part_pairs(const QkvRope& args, float* x) {
  float pairs[kMaxHeadDim];
  const int64_t half = args.half_dims;
  std::memcpy(pairs, x, static_cast<size_t>(2 * half) * sizeof(float));
  for (int64_t i = 0; i < half; ++i) {
    x[i] = pairs[2 * i];
    x[half + i] = pairs[2 * i + 1];
  }
}

/// A head in place: round(weight * round(x * scale)).
template <typename T>
inline void norm_head(const QkvRope& args, const T* weight, T* x) {
  const F32 factor = splat(inverse_rms(x, args.head_dim, args.eps));
  for_lanes(args.head_dim, [&](int64_t i, auto part) {
    store(x + i, mul(load(weight + i, part), rounded_to<T>(mul(load(x + i, part), factor))), part);
  });
}

/// out = x * cos + rotate_half(x) * sin, each product and the sum rounded.
template <typename T>
inline void rotate_head(const QkvRope& args, const float* x, const Angles& angles, T* out) {
  const int64_t half = args.half_dims;
  for_lanes(half, [&](int64_t i, auto part) {
    const F32 cosine = load(angles.cosine + i, part), sine = load(angles.sine + i, part);
    const F32 a = load(x + i, part), b = load(x + half + i, part);
    const F32 minus_b = sub(splat(-0.0f), b);
    store(out + i, add(rounded_to<T>(mul(a, cosine)), rounded_to<T>(mul(minus_b, sine))), part);
    store(out + half + i, add(rounded_to<T>(mul(b, cosine)), rounded_to<T>(mul(a, sine))), part);
  });
  for_lanes(args.head_dim - 2 * half, [&](int64_t i, auto part) {
    store(out + 2 * half + i, load(x + 2 * half + i, part), part);
  });
}

/// All query heads, or all key heads, of one token.
template <typename T>
inline void project_heads(const QkvRope& args, const T* heads, const T* weight, int64_t num_heads,
                          const Angles& angles, T* out) {
  float head[kMaxHeadDim];
  const int64_t dim = args.head_dim;
  const T* before = args.norm_follows ? nullptr : weight;
  float scale = 1.0f;
  if (before != nullptr && args.norm_spans_heads)
    scale = inverse_rms(heads, num_heads * dim, args.eps);
  for (int64_t h = 0; h < num_heads; ++h) {
    if (before != nullptr && !args.norm_spans_heads)
      scale = inverse_rms(heads + h * dim, dim, args.eps);
    const T* head_weight = before == nullptr || !args.norm_spans_heads ? before : before + h * dim;
    load_head(args, heads + h * dim, head_weight, scale, head);
    if (args.interleaved) part_pairs(args, head);
    rotate_head(args, head, angles, out + h * dim);
    if (args.norm_follows && weight != nullptr) norm_head(args, weight, out + h * dim);
  }
}

template <typename T>
inline void copy_values(const QkvRope& args, const T* values, T* out) {
  const int64_t size = args.num_kv_heads * args.head_dim;
  if (!(args.clip < __builtin_inff())) {
    std::memcpy(out, values, static_cast<size_t>(size) * sizeof(T));
    return;
  }
  const F32 limit = rounded_to<T>(splat(args.clip));
  for_lanes(size, [&](int64_t i, auto part) {
    const F32 x = load(values + i, part);
    store(out + i, clip_to(x, limit), part);
  });
}

template <typename T>
void qkv_rope_rows(const QkvRope& args, int64_t begin, int64_t end) {
  Angles angles;
  const int64_t q_size = args.num_heads * args.head_dim;
  const int64_t kv_size = args.num_kv_heads * args.head_dim;
  for (int64_t row = begin; row < end; ++row) {
    const T* qkv = static_cast<const T*>(args.qkv) + row * args.qkv_stride;
    load_angles<T>(args, args.positions[row], angles);
    project_heads(args, qkv, static_cast<const T*>(args.query_norm), args.num_heads, angles,
                  static_cast<T*>(args.query) + row * q_size);
    project_heads(args, qkv + q_size, static_cast<const T*>(args.key_norm), args.num_kv_heads,
                  angles, static_cast<T*>(args.key) + row * kv_size);
    copy_values(args, qkv + q_size + kv_size, static_cast<T*>(args.value) + row * kv_size);
  }
}

}  // namespace
}  // namespace raymoe
