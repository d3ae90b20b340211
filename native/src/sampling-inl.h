// Token choice, written once on vec_f32.h and compiled for each instruction set.
#pragma once

#include "raymoe/sampling.h"
#include "sampling_noise-inl.h"

namespace raymoe {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kBlock = 512;  // elements whose maximum is reduced to one number at a time

template <typename T>
inline const T* row_of(const Logits& logits, int64_t row) {
  return static_cast<const T*>(logits.data) + row * logits.stride;
}

struct Largest {
  float value = -kInfinity;
  int64_t block = 0;  // start of the first block that holds it
  bool has_nan = false;
};

template <typename T>
inline Largest find_largest(const T* row, int64_t size) {
  Largest largest;
  uint32_t nan = 0;
  for (int64_t block = 0; block < size; block += kBlock) {
    const int64_t count = size - block < kBlock ? size - block : kBlock;
    F32 best = splat(-kInfinity);
    for_lanes(count, [&](int64_t i, auto part) {
      const F32 x = load_filled(row + block + i, part, -kInfinity);
      nan |= mask_nan(x);
      best = max(best, x);
    });
    const float value = max_of(best);
    if (value > largest.value) {
      largest.value = value;
      largest.block = block;
    }
  }
  largest.has_nan = nan != 0;
  return largest;
}

template <typename T>
void argmax_rows(const ArgMax& args, int64_t begin, int64_t end) {
  const int64_t size = args.logits.size;
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = row_of<T>(args.logits, row);
    const Largest largest = find_largest(logits, size);
    int64_t found = largest.block;
    if (largest.has_nan || largest.value == -kInfinity)
      found = -1;
    else
      while (to_float(logits[found]) != largest.value) ++found;
    args.ids[row] = found;
  }
}

/// The running maximum of a row and where it was found.
struct Winner {
  float value = -kInfinity;
  int64_t id = -1;
};

/// Adds exact noise to the lanes of `candidates` and keeps the first largest.
inline void challenge(Winner& winner, F32 logits, I32 words, uint32_t candidates, int64_t first) {
  float value[kLanes];
  store(value, add(logits, gumbel_of(words)), Whole{});
  for (; candidates != 0; candidates &= candidates - 1) {
    const int lane = __builtin_ctz(candidates);
    if (value[lane] > winner.value) winner = Winner{value[lane], first + lane};
  }
}

/// One group of tokens; returns whether it holds a NaN. Most groups end at one of two bounds: no
/// noise can lift any logit over the winner, or this noise does not.
template <typename T>
inline bool sample_group(Winner& winner, const T* logits, int64_t count, F32 scale,
                         const Stream& stream, int64_t first) {
  float scaled[kGroup];
  uint32_t hopeful = 0, nan = 0;
  const F32 hope = splat(winner.value - kLargestGumbel);
  for (int64_t i = 0; i < kGroup; i += kLanes) store(scaled + i, splat(-kInfinity), Whole{});
  for_lanes(count, [&](int64_t i, auto part) {
    const F32 x = mul(load(logits + i, part), scale);
    nan |= mask_nan(x);
    store(scaled + i, x, part);
    hopeful |= mask_greater(load(scaled + i, Whole{}), hope);
  });
  if (nan != 0 || hopeful == 0) return nan != 0;
  int32_t words[kGroup];
  random_words(stream, static_cast<uint32_t>(first / kGroup), reinterpret_cast<uint32_t*>(words));
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32 x = load(scaled + i, Whole{});
    const I32 word = load(words + i, Whole{});
    const uint32_t candidates = mask_greater(add(x, gumbel_bound(word)), splat(winner.value));
    if (candidates != 0) challenge(winner, x, word, candidates, first + i);
  }
  return false;
}

template <typename T>
void gumbel_argmax_rows(const GumbelArgMax& args, int64_t begin, int64_t end) {
  const int64_t size = args.logits.size;
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = row_of<T>(args.logits, row);
    const Stream stream = make_stream(args.seed[row], args.row_key[row], args.sample[row],
                                      args.position[row]);
    const F32 scale = splat(args.scale != nullptr ? args.scale[row] : 1.0f);
    Winner winner;
    bool has_nan = false;
    for (int64_t first = 0; first < size && !has_nan; first += kGroup) {
      const int64_t count = size - first < kGroup ? size - first : kGroup;
      has_nan = sample_group(winner, logits + first, count, scale, stream, first);
    }
    args.ids[row] = has_nan ? -1 : winner.id;
  }
}

template <typename T>
void log_sum_exp_rows(const LogSumExp& args, int64_t begin, int64_t end) {
  const int64_t size = args.logits.size;
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = row_of<T>(args.logits, row);
    const Largest largest = find_largest(logits, size);
    args.out[row] = largest.has_nan ? __builtin_nanf("") : largest.value;
    if (largest.has_nan || largest.value == kInfinity || largest.value == -kInfinity) continue;
    float total = 0.0f;
    for (int64_t block = 0; block < size; block += kBlock) {
      const int64_t count = size - block < kBlock ? size - block : kBlock;
      F32 sum = splat(0.0f);
      for_lanes(count, [&](int64_t i, auto part) {
        const F32 x = load_filled(logits + block + i, part, -kInfinity);
        sum = add(sum, exp_of(sub(x, splat(largest.value))));
      });
      total += sum_of(sum);
    }
    args.out[row] = largest.value + __builtin_logf(total);
  }
}

/// Inserts into the descending list of `count` values; the list keeps its k best.
inline int64_t insert(float value, int64_t id, int64_t count, int64_t k, float* values,
                      int64_t* ids) {
  int64_t slot = count < k ? count : k - 1;
  for (; slot > 0 && values[slot - 1] < value; --slot) {
    values[slot] = values[slot - 1];
    ids[slot] = ids[slot - 1];
  }
  values[slot] = value;
  ids[slot] = id;
  return count < k ? count + 1 : k;
}

template <typename T>
void top_k_rows(const TopK& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = row_of<T>(args.logits, row);
    float* values = args.values + row * args.k;
    int64_t* ids = args.ids + row * args.k;
    int64_t count = 0;
    for (int64_t i = 0; i < args.k; ++i) {
      const float x = to_float(logits[i]);
      count = insert(x == x ? x : -kInfinity, i, count, args.k, values, ids);
    }
    const T* rest = logits + args.k;
    for_lanes(args.logits.size - args.k, [&](int64_t i, auto part) {
      float lane[kLanes];
      const F32 x = load_filled(rest + i, part, -kInfinity);
      uint32_t better = mask_greater(x, splat(values[args.k - 1]));
      if (better != 0) store(lane, x, Whole{});
      for (; better != 0; better &= better - 1) {
        const int k = __builtin_ctz(better);
        if (lane[k] > values[args.k - 1])
          insert(lane[k], args.k + i + k, count, args.k, values, ids);
      }
    });
  }
}

}  // namespace
}  // namespace raymoe

#define RAYMOE_FLOAT_KERNELS(kernel) {kernel<float>, kernel<fp16>, kernel<bf16>}
#define RAYMOE_SAMPLING_KERNELS                                                   \
  {RAYMOE_FLOAT_KERNELS(argmax_rows), RAYMOE_FLOAT_KERNELS(gumbel_argmax_rows),   \
   RAYMOE_FLOAT_KERNELS(log_sum_exp_rows), RAYMOE_FLOAT_KERNELS(top_k_rows)}
