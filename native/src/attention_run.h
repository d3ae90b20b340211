// How the workers go through the items of an attention pass: splits, the merge of their sums, and
// scratch memory. What an item computes is the operation's business.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "raymoe/attention.h"
#include "raymoe/worker_pool.h"
#include "scratch.h"

namespace raymoe {

inline int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

inline int64_t state_floats(int64_t rows, int64_t head_dim) {
  return padded_rows(2 * padded_rows(rows) + rows * padded_head_dim(head_dim));
}

inline AttentionState state_at(float* data, int64_t rows) {
  return {data, data + padded_rows(rows), data + 2 * padded_rows(rows)};
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

/// One item with all its splits.
template <typename Operation>
void run_whole(const Operation& operation, const AttentionItem& item, const AttentionItem& next,
               float* states, float* scratch) {
  const int64_t rows = operation.num_rows(item), dim = operation.head_dim();
  const AttentionState total = state_at(states, rows);
  const AttentionState part = state_at(states + state_floats(rows, dim), rows);
  for (int64_t split = item.first_split; split <= item.last_split; ++split) {
    const bool is_first = split == item.first_split, is_last = split == item.last_split;
    const NextSplit after = is_last ? NextSplit{next, next.first_split} : NextSplit{item, split + 1};
    operation.attend(item, split, after, is_first ? total : part, scratch);
    if (!is_first) merge_attention(total, part, rows, dim);
  }
  operation.store(item, total);
}

template <typename Operation>
void run_item(const Operation& operation, const SharedTiles& shared, const AttentionItem& item,
              const AttentionItem& next) {
  thread_local Scratch memory;
  const int64_t rows = operation.num_rows(item);
  const int64_t states = item.part >= 0 ? 0 : 2 * state_floats(rows, operation.head_dim());
  const int64_t floats = states + operation.scratch_floats(rows);
  float* data = static_cast<float*>(memory.reserve(floats * int64_t{sizeof(float)}));
  if (item.part >= 0)
    run_part(operation, shared, item, next, data);
  else
    run_whole(operation, item, next, data, data + states);
}

/// Works off the items of a plan on all workers. An operation has
///
///     head_dim()                                    floats of a row of its sums
///     num_rows(item), first_split(item)             of the item's tile
///     scratch_floats(rows)
///     attend(item, split, next, state, scratch)     overwrites `state` with the sums of one split
///     store(item, state)                            writes the result of all splits
template <typename Operation>
void run_attention(const AttentionPlan& plan, WorkerPool& pool, const Operation& operation) {
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
      run_item(operation, shared, items[static_cast<size_t>(index)],
               items[static_cast<size_t>(std::min(next, num_items - 1))]);
      index = next;
    }
  });
}

}  // namespace raymoe
