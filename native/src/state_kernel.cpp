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
//
// States are float32 or bfloat16 in memory (S below) and float32 in registers and strips: one of
// bfloat16 is rounded when the step's last token has been added, and only then.
#include "raymoe/state.h"

#include <cstring>
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

/// x / (1 + exp(-x)) within 3 ulp of the exponential, whose coefficients are those of exp_of.
inline F32 silu(F32 x) {
  const F32 negative = max(min(sub(splat(0.0f), x), splat(88.0f)), splat(-87.0f));
  const F32 n = round_even(mul(negative, splat(1.44269504088896341f)));
  F32 r = multiply_add(n, splat(-0.693359375f), negative);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = multiply_add(p, r, splat(1.3981999507e-3f));
  p = multiply_add(p, r, splat(8.3334519073e-3f));
  p = multiply_add(p, r, splat(4.1665795894e-2f));
  p = multiply_add(p, r, splat(1.6666665459e-1f));
  p = multiply_add(p, r, splat(5.0000001201e-1f));
  p = add(multiply_add(mul(p, r), r, r), splat(1.0f));
  const F32 exponential = from_bits(add(bits_of(p), shift_left<23>(to_int(n))));
  return div(x, add(splat(1.0f), exponential));
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
    if (tile.silu) sum = silu(sum);
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

/// A block of tokens, [kScanTokens][stride] each: what the heads of a group share, and what one has.
struct Block {
  float *key, *query;  // normed and scaled
  float* decayed_key;  // with decays per channel
  float* decay;        // per channel; else the first of each row
  int64_t stride;
};

/// 1 / norm of a vector, as the models with normed keys compute it; 4 partial sums per lane.
template <typename T>
inline float inverse_norm(const T* x, int64_t size) {
  F32 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) {
      const F32 value = load(x + i + k * kLanes, Whole{});
      sum[k] = multiply_add(value, value, sum[k]);
    }
  for_lanes(size - i, [&](int64_t offset, auto part) {
    const F32 value = load(x + i + offset, part);
    sum[0] = multiply_add(value, value, sum[0]);
  });
  const float total = sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  return 1.0f / __builtin_sqrtf(total + 1e-6f);
}

inline float exp_of_one(float x) {
  float lanes_of[kLanes];
  store(lanes_of, exp_of(splat(x)), Whole{});
  return lanes_of[0];
}

/// A row of a token that comes soon: strides of thousands of bytes defeat the hardware.
template <typename T>
inline void prefetch_row(const T* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T)))
    __builtin_prefetch(row + i);
}

constexpr int64_t kTokensAhead = 4;

/// Keys and queries of tokens [first, first + count).
template <typename T>
void prepare_group(const ScanSequence& sequence, int64_t group, int64_t first, int64_t count,
                   const Block& block) {
  const int64_t size = sequence.key_dim;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = first + i, row = i * block.stride;
    const T* key = static_cast<const T*>(sequence.key) + token * sequence.key_stride + group * size;
    const T* query =
        static_cast<const T*>(sequence.query) + token * sequence.query_stride + group * size;
    if (token + kTokensAhead < sequence.num_tokens) {
      prefetch_row(key + kTokensAhead * sequence.key_stride, size);
      prefetch_row(query + kTokensAhead * sequence.query_stride, size);
    }
    float key_factor = 1.0f, query_factor = sequence.scale;
    if (sequence.normalize) {
      key_factor = inverse_norm(key, size);
      query_factor *= inverse_norm(query, size);
    }
    for_lanes(size, [&](int64_t k, auto part) {
      store(block.key + row + k, mul(load(key + k, part), splat(key_factor)), part);
      store(block.query + row + k, mul(load(query + k, part), splat(query_factor)), part);
    });
  }
}

/// Decays of tokens [first, first + count), after the keys of the head's group.
template <bool kChannels>
void prepare_head(const ScanSequence& sequence, int64_t head, int64_t first, int64_t count,
                  const Block& block) {
  const int64_t size = sequence.key_dim;
  for (int64_t i = 0; i < count; ++i) {
    const float* log_decay = sequence.log_decay + (first + i) * sequence.decay_stride;
    const int64_t row = i * block.stride;
    if (!kChannels) {
      block.decay[row] = exp_of_one(log_decay[head]);
      continue;
    }
    if (first + i + kTokensAhead < sequence.num_tokens)
      prefetch_row(log_decay + kTokensAhead * sequence.decay_stride + head * size, size);
    for_lanes(size, [&](int64_t k, auto part) {
      const F32 decay = exp_of(load(log_decay + head * size + k, part));
      store(block.decay + row + k, decay, part);
      store(block.decayed_key + row + k, mul(load(block.key + row + k, part), decay), part);
    });
  }
}

