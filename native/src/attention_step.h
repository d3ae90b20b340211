// A step of attention: which tokens belong to which sequence, and their blocks; how its work is cut
// into items; how the workers go through the items. Attention and latent attention share it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel.h"
#include "raymoe/attention.h"
#include "raymoe/tensor_view.h"
#include "raymoe/worker_pool.h"
#include "shared_prefixes.h"

namespace raymoe {

/// Ragged shape of a step; the arrays of AttentionBatch.
struct AttentionStep {
  const int32_t* query_start = nullptr;
  const int32_t* context_tokens = nullptr;
  const int32_t* block_table = nullptr;
  int64_t table_stride = 0;
  int64_t num_sequences = 0;
  int64_t num_kv_heads = 0;
  int64_t group = 0;
  int64_t window = 0;

  int64_t num_tokens(int64_t sequence) const {
    return query_start[sequence + 1] - query_start[sequence];
  }
  /// Position of the first token of the step in its sequence.
  int64_t first_position(int64_t sequence) const {
    return context_tokens[sequence] - num_tokens(sequence);
  }
  /// First position that a token sees.
  int64_t first_visible(int64_t position) const {
    return position < window ? 0 : position - window + 1;
  }
};

/// The step of these arrays, whose types and sizes are checked; heads and window are the caller's.
AttentionStep make_step(const TensorView& query_start, const TensorView& context_tokens,
                        const TensorView& block_table);

/// Throws unless the sequences cover `num_tokens` tokens.
void check_sequences(const AttentionStep& step, int64_t num_tokens);

/// Throws unless, besides, their blocks are in the cache.
void check_step(const AttentionStep& step, int64_t num_tokens, int64_t table_width,
                int64_t num_blocks);

/// Throws std::invalid_argument with the name of the operation before the message.
[[noreturn]] void refuse_attention(const std::string& message);

/// The positive finite factor of the scores, for softmax in powers of two.
float checked_scale_log2e(double scale);

/// One item of work: a tile, over all its splits or over one of them.
struct AttentionItem {
  int32_t sequence;
  int32_t kv_head;
  int64_t first_token;  // of the sequence's tokens in the step
  int64_t num_tokens;
  int64_t first_split;
  int64_t last_split;     // included
  int64_t shared = -1;    // index among the tiles whose splits are items of their own
  int64_t part = -1;      // index of this item's partial sums
  int64_t num_parts = 0;  // of the tile
};

/// Keys and values of a sequence with several tokens, for one KV head.
struct AppendItem {
  int32_t sequence;
  int32_t kv_head;
  int64_t first_token;
  int64_t num_tokens;
};

/// Reused from call to call, so that planning allocates nothing in the steady state.
class AttentionPlan {
 public:
  /// Sequences share what their contexts have in common.
  void build(const AttentionStep& step, int num_threads);

  /// To be done before the items: sequences with one token append within their item.
  const std::vector<AppendItem>& appends() const { return appends_; }
  /// The few expensive ones first, in falling order of cost, so that no thread ends late.
  const std::vector<AttentionItem>& items() const { return items_; }
  /// To be attended to before the items.
  SharedPrefixes& prefixes() { return prefixes_; }
  int64_t num_shared() const { return num_shared_; }
  int64_t num_parts() const { return num_parts_; }
  int64_t max_rows() const { return max_rows_; }

 private:
  struct Expensive {
    int64_t cost;
    AttentionItem item;
  };

  void add_sequence(const AttentionStep& step, int64_t sequence);
  void add_appends(const AttentionStep& step, const AttentionItem& tile);
  /// Returns whether the tile stays whole.
  bool add_tile(const AttentionStep& step, AttentionItem tile, int64_t cost);
  void add_item(const AttentionItem& item, int64_t cost);

  SharedPrefixes prefixes_;
  std::vector<int32_t> candidates_;
  std::vector<AppendItem> appends_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionItem> small_;
  std::vector<Expensive> expensive_;
  int64_t num_shared_ = 0;
  int64_t num_parts_ = 0;
  int64_t max_rows_ = 0;
  int64_t split_cost_ = 0;   // a tile beyond it is cut into splits
  int64_t expensive_cost_ = 0;  // an item beyond it goes first
};

inline int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

inline int64_t state_floats(int64_t rows, int64_t head_dim) {
  return padded_rows((2 + kSumParts) * padded_rows(rows) + rows * padded_head_dim(head_dim));
}

inline AttentionState state_at(float* data, int64_t rows) {
  const int64_t padded = padded_rows(rows);
  return {data, data + padded, data + 2 * padded, data + (2 + kSumParts) * padded};
}

/// Adds the score of each head that has no value to the sums of rows, of which `num_heads`
/// neighbouring heads follow one another for each token. Where it is so much larger than all others
/// that its weight overflows, they add up to nothing.
inline void add_sinks(const float* sinks, int64_t num_heads, int64_t num_rows,
                      const AttentionState& state) {
  constexpr float kLog2e = 1.44269504f;
  for (int64_t row = 0; row < num_rows; ++row)
    state.sum[row] += std::exp2(sinks[row % num_heads] * kLog2e - state.max[row]);
}

/// What a worker does after a split: the next one that it will work on.
struct NextSplit {
  const AttentionItem& item;
  int64_t split;
};

/// The splits of shared tiles: their partial sums, and how many of each tile are unfinished.
struct SharedTiles {
  float* parts;
  int64_t part_floats;
  std::atomic<int64_t>* unfinished;

