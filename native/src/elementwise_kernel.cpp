// Norm, rotation and routing of rows, written once on vec_f32.h.
#include <cstring>

#include "raymoe/elementwise.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

/// A normed value times its weight, to be rounded once more: the roundings of Hugging Face.
template <typename T>
inline F32 weighted(F32 normed, F32 weight, NormWeighting how) {
  if (how.rounds_once) return mul(normed, add(splat(how.offset), weight));
  return mul(weight, rounded_to<T>(normed));
}

template <typename T>
inline void scale_row(const T* row, const T* weight, float scale, int64_t size,
                      NormWeighting weighting, T* out) {
  const F32 factor = splat(scale);
  if (weight == nullptr)
    for_lanes(size, [&](int64_t i, auto part) {
      store(out + i, mul(load(row + i, part), factor), part);
    });
  else
    for_lanes(size, [&](int64_t i, auto part) {
      const F32 normed = mul(load(row + i, part), factor);
      store(out + i, weighted<T>(normed, load(weight + i, part), weighting), part);
    });
}

template <typename T>
void rms_norm_rows(const RmsNorm& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* hidden = static_cast<T*>(args.hidden) + row * args.hidden_stride;
    if (args.delta != nullptr) {
      const T* delta = static_cast<const T*>(args.delta) + row * args.delta_stride;
      for_lanes(args.size, [&](int64_t i, auto part) {
        store(hidden + i, add(load(hidden + i, part), load(delta + i, part)), part);
      });
    }
    const float scale = inverse_rms(hidden, args.size, args.eps);
    scale_row(hidden, static_cast<const T*>(args.weight), scale, args.size, args.weighting,
              static_cast<T*>(args.out) + row * args.out_stride);
  }
}

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

