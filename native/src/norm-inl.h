// RMS norm, written once on vec_f32.h and compiled for each instruction set.
#pragma once

#include "raymoe/norm.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

/// 1 / sqrt(mean of squares + eps) of one row; 4 partial sums per lane, float32.
template <typename T>
inline float inverse_rms(const T* row, int64_t size, float eps) {
  F32 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) {
      const F32 x = load(row + i + k * kLanes, Whole{});
      sum[k] = add(sum[k], mul(x, x));
    }
  for_lanes(size - i, [&](int64_t offset, auto part) {
    const F32 x = load(row + i + offset, part);
    sum[0] = add(sum[0], mul(x, x));
  });
  const float total = sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + eps);
}

/// round(row * scale), then, with a weight, round(weight * that): the roundings of Hugging Face.
template <typename T>
inline void scale_row(const T* row, const T* weight, float scale, int64_t size, T* out) {
  const F32 factor = splat(scale);
  if (weight == nullptr)
    for_lanes(size, [&](int64_t i, auto part) { store(out + i, mul(load(row + i, part), factor), part); });
  else
    for_lanes(size, [&](int64_t i, auto part) {
      const F32 normed = rounded_to<T>(mul(load(row + i, part), factor));
      store(out + i, mul(load(weight + i, part), normed), part);
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
    scale_row(hidden, static_cast<const T*>(args.weight), scale, args.size,
              static_cast<T*>(args.out) + row * args.size);
  }
}

}  // namespace
}  // namespace raymoe