/// sums = S^T key, over the columns of a strip.
template <int kCols>
inline void multiply_key(const float* state, const float* key, int64_t rows, float* sums) {
  F32 sum[kCols];
  for (int j = 0; j < kCols; ++j) sum[j] = splat(0.0f);
  for (int64_t row = 0; row < rows; ++row, state += kCols * kLanes) {
    const F32 factor = splat(key[row]);
    for (int j = 0; j < kCols; ++j)
      sum[j] = multiply_add(factor, load(state + j * kLanes, Whole{}), sum[j]);
  }
  for (int j = 0; j < kCols; ++j) store(sums + j * kLanes, sum[j], Whole{});
}

/// Rows of a token, and vectors of the columns of a strip.
struct Token {
  const float *decay, *key, *query, *next_key;
  const float* change;  // u
  float *out, *next;    // S^T query, S^T next_key
};

/// The state of one token and its products. Not inlined: it has the registers for itself.
template <int kCols, bool kChannels, bool kNext>
__attribute__((noinline)) void update(const Token& token, int64_t rows, float* state) {
  const float *decays = token.decay, *keys = token.key, *queries = token.query;
  const float *next_keys = token.next_key, *change = token.change;
  F32 out[kCols], next[kCols];
  for (int j = 0; j < kCols; ++j) out[j] = next[j] = splat(0.0f);
  F32 decay = splat(decays[0]);
  for (int64_t row = 0; row < rows; ++row, state += kCols * kLanes) {
    if (kChannels) decay = splat(decays[row]);
    const F32 key = splat(keys[row]), query = splat(queries[row]);
    const F32 next_key = splat(kNext ? next_keys[row] : 0.0f);
    for (int j = 0; j < kCols; ++j) {
      float* p = state + j * kLanes;
      const F32 x =
          multiply_add(key, load(change + j * kLanes, Whole{}), mul(decay, load(p, Whole{})));
      store(p, x, Whole{});
      out[j] = multiply_add(query, x, out[j]);
      if (kNext) next[j] = multiply_add(next_key, x, next[j]);
    }
  }
  for (int j = 0; j < kCols; ++j) {
    store(token.out + j * kLanes, out[j], Whole{});
    if (kNext) store(token.next + j * kLanes, next[j], Whole{});
  }
}

