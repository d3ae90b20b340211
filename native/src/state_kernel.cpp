// Causal convolution and gated recurrences, written once on vec_f32.h.
//
// A column of a state needs no other column, so a strip of a few vectors of columns stays near the
// core for a block of tokens. One pass over a strip makes the state of a token and, from the same
// registers, the products with its query and with the next key:
//
//   S = decay * S + key u^T,  out = S^T query,  p' = S^T (decay' * key'),  u' = gain' * (v' - p')
//
// Every sum runs over the rows in ascending order with one accumulator for each column: a token's
// bits depend neither on the width of the strip nor on where a block, a step or a chunk begins.
#include "raymoe/state.h"

#include <type_traits>

#include "vec_f32.h"

namespace raymoe {
namespace {

/// a * b + c, fused where the instruction set can.
inline F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

alignas(64) const float kZeros[kConvChannels] = {};

/// One token; `rows` are its inputs, the oldest first, at the first of the channels.
template <typename T, int kTaps>
inline void convolve_token(const ConvTile& tile, const T* const* rows, int64_t begin, int64_t end,
                           T* out) {
  const int64_t taps = kTaps == 0 ? tile.taps : kTaps;
  for_lanes(end - begin, [&](int64_t i, auto part) {
    const float* weight = tile.weight + begin + i;
    F32 sum = tile.bias == nullptr ? splat(0.0f) : load(tile.bias + begin + i, part);
    for (int64_t tap = 0; tap < taps; ++tap)
      sum = multiply_add(load(weight + tap * tile.num_channels, part), load(rows[tap] + i, part),
                         sum);
    if (tile.silu) sum = div(sum, add(splat(1.0f), exp_of(sub(splat(0.0f), sum))));
    store(out + i, sum, part);
  });
}

template <typename T, int kTaps>
void convolve_tokens(const ConvTile& tile, int64_t begin, int64_t end) {
  const T* inputs = static_cast<const T*>(tile.inputs) + begin;
  const T* past = static_cast<const T*>(tile.past);
  const T* rows[kMaxTaps];
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    for (int64_t tap = 0; tap < tile.taps; ++tap) {
      const int64_t row = token - (tile.taps - 1) + tap;
      if (row >= -tile.num_before)
        rows[tap] = inputs + row * tile.input_stride;
      else if (past == nullptr)
        rows[tap] = reinterpret_cast<const T*>(kZeros);
      else
        rows[tap] = past + (tile.taps - 1 + row + tile.num_before) * tile.num_channels + begin;
    }
    T* out = static_cast<T*>(tile.out) + token * tile.num_channels + begin;
    convolve_token<T, kTaps>(tile, rows, begin, end, out);
  }
}

template <typename T>
void convolve_channels(const ConvTile& tile, int64_t begin, int64_t end) {
  if (tile.taps == 4) return convolve_tokens<T, 4>(tile, begin, end);
  if (tile.taps == 3) return convolve_tokens<T, 3>(tile, begin, end);
  convolve_tokens<T, 0>(tile, begin, end);
}

/// A block of tokens of one head, [kScanTokens][stride] each.
struct Block {
  float *key, *query;  // normed and scaled
  float* decayed_key;
  float* decay;        // per channel; else the first of each row
  int64_t stride;
};

/// 1 / norm of a vector, as the models with normed keys compute it.
template <typename T>
inline float inverse_norm(const T* x, int64_t size) {
  F32 sum = splat(0.0f);
  for_lanes(size, [&](int64_t i, auto part) {
    const F32 value = load(x + i, part);
    sum = multiply_add(value, value, sum);
  });
  return 1.0f / __builtin_sqrtf(sum_of(sum) + 1e-6f);
}

inline float exp_of_one(float x) {
  float lanes_of[kLanes];
  store(lanes_of, exp_of(splat(x)), Whole{});
  return lanes_of[0];
}

/// Keys, queries and decays of tokens [first, first + count).
template <typename T>
void prepare(const ScanSequence& sequence, int64_t head, int64_t first, int64_t count,
             const Block& block) {
  const int64_t group = head / sequence.heads_per_group, size = sequence.key_dim;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = first + i, row = i * block.stride;
    const T* key = static_cast<const T*>(sequence.key) + token * sequence.key_stride + group * size;
    const T* query =
        static_cast<const T*>(sequence.query) + token * sequence.query_stride + group * size;
    const float* decay = sequence.log_decay + token * sequence.decay_stride;
    const F32 key_factor = splat(sequence.normalize ? inverse_norm(key, size) : 1.0f);
    const F32 query_factor =
        splat(sequence.normalize ? inverse_norm(query, size) * sequence.scale : sequence.scale);
    const float whole = sequence.per_channel ? 0.0f : exp_of_one(decay[head]);
    block.decay[row] = whole;
    for_lanes(size, [&](int64_t channel, auto part) {
      const F32 scaled = mul(load(key + channel, part), key_factor);
      store(block.key + row + channel, scaled, part);
      store(block.query + row + channel, mul(load(query + channel, part), query_factor), part);
      F32 factor = splat(whole);
      if (sequence.per_channel) {
        factor = exp_of(load(decay + head * size + channel, part));
        store(block.decay + row + channel, factor, part);
      }
      if (sequence.delta) store(block.decayed_key + row + channel, mul(scaled, factor), part);
    });
  }
}

