// Routing and the shared expert's gate, written once on vec_f32.h for each instruction set.
#pragma once

#include "raymoe/router.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

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
}  // namespace raymoe
