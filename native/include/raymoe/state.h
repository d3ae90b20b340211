// Layers whose cache is a state of fixed size for each sequence: short causal convolutions and the
// gated recurrences of linear attention. See raymoe/kernels/state.py.
#pragma once

#include <cstdint>

#include "raymoe/kernels.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// Consecutive tokens of one sequence, for a range of channels. Strides in elements.
struct ConvTile {
  const void* inputs;   // [tokens, C], row stride input_stride
  const float* weight;  // [taps, C]
  const float* bias;    // [C] or null
  const void* past;     // [taps - 1, C], the inputs before the sequence's tokens; null: zeros
  void* out;            // [tokens, C], contiguous
  int64_t input_stride, num_channels, num_tokens, taps;
  int64_t num_before;   // tokens of the sequence that lie before `inputs`
  bool silu;
};

/// The tokens of one sequence in a step, for its heads. Strides in elements, from token to token.
struct ScanSequence {
  const void *query, *key;  // [tokens, groups, K]
  const void* value;        // [tokens, heads, V]
  const float* log_decay;   // [tokens, heads] or, per channel, [tokens, heads, K]
  const float* gain;        // [tokens, heads]
  void* state;              // [heads, K, V], float32 or bfloat16
  void* out;                // [tokens, heads, V], contiguous
  int64_t query_stride, key_stride, value_stride, decay_stride, gain_stride;
  int64_t num_tokens, num_heads, heads_per_group, key_dim, value_dim;
  int64_t first_column, last_column;  // of the values, multiples of kScanColumns or the end
  float scale;
  bool per_channel, delta, normalize, is_fresh;  // fresh: the state before is zero
  float* scratch;  // scan_scratch_floats, 64-byte aligned
};

constexpr int64_t kMaxTaps = 16;
constexpr int64_t kConvChannels = 1024;  // at most, of a tile
constexpr int64_t kMaxKeyDim = 256, kMaxValueDim = 4096;
constexpr int64_t kScanColumns = 64;
constexpr int64_t kScanTokens = 32;  // whose keys, queries and decays are prepared at once

/// Heads of a group whose states stay in the second-level cache while they share keys.
constexpr int64_t scan_heads_together(int64_t key_dim, int64_t value_dim) {
  constexpr int64_t kStateFloats = 32768;
  const int64_t heads = kStateFloats / (key_dim * value_dim);
  return heads < 1 ? 1 : heads > 16 ? 16 : heads;
}

/// Floats of scratch: keys, queries, decayed keys and decays of a block of tokens, and the states.
constexpr int64_t scan_scratch_floats(int64_t key_dim, int64_t value_dim) {
  return (4 * kScanTokens + scan_heads_together(key_dim, value_dim) * (value_dim + 16)) *
             (key_dim + 16) + 8 * (value_dim + 16);
}

struct StateKernels {
  FloatKernels<ConvTile> convolve;  // over channels
  FloatKernels<ScanSequence> scan, scan_bf16_states;  // over heads
};
RAYMOE_DECLARE_KERNELS(StateKernels, state_kernels);

/// Sequences of a step: int32 query_start [S + 1], context_tokens [S] and slots [S] of the states.
struct StateStep {
  const TensorView &query_start, &context_tokens, &slots;
};

/// `states` [N, P, C] are the last P inputs of each sequence, the oldest first; null bias: none.
void causal_conv(const TensorView& inputs, const TensorView& weight, const TensorView* bias,
                 const TensorView& states, const StateStep& step, bool silu,
                 const TensorView& out);

/// `states` [N, H, K, V], float32 or bfloat16, to which a step rounds them at its end.
struct ScanViews {
  const TensorView &query, &key, &value, &log_decay, &gain, &states;
};

struct ScanOptions {
  double scale;
  bool delta, normalize;
};

void scan(const ScanViews& views, const StateStep& step, const ScanOptions& options,
          const TensorView& out);

}  // namespace raymoe