/// sums[j] = S^T key, over the columns of a strip.
template <int kCols, typename Lanes>
inline void multiply_key(const float* state, int64_t stride, const float* key, int64_t rows,
                         Lanes part, F32* sums) {
  F32 sum[kCols];
  for (int j = 0; j < kCols; ++j) sum[j] = splat(0.0f);
  for (int64_t row = 0; row < rows; ++row, state += stride) {
    const F32 factor = splat(key[row]);
    for (int j = 0; j < kCols; ++j)
      sum[j] = multiply_add(factor, load(state + j * kLanes, part), sum[j]);
  }
  for (int j = 0; j < kCols; ++j) sums[j] = sum[j];
}

struct Step {
  const float *decay, *key, *query, *next_key;
  int64_t rows;
};

/// One token: the state, out = S^T query and, if kNext, next = S^T next_key.
template <int kCols, bool kChannels, bool kNext, typename Lanes>
__attribute__((noinline)) void update(const Step& step, float* state, int64_t stride,
                                      const F32* update_of, Lanes part, F32* outs, F32* nexts) {
  F32 out[kCols], next[kCols];
  for (int j = 0; j < kCols; ++j) out[j] = next[j] = splat(0.0f);
  F32 decay = splat(step.decay[0]);
  for (int64_t row = 0; row < step.rows; ++row, state += stride) {
    if (kChannels) decay = splat(step.decay[row]);
    const F32 key = splat(step.key[row]), query = splat(step.query[row]);
    const F32 next_key = splat(kNext ? step.next_key[row] : 0.0f);
    for (int j = 0; j < kCols; ++j) {
      float* p = state + j * kLanes;
      const F32 x = multiply_add(key, update_of[j], mul(decay, load(p, part)));
      store(p, x, part);
      out[j] = multiply_add(query, x, out[j]);
      if (kNext) next[j] = multiply_add(next_key, x, next[j]);
    }
  }
  for (int j = 0; j < kCols; ++j) {
    outs[j] = out[j];
    if (kNext) nexts[j] = next[j];
  }
}

/// The tokens of a block for one strip of columns. Value and out are those of its first token.
template <typename T, int kCols, bool kChannels, typename Lanes>
void scan_strip(const ScanSequence& sequence, int64_t head, int64_t first, int64_t count,
                const Block& block, int64_t column, float* state, int64_t stride, Lanes part) {
  const int64_t rows = sequence.key_dim, offset = head * sequence.value_dim + column;
  const T* value =
      static_cast<const T*>(sequence.value) + first * sequence.value_stride + offset;
  const float* gain = sequence.gain + first * sequence.gain_stride + head;
  T* out = static_cast<T*>(sequence.out) +
           first * sequence.num_heads * sequence.value_dim + offset;
  F32 seen[kCols], change[kCols], outs[kCols];
  for (int j = 0; j < kCols; ++j) seen[j] = splat(0.0f);
  if (sequence.delta) multiply_key<kCols>(state, stride, block.decayed_key, rows, part, seen);
  for (int64_t i = 0; i < count; ++i) {
    const F32 factor = splat(gain[i * sequence.gain_stride]);
    for (int j = 0; j < kCols; ++j) {
      const F32 x = load(value + i * sequence.value_stride + j * kLanes, part);
      change[j] = mul(factor, sub(x, seen[j]));
    }
    const int64_t at = i * block.stride;
    const Step step{block.decay + at, block.key + at, block.query + at,
                    block.decayed_key + at + block.stride, rows};
    if (sequence.delta && i + 1 < count)
      update<kCols, kChannels, true>(step, state, stride, change, part, outs, seen);
    else
      update<kCols, kChannels, false>(step, state, stride, change, part, outs, seen);
    T* to = out + i * sequence.num_heads * sequence.value_dim;
    for (int j = 0; j < kCols; ++j) store(to + j * kLanes, outs[j], part);
  }
}