/// The tokens of a block for one strip of columns.
template <typename T, int kCols, bool kChannels, typename Lanes>
void scan_strip(const ScanSequence& sequence, int64_t head, int64_t first, int64_t count,
                const Block& block, int64_t column, float* state, Lanes part) {
  const int64_t rows = sequence.key_dim, offset = head * sequence.value_dim + column;
  const T* value =
      static_cast<const T*>(sequence.value) + first * sequence.value_stride + offset;
  const float* gain = sequence.gain + first * sequence.gain_stride + head;
  const float* keys = kChannels ? block.decayed_key : block.key;
  const int64_t out_stride = sequence.num_heads * sequence.value_dim;
  T* out = static_cast<T*>(sequence.out) + first * out_stride + offset;
  alignas(64) float seen[kCols * kLanes] = {}, change[kCols * kLanes], sums[kCols * kLanes];
  if (sequence.delta) multiply_key<kCols>(state, keys, rows, seen);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = i * block.stride;
    const F32 factor = splat(gain[i * sequence.gain_stride]);
    const F32 decay = splat(kChannels ? 1.0f : block.decay[at]);
    for (int64_t j = 0; j < kCols * kLanes; j += kLanes) {
      const F32 x = load(value + i * sequence.value_stride + j, part);
      const F32 kept = kChannels ? load(seen + j, Whole{}) : mul(decay, load(seen + j, Whole{}));
      store(change + j, mul(factor, sub(x, kept)), Whole{});
    }
    const Token token{block.decay + at, block.key + at, block.query + at, keys + at + block.stride,
                      change, sums, seen};
    if (sequence.delta && i + 1 < count)
      update<kCols, kChannels, true>(token, rows, state);
    else
      update<kCols, kChannels, false>(token, rows, state);
    for (int64_t j = 0; j < kCols * kLanes; j += kLanes)
      store(out + i * out_stride + j, load(sums + j, Whole{}), part);
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
template <bool kToStrips, typename S>
void copy_state(S* state, int64_t stride, float* strips, int64_t rows, int64_t columns) {
  for_strips(columns, rows, [&](int64_t column, auto cols, auto part) {
    for (int64_t row = 0; row < rows; ++row)
      for (int j = 0; j < cols; ++j) {
        float* strip = strips + column * rows + (row * cols + j) * kLanes;
        S* at = state + row * stride + column + j * kLanes;
        if (kToStrips)
          store(strip, load(at, part), Whole{});
        else
          store(at, load(strip, part), part);
      }
  });
}

/// The state of a head, from its first column.
template <typename S>
S* state_of(const ScanSequence& sequence, int64_t head) {
  return static_cast<S*>(sequence.state) + head * sequence.key_dim * sequence.value_dim +
         sequence.first_column;
}

template <typename S>
void clear_state(const ScanSequence& sequence, int64_t head) {
  S* state = state_of<S>(sequence, head);
  for (int64_t row = 0; row < sequence.key_dim; ++row)
    for_lanes(sequence.last_column - sequence.first_column, [&](int64_t i, auto part) {
      store(state + row * sequence.value_dim + i, splat(0.0f), part);
    });
}

/// One token of a head: its state, factors of the rows, and sums over the columns.
template <typename S>
struct Step {
  S* state;
  const float *decay, *key, *query, *seen_key;
  float *seen, *change, *out;
};

/// Asks for the memory of a row that is read soon: states come in the order of their memory.
template <typename S>
inline void prefetch_state(const S* row, int64_t column) {
  constexpr int64_t kBytesAhead = 1024, kLine = 64 / sizeof(S);
  if (column % kLine == 0) __builtin_prefetch(row + column + kBytesAhead / sizeof(S));
}

/// The state of `now` and its out = S^T query (if kUpdate), while the sums seen = S^T seen_key of
/// `next` (if kMultiply) keep the memory busy.
template <bool kChannels, bool kUpdate, bool kMultiply, typename S>
void step_rows(const Step<S>& now, const Step<S>& next, int64_t rows, int64_t columns, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const F32 decay = splat(now.decay[kChannels ? row : 0]), key = splat(now.key[row]);
    const F32 query = splat(now.query[row]), seen_key = splat(next.seen_key[row]);
    S* state = now.state + row * stride;
    const S* next_state = next.state + row * stride;
    for_lanes(columns, [&](int64_t column, auto part) {
      prefetch_state(kMultiply ? next_state : state, column);
      if (kMultiply) {
        const F32 x = load(next_state + column, part);
        const F32 sum = load(next.seen + column, Whole{});
        store(next.seen + column, multiply_add(seen_key, x, sum), Whole{});
      }
      if (!kUpdate) return;
      const F32 change = load(now.change + column, Whole{});
      const F32 x = multiply_add(key, change, mul(decay, load(state + column, part)));
      store(state + column, x, part);
      const F32 sum = load(now.out + column, Whole{});
      store(now.out + column, multiply_add(query, x, sum), Whole{});
    });
  }
}

/// The factors and zeros as sums of one token of a head, in `memory`.
template <typename T, typename S, bool kChannels>
Step<S> prepare_step(const ScanSequence& sequence, int64_t head, int64_t columns, float* memory) {
  const int64_t stride = (sequence.key_dim + 15) / 16 * 16;
  const Block block{memory, memory + stride, memory + 2 * stride, memory + 3 * stride, stride};
  prepare_group<T>(sequence, head / sequence.heads_per_group, 0, 1, block);
  prepare_head<kChannels>(sequence, head, 0, 1, block);
  if (sequence.is_fresh) clear_state<S>(sequence, head);
  float* sums = memory + 4 * stride;
  std::memset(sums, 0, static_cast<size_t>(3 * columns) * sizeof(float));
  return {state_of<S>(sequence, head), block.decay, block.key, block.query,
          kChannels ? block.decayed_key : block.key, sums, sums + columns, sums + 2 * columns};
}