/// One head, normed if weight, then clipped, as float.
template <typename T>
inline void load_head(const QkvRope& args, const T* head, const T* weight, float scale,
                      float* out) {
  const F32 factor = splat(scale), limit = rounded_to<T>(splat(args.clip));
  const bool clips = args.clip < __builtin_inff();
  for_lanes(args.head_dim, [&](int64_t i, auto part) {
    F32 x = load(head + i, part);
    if (weight != nullptr)
      x = rounded_to<T>(weighted<T>(mul(x, factor), load(weight + i, part), args.weighting));
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

/// A head in place.
template <typename T>
inline void norm_head(const QkvRope& args, const T* weight, T* x) {
  const F32 factor = splat(inverse_rms(x, args.head_dim, args.eps));
  for_lanes(args.head_dim, [&](int64_t i, auto part) {
    const F32 normed = mul(load(x + i, part), factor);
    store(x + i, weighted<T>(normed, load(weight + i, part), args.weighting), part);
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
  const int64_t size = args.num_kv_heads * args.value_dim, dim = args.value_dim;
  if (args.norms_values) {
    for (int64_t begin = 0; begin < size; begin += dim) {
      const float scale = inverse_rms(values + begin, dim, args.eps);
      scale_row<T>(values + begin, nullptr, scale, dim, {}, out + begin);
    }
    values = out;
  }
  if (!(args.clip < __builtin_inff())) {
    if (values != out) std::memcpy(out, values, static_cast<size_t>(size) * sizeof(T));
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
  const int64_t key_size = args.num_kv_heads * args.head_dim;
  const int64_t value_size = args.num_kv_heads * args.value_dim;
  for (int64_t row = begin; row < end; ++row) {
    const T* qkv = static_cast<const T*>(args.qkv) + row * args.qkv_stride;
    load_angles<T>(args, args.positions[row], angles);
    project_heads(args, qkv, static_cast<const T*>(args.query_norm), args.num_heads, angles,
                  static_cast<T*>(args.query) + row * q_size);
    project_heads(args, qkv + q_size, static_cast<const T*>(args.key_norm), args.num_kv_heads,
                  angles, static_cast<T*>(args.key) + row * key_size);
    copy_values(args, qkv + q_size + (args.values_are_keys ? 0 : key_size),
                static_cast<T*>(args.value) + row * value_size);
  }
}

/// x = [2 * half_dims] floats whose neighbours are pairs.
inline void rotate_pairs(float* x, const float* cosine, const float* sine, int64_t half_dims,
                         float sign) {
  for (int64_t i = 0; i < half_dims; ++i) {
    const float first = x[2 * i], second = x[2 * i + 1], s = sign * sine[i];
    x[2 * i] = first * cosine[i] - second * s;
    x[2 * i + 1] = second * cosine[i] + first * s;
  }
}

template <typename T>
void rotate_ends_rows(const RotateEnds& args, int64_t begin, int64_t end) {
  float pairs[kMaxHeadDim];
  const int64_t rotated = 2 * args.half_dims, kept = args.size - rotated;
  const float sign = args.backwards ? -1.0f : 1.0f;
  for (int64_t token = begin; token < end; ++token) {
    const float* cosine = args.cosine + args.positions[token] * args.table_stride;
    const float* sine = args.sine + args.positions[token] * args.table_stride;
    for (int64_t n = 0; n < args.num_rows; ++n) {
      const T* row = static_cast<const T*>(args.rows) + token * args.token_stride +
                     n * args.row_stride;
      T* out = static_cast<T*>(args.out) + token * args.out_token_stride + n * args.out_row_stride;
      if (out != row) std::memcpy(out, row, static_cast<size_t>(kept) * sizeof(T));
      for_lanes(rotated, [&](int64_t i, auto part) {
        store(pairs + i, load(row + kept + i, part), part);
      });
      rotate_pairs(pairs, cosine, sine, args.half_dims, sign);
      for_lanes(rotated, [&](int64_t i, auto part) {
        store(out + kept + i, load(pairs + i, part), part);
      });
    }
  }
}

constexpr int32_t kTaken = INT32_MIN;  // below the key of every float, NaN and -inf included

/// Integers in the order of the floats; both zeros are equal, every NaN is the largest.
inline I32 sort_key(F32 x) {
  const F32 canonical = where_nan(x, from_bits(splat(0x7fffffff)), add(x, splat(0.0f)));
  const I32 bits = bits_of(canonical);
  return bit_xor(bits, bit_and(shift_right_signed<31>(bits), splat(0x7fffffff)));
}

/// exp(logit - largest) of all experts; returns their sum. `keys` order the logits.
/// Both buffers are padded to whole vectors: with zeros and with kTaken.
template <typename T>
inline float exponentials(const T* logits, int64_t num_experts, float* exps, int32_t* keys) {
  F32 largest = splat(-__builtin_inff());
  for_lanes(num_experts, [&](int64_t i, auto part) {
    const F32 x = load_filled(logits + i, part, -__builtin_inff());
    largest = max(largest, x);
    store(keys + i, sort_key(x), Whole{});
  });
  for (int64_t i = num_experts; i % kLanes != 0; ++i) keys[i] = kTaken;
  const F32 top = splat(max_of(largest));
  F32 sum = splat(0.0f);
  for_lanes(num_experts, [&](int64_t i, auto part) {
    store(exps + i, exp_of(sub(load(logits + i, part), top)), part);
    sum = add(sum, load(exps + i, part));
  });
  return sum_of(sum);
}

/// The first position of the largest key; marks it taken.
inline int32_t take_largest(int32_t* keys, int64_t padded) {
  I32 best = splat(kTaken);
  for (int64_t i = 0; i < padded; i += kLanes) best = max(best, load(keys + i, Whole{}));
  const I32 wanted = splat(max_of(best));
  for (int64_t i = 0; i < padded; i += kLanes) {
    const uint32_t equal = mask_equal(load(keys + i, Whole{}), wanted);
    if (equal == 0) continue;
    const int64_t found = i + __builtin_ctz(equal);
    keys[found] = kTaken;
    return static_cast<int32_t>(found);
  }
  return 0;
}

template <typename T>
void route_rows(const Route& args, int64_t begin, int64_t end) {
  float exps[kMaxExperts];
  int32_t keys[kMaxExperts];
  const int64_t padded = (args.num_experts + kLanes - 1) / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = static_cast<const T*>(args.logits) + row * args.logits_stride;
    const float total = exponentials(logits, args.num_experts, exps, keys);
    int32_t* ids = args.ids + row * args.top_k;
    float* weights = args.weights + row * args.top_k;
    float chosen = 0.0f;
    for (int64_t k = 0; k < args.top_k; ++k) {
      ids[k] = take_largest(keys, padded);
      weights[k] = exps[ids[k]] / total;
      chosen += weights[k];
    }
    if (args.renormalize)
      for (int64_t k = 0; k < args.top_k; ++k) weights[k] /= chosen;
  }
}

template <typename T>
void gated_add_rows(const GatedAdd& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    const T* shared = static_cast<const T*>(args.shared) + row * args.shared_stride;
    const float logit = to_float(static_cast<const T*>(args.gate)[row * args.gate_stride]);
    const float sigmoid = 1.0f / (1.0f + __builtin_expf(-logit));
    const F32 gate = rounded_to<T>(splat(sigmoid));
    for_lanes(args.size, [&](int64_t i, auto part) {
      const F32 gated = rounded_to<T>(mul(gate, load(shared + i, part)));
      store(out + i, add(load(out + i, part), gated), part);
    });
  }
}

}  // namespace

RAYMOE_DEFINE_KERNELS(ElementwiseKernels, elementwise_kernels) = {
    RAYMOE_FLOAT_KERNELS(rms_norm_rows), RAYMOE_FLOAT_KERNELS(qkv_rope_rows),
    RAYMOE_FLOAT_KERNELS(rotate_ends_rows),
    RAYMOE_FLOAT_KERNELS(route_rows), RAYMOE_FLOAT_KERNELS(gated_add_rows)};

}  // namespace raymoe
