// Choosing tokens, written once on vec_f32.h. Gumbel noise comes from counters: Philox over 16 of
// them at once, logarithms without fused steps.
#include "philox.h"
#include "raymoe/sampling.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

constexpr int64_t kGroup = 64;  // tokens that 16 counters serve
constexpr int64_t kCounters = 16;

/// What is fixed within a row: three counter words and the key.
struct Stream {
  uint32_t position, sample, extra;
  uint32_t key0, key1;
};

inline Stream make_stream(int64_t seed, int64_t row_key, int32_t sample, int32_t position) {
  const auto low = [](int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x)); };
  const auto high = [](int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); };
  const Words mixed = philox(Words{{low(seed), high(seed), low(row_key), high(row_key)}}, 0, 0);
  return Stream{static_cast<uint32_t>(position), static_cast<uint32_t>(sample), mixed.word[2],
                mixed.word[0], mixed.word[1]};
}

#if defined(__AVX2__)

// Counters sit in the low halves of 64-bit lanes, where one multiply gives both halves of the
// product; the high halves hold garbage that the multiply ignores.
#if defined(__AVX512F__)
using U64 = __m512i;
constexpr int64_t kWideLanes = 8;
inline U64 wide(uint32_t x) { return _mm512_set1_epi64(x); }
inline U64 multiply(U64 a, U64 b) { return _mm512_mul_epu32(a, b); }
inline U64 high_half(U64 a) { return _mm512_srli_epi64(a, 32); }
inline U64 xor3(U64 a, U64 b, U64 c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
inline U64 plus(U64 a, U64 b) { return _mm512_add_epi64(a, b); }
inline U64 even_counters() { return _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14); }
inline void store_merged(uint32_t* p, U64 even, U64 odd) {
  _mm512_storeu_si512(p, _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
}
#else
using U64 = __m256i;
constexpr int64_t kWideLanes = 4;
inline U64 wide(uint32_t x) { return _mm256_set1_epi64x(x); }
inline U64 multiply(U64 a, U64 b) { return _mm256_mul_epu32(a, b); }
inline U64 high_half(U64 a) { return _mm256_srli_epi64(a, 32); }
inline U64 xor3(U64 a, U64 b, U64 c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline U64 plus(U64 a, U64 b) { return _mm256_add_epi64(a, b); }
inline U64 even_counters() { return _mm256_setr_epi64x(0, 2, 4, 6); }
inline void store_merged(uint32_t* p, U64 even, U64 odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
}
#endif

struct WideWords {
  U64 word[4];
};

inline void philox_round(WideWords& c, U64 key0, U64 key1) {
  const U64 product0 = multiply(wide(kPhiloxM0), c.word[0]);
  const U64 product1 = multiply(wide(kPhiloxM1), c.word[2]);
  c = WideWords{{xor3(high_half(product1), c.word[1], key0), product1,
                 xor3(high_half(product0), c.word[3], key1), product0}};
}

/// Words of the 64 tokens of group `group`.
inline void random_words(const Stream& stream, uint32_t group, uint32_t words[kGroup]) {
  for (int64_t first = 0; first < kCounters; first += 2 * kWideLanes) {
    const uint32_t base = group * static_cast<uint32_t>(kCounters) + static_cast<uint32_t>(first);
    WideWords even{{plus(wide(base), even_counters()), wide(stream.position), wide(stream.sample),
                    wide(stream.extra)}};
    WideWords odd = even;
    odd.word[0] = plus(odd.word[0], wide(1));
    uint32_t key0 = stream.key0, key1 = stream.key1;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      philox_round(even, wide(key0), wide(key1));
      philox_round(odd, wide(key0), wide(key1));
      key0 += kPhiloxW0;
      key1 += kPhiloxW1;
    }
    for (int64_t w = 0; w < 4; ++w)
      store_merged(words + w * kCounters + first, even.word[w], odd.word[w]);
  }
}

#else

inline void random_words(const Stream& stream, uint32_t group, uint32_t words[kGroup]) {
  for (int64_t i = 0; i < kCounters; ++i) {
    const uint32_t counter = group * static_cast<uint32_t>(kCounters) + static_cast<uint32_t>(i);
    const Words out = philox(Words{{counter, stream.position, stream.sample, stream.extra}},
                             stream.key0, stream.key1);
    for (int64_t w = 0; w < 4; ++w) words[w * kCounters + i] = out.word[w];
  }
}

#endif

/// Exponent e and f with x = 2^e (1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1); x positive, normal.
struct Reduced {
  I32 exponent;
  F32 fraction;
};

inline Reduced reduce_log(F32 x) {
  const I32 bits = bits_of(x);
  const I32 exponent = shift_right_signed<23>(sub(bits, splat(0x3f3504f3)));  // sqrt(1/2)
  const F32 mantissa = from_bits(sub(bits, shift_left<23>(exponent)));
  return Reduced{exponent, sub(mantissa, splat(1.0f))};
}

/// log(2^e (1 + f)), relative error about 1e-7; the polynomial of Cephes' logf.
inline F32 log_of(Reduced x) {
  const F32 f = x.fraction, e = to_f32(x.exponent), square = mul(f, f);
  F32 p = splat(7.0376836292e-2f);
  p = add(mul(p, f), splat(-1.1514610310e-1f));
  p = add(mul(p, f), splat(1.1676998740e-1f));
  p = add(mul(p, f), splat(-1.2420140846e-1f));
  p = add(mul(p, f), splat(1.4249322787e-1f));
  p = add(mul(p, f), splat(-1.6668057665e-1f));
  p = add(mul(p, f), splat(2.0000714765e-1f));
  p = add(mul(p, f), splat(-2.4999993993e-1f));
  p = add(mul(p, f), splat(3.3333331174e-1f));
  p = mul(mul(p, f), square);
  p = add(p, mul(e, splat(-2.12194440e-4f)));
  p = sub(p, mul(square, splat(0.5f)));
  return add(add(f, p), mul(e, splat(0.693359375f)));
}

/// -log(-log1p(-v)), v = (word + 1/2) / 2^32. Where v > 1/2, log1p(-v) is log of 1 - v, which is
/// taken from the complement of the word: both ends keep their relative precision.
inline F32 gumbel_of(I32 word) {
  const I32 sign = shift_right_signed<31>(word);
  const F32 tail = mul(add(to_f32(bit_xor(word, sign)), splat(0.5f)), splat(0x1p-32f));
  Reduced x = reduce_log(where_negative(word, tail, sub(splat(1.0f), tail)));
  const F32 minus_tail = sub(splat(0.0f), tail);
  const F32 near_one = where_negative(x.exponent, x.fraction, minus_tail);
  x.fraction = where_negative(word, x.fraction, near_one);
  const F32 exponential = sub(splat(0.0f), log_of(x));
  return sub(splat(0.0f), log_of(reduce_log(exponential)));
}

/// At least gumbel_of(word), at a fraction of its cost: -log1p(-v) >= v, and the bits of a float
/// read as an integer are a lower bound of its logarithm, at most 0.09 below its base-2 one.
inline F32 gumbel_bound(I32 word) {
  const F32 scaled = add(to_f32(shift_right<8>(word)), splat(0x1p-9f));  // <= v * 2^24
  const F32 log2_scaled = mul(to_f32(bits_of(scaled)), splat(0x1p-23f));
  return mul(sub(splat(127.0f + 24.0f + 0.002f), log2_scaled), splat(0.69314718f));
}

constexpr float kLargestGumbel = 23.0f;  // -log(2^-33) is 22.87

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

RAYMOE_DEFINE_KERNELS(SamplingKernels, sampling_kernels) = {
    RAYMOE_FLOAT_KERNELS(argmax_rows), RAYMOE_FLOAT_KERNELS(gumbel_argmax_rows),
    RAYMOE_FLOAT_KERNELS(log_sum_exp_rows), RAYMOE_FLOAT_KERNELS(top_k_rows)};

}  // namespace raymoe