/// One token of heads [begin, end), each of whose states is read and written once.
template <typename T, typename S, bool kChannels>
void step_heads(const ScanSequence& sequence, int64_t begin, int64_t end) {
  const int64_t rows = sequence.key_dim, width = sequence.value_dim;
  const int64_t columns = sequence.last_column - sequence.first_column;
  const int64_t padded = (columns + 15) / 16 * 16;
  float* memory[2] = {sequence.scratch, sequence.scratch + 4 * (rows + 16) + 3 * padded};
  Step<S> next = prepare_step<T, S, kChannels>(sequence, begin, padded, memory[0]);
  if (sequence.delta) step_rows<kChannels, false, true>(next, next, rows, columns, width);
  for (int64_t head = begin; head < end; ++head) {
    const Step<S> now = next;
    const int64_t offset = head * width + sequence.first_column;
    const T* value = static_cast<const T*>(sequence.value) + offset;
    const F32 gain = splat(sequence.gain[head]), decay = splat(kChannels ? 1.0f : now.decay[0]);
    for_lanes(columns, [&](int64_t i, auto part) {
      const F32 seen = load(now.seen + i, Whole{}), kept = kChannels ? seen : mul(decay, seen);
      store(now.change + i, mul(gain, sub(load(value + i, part), kept)), Whole{});
    });
    if (head + 1 < end)
      next = prepare_step<T, S, kChannels>(sequence, head + 1, padded,
                                           memory[(head + 1 - begin) % 2]);
    if (sequence.delta && head + 1 < end)
      step_rows<kChannels, true, true>(now, next, rows, columns, width);
    else
      step_rows<kChannels, true, false>(now, now, rows, columns, width);
    T* out = static_cast<T*>(sequence.out) + offset;
    for_lanes(columns,
              [&](int64_t i, auto part) { store(out + i, load(now.out + i, Whole{}), part); });
  }
}

/// Several tokens of heads [begin, end) of one group. Their states are copied to strips: rows a
/// power of two apart would share few sets of the first-level cache.
template <typename T, typename S, bool kChannels>
void scan_group(const ScanSequence& sequence, int64_t begin, int64_t end) {
  const int64_t rows = sequence.key_dim, width = sequence.value_dim;
  const int64_t columns = sequence.last_column - sequence.first_column;
  Block block;
  block.stride = (rows + 15) / 16 * 16;
  block.key = sequence.scratch;
  block.query = block.key + kScanTokens * block.stride;
  block.decayed_key = block.query + kScanTokens * block.stride;
  block.decay = block.decayed_key + kScanTokens * block.stride;
  float* strips = block.decay + kScanTokens * block.stride;
  const int64_t strip_floats = (columns + 15) / 16 * 16 * rows;
  for (int64_t head = begin; head < end; ++head) {
    if (sequence.is_fresh) clear_state<S>(sequence, head);
    copy_state<true>(state_of<S>(sequence, head), width, strips + (head - begin) * strip_floats,
                     rows, columns);
  }
  for (int64_t first = 0; first < sequence.num_tokens; first += kScanTokens) {
    const int64_t left = sequence.num_tokens - first;
    const int64_t count = left < kScanTokens ? left : kScanTokens;
    prepare_group<T>(sequence, begin / sequence.heads_per_group, first, count, block);
    for (int64_t head = begin; head < end; ++head) {
      prepare_head<kChannels>(sequence, head, first, count, block);
      float* strips_of = strips + (head - begin) * strip_floats;
      for_strips(columns, rows, [&](int64_t column, auto cols, auto part) {
        constexpr int kCols = decltype(cols)::value;
        scan_strip<T, kCols, kChannels>(sequence, head, first, count, block,
                                        sequence.first_column + column, strips_of + column * rows,
                                        part);
      });
    }
  }
  for (int64_t head = begin; head < end; ++head)
    copy_state<false>(state_of<S>(sequence, head), width, strips + (head - begin) * strip_floats,
                      rows, columns);
}

template <typename T, typename S>
void scan_states(const ScanSequence& sequence, int64_t begin, int64_t end) {
  if (sequence.num_tokens == 1) {
    if (sequence.per_channel)
      step_heads<T, S, true>(sequence, begin, end);
    else
      step_heads<T, S, false>(sequence, begin, end);
    return;
  }
  const int64_t together = scan_heads_together(sequence.key_dim, sequence.value_dim);
  for (int64_t head = begin; head < end;) {
    const int64_t group_end = (head / sequence.heads_per_group + 1) * sequence.heads_per_group;
    int64_t last = head + together;
    if (last > group_end) last = group_end;
    if (last > end) last = end;
    if (sequence.per_channel)
      scan_group<T, S, true>(sequence, head, last);
    else
      scan_group<T, S, false>(sequence, head, last);
    head = last;
  }
}

template <typename T>
void scan_heads(const ScanSequence& sequence, int64_t begin, int64_t end) {
  scan_states<T, float>(sequence, begin, end);
}

template <typename T>
void scan_heads_bf16(const ScanSequence& sequence, int64_t begin, int64_t end) {
  scan_states<T, bf16>(sequence, begin, end);
}

}  // namespace

RAYMOE_DEFINE_KERNELS(StateKernels, state_kernels) = {RAYMOE_FLOAT_KERNELS(convolve_channels),
                                                      RAYMOE_FLOAT_KERNELS(scan_heads),
                                                      RAYMOE_FLOAT_KERNELS(scan_heads_bf16)};

}  // namespace raymoe