  AttentionState part(int64_t index, int64_t rows) const {
    return state_at(parts + index * part_floats, rows);
  }
};

/// One split of a shared tile; whoever ends the last one merges them all, in order.
template <typename Operation>
void run_part(const Operation& operation, const SharedTiles& shared, const AttentionItem& item,
              const AttentionItem& next, float* scratch) {
  const int64_t rows = operation.num_rows(item);
  operation.attend(item, item.first_split, {next, next.first_split},
                   shared.part(item.part, rows), scratch);
  if (shared.unfinished[item.shared].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const int64_t first = item.part - (item.first_split - operation.first_split(item));
  const AttentionState total = shared.part(first, rows);
  for (int64_t part = first + 1; part < first + item.num_parts; ++part)
    merge_attention(total, shared.part(part, rows), rows, operation.head_dim());
  operation.store(item, total);
}

/// All splits of a tile, but for what `prefixes` has of them.
template <typename Operation>
void run_whole(const Operation& operation, const SharedPrefixes& prefixes,
               const AttentionItem& item, const AttentionItem& next, float* states,
               float* scratch) {
  const int64_t rows = operation.num_rows(item), dim = operation.head_dim();
  const int64_t num_done = prefixes.num_blocks(item.sequence);
  AttentionState total{};
  for (int64_t split = item.first_split; split <= item.last_split; ++split) {
    const bool is_first = split == item.first_split, is_last = split == item.last_split;
    const NextSplit after =
        is_last ? NextSplit{next, next.first_split} : NextSplit{item, split + 1};
    const AttentionState state =
        split * kSplitBlocks < num_done
            ? prefixes.state(item.sequence, item.kv_head, split)
            : state_at(states + (is_first ? 0 : state_floats(rows, dim)), rows);
    if (num_done < (split + 1) * kSplitBlocks)
      operation.attend(item, split, after, state, scratch);
    if (is_first)
      total = state;
    else
      merge_attention(total, state, rows, dim);
  }
  operation.store(item, total);
}

template <typename Operation>
void run_item(const Operation& operation, const SharedTiles& shared,
              const SharedPrefixes& prefixes, const AttentionItem& item,
              const AttentionItem& next) {
  thread_local Scratch memory;
  const int64_t rows = operation.num_rows(item);
  const int64_t states = item.part >= 0 ? 0 : 2 * state_floats(rows, operation.head_dim());
  const int64_t floats = states + operation.scratch_floats(rows);
  float* data = static_cast<float*>(memory.reserve(floats * int64_t{sizeof(float)}));
  if (item.part >= 0)
    run_part(operation, shared, item, next, data);
  else
    run_whole(operation, prefixes, item, next, data, data + states);
}

/// What sequences share, run after run.
template <typename Operation>
void run_prefixes(SharedPrefixes& prefixes, WorkerPool& pool, const Operation& operation) {
  thread_local Scratch states;
  const int64_t floats = prefixes.state_floats(operation.head_dim());
  prefixes.set_memory(static_cast<float*>(states.reserve(floats * int64_t{sizeof(float)})));
  for (const std::vector<PrefixTile>& tiles : prefixes.tiles())
    pool.for_each(static_cast<int64_t>(tiles.size()), 1, [&](int, int64_t index) {
      thread_local Scratch memory;
      const PrefixTile& tile = tiles[static_cast<size_t>(index)];
      const int64_t scratch = operation.scratch_floats(operation.num_rows(tile));
      operation.attend(tile, prefixes.tokens(), prefixes.state(tile),
                       static_cast<float*>(memory.reserve(scratch * int64_t{sizeof(float)})));
    });
}

/// Works off the items of a plan on all workers. An operation has
///
///     head_dim()                                    floats of a row of its sums
///     num_rows(item), first_split(item)             of the item's tile
///     scratch_floats(rows)
///     attend(item, split, next, state, scratch)     the sums of one split; of blocks that it shares
///                                                   with others `state` has them already
///     store(item, state)                            writes the result of all splits
template <typename Operation>
void run_attention(AttentionPlan& plan, WorkerPool& pool, const Operation& operation) {
  thread_local Scratch parts;
  thread_local std::vector<std::atomic<int64_t>> unfinished;
  const auto num_shared = static_cast<size_t>(plan.num_shared());
  if (num_shared > unfinished.size()) unfinished = std::vector<std::atomic<int64_t>>(num_shared);
  for (const AttentionItem& item : plan.items())
    if (item.shared >= 0) unfinished[static_cast<size_t>(item.shared)] = item.num_parts;
  SharedTiles shared{};
  shared.unfinished = unfinished.data();
  shared.part_floats = state_floats(plan.max_rows(), operation.head_dim());
  shared.parts = static_cast<float*>(
      parts.reserve(plan.num_parts() * shared.part_floats * int64_t{sizeof(float)}));
  // Each thread claims an item before it works on the last one it claimed, so that it can prefetch.
  const std::vector<AttentionItem>& items = plan.items();
  const auto num_items = static_cast<int64_t>(items.size());
  std::atomic<int64_t> unclaimed{0};
  pool.run([&](int) {
    int64_t index = unclaimed.fetch_add(1, std::memory_order_relaxed);
    while (index < num_items) {
      const int64_t next = unclaimed.fetch_add(1, std::memory_order_relaxed);
      run_item(operation, shared, plan.prefixes(), items[static_cast<size_t>(index)],
               items[static_cast<size_t>(std::min(next, num_items - 1))]);
      index = next;
    }
  });
}

}  // namespace raymoe