/// Calls body(columns so far, a constant number of vectors, Whole or Part) for all columns.
template <typename Body>
inline void for_strips(int64_t columns, int64_t rows, const Body& body) {
  constexpr int64_t kStripFloats = 4608;  // of a strip: it shares the first-level cache
  const bool is_wide = 4 * kLanes * rows <= kStripFloats;
  int64_t column = 0;
  if (is_wide)
    for (; column + 4 * kLanes <= columns; column += 4 * kLanes)
      body(column, std::integral_constant<int, 4>{}, Whole{});
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
    body(column, std::integral_constant<int, 2>{}, Whole{});
  for (; column + kLanes <= columns; column += kLanes)
    body(column, std::integral_constant<int, 1>{}, Whole{});
  if (column < columns) body(column, std::integral_constant<int, 1>{}, Part{columns - column});
}

/// Copies between a state [rows][stride] and strips, each [rows][vectors of the strip].
template <bool kToStrips>
void copy_state(float* state, int64_t stride, float* strips, int64_t rows, int64_t columns) {
  for_strips(columns, rows, [&](int64_t column, auto cols, auto part) {
    for (int64_t row = 0; row < rows; ++row)
      for (int j = 0; j < cols; ++j) {
        float* strip = strips + column * rows + (row * cols + j) * kLanes;
        float* at = state + row * stride + column + j * kLanes;
        if (kToStrips)
          store(strip, load(at, part), Whole{});
        else
          store(at, load(strip, part), part);
      }
  });
}

template <typename T, bool kChannels>
void scan_head(const ScanSequence& sequence, int64_t head) {
  const int64_t rows = sequence.key_dim, width = sequence.value_dim;
  const int64_t columns = sequence.last_column - sequence.first_column;
  Block block;
  block.stride = (rows + 15) / 16 * 16;
  block.key = sequence.scratch;
  block.query = block.key + kScanTokens * block.stride;
  block.decayed_key = block.query + kScanTokens * block.stride;
  block.decay = block.decayed_key + kScanTokens * block.stride;
  float* strips = block.decay + kScanTokens * block.stride;
  float* state = sequence.state + head * rows * width + sequence.first_column;
  if (sequence.is_fresh)
    for (int64_t row = 0; row < rows; ++row)
      for_lanes(columns, [&](int64_t i, auto part) {
        store(state + row * width + i, splat(0.0f), part);
      });
  // Rows a power of two apart share few sets of the first-level cache.
  const bool copies = sequence.num_tokens > 2;
  if (copies) copy_state<true>(state, width, strips, rows, columns);
  for (int64_t first = 0; first < sequence.num_tokens; first += kScanTokens) {
    const int64_t left = sequence.num_tokens - first;
    const int64_t count = left < kScanTokens ? left : kScanTokens;
    prepare<T>(sequence, head, first, count, block);
    for_strips(columns, rows, [&](int64_t column, auto cols, auto part) {
      constexpr int kCols = decltype(cols)::value;
      const int64_t at = sequence.first_column + column;
      if (copies)
        scan_strip<T, kCols, kChannels>(sequence, head, first, count, block, at,
                                        strips + column * rows, kCols * kLanes, part);
      else
        scan_strip<T, kCols, kChannels>(sequence, head, first, count, block, at, state + column,
                                        width, part);
    });
  }
  if (copies) copy_state<false>(state, width, strips, rows, columns);
}

template <typename T>
void scan_heads(const ScanSequence& sequence, int64_t begin, int64_t end) {
  for (int64_t head = begin; head < end; ++head) {
    if (sequence.per_channel)
      scan_head<T, true>(sequence, head);
    else
      scan_head<T, false>(sequence, head);
  }
}

}  // namespace

RAYMOE_DEFINE_KERNELS(StateKernels, state_kernels) = {RAYMOE_FLOAT_KERNELS(convolve_channels),
                                                      RAYMOE_FLOAT_KERNELS(scan_heads)};

}  // namespace raymoe
