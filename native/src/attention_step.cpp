// Checks of the ragged shape of an attention step, and its plan.
#include "attention_step.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace raymoe {
namespace {

void check_blocks(const AttentionStep& step, int64_t sequence, int64_t table_width,
                  int64_t num_blocks) {
  const int64_t first = step.first_visible(step.first_position(sequence)) / kBlockTokens;
  const int64_t end = (step.context_tokens[sequence] + kBlockTokens - 1) / kBlockTokens;
  if (end > table_width)
    refuse_attention("sequence " + std::to_string(sequence) + " has " +
                     std::to_string(step.context_tokens[sequence]) +
                     " context_tokens, block_table room for " +
                     std::to_string(table_width * kBlockTokens));
  const int32_t* table = step.block_table + sequence * step.table_stride;
  for (int64_t i = first; i < end; ++i)
    if (table[i] < 0 || table[i] >= num_blocks)
      refuse_attention("block_table[" + std::to_string(sequence) + ", " + std::to_string(i) +
                       "] is " + std::to_string(table[i]) + ", the cache has " +
                       std::to_string(num_blocks) + " blocks");
}

constexpr int64_t kAppendTokens = 8 * kBlockTokens;  // of an append item

/// Reading a KV token costs about as much as multiplying it with this many rows.
constexpr int64_t kReadRows = 12;

int64_t max_tile_tokens(int64_t group) { return std::max<int64_t>(1, kAttentionRows / group); }

int64_t tile_cost(const AttentionStep& step, int64_t first_position, int64_t num_tokens) {
  const int64_t span = first_position + num_tokens - step.first_visible(first_position);
  return span * (kReadRows + num_tokens * step.group);
}

template <typename Visit>
void for_each_tile(const AttentionStep& step, int64_t sequence, Visit visit) {
  const int64_t max_tokens = max_tile_tokens(step.group);
  const int64_t num_tokens = step.num_tokens(sequence);
  for (int64_t first = 0; first < num_tokens; first += max_tokens) {
    const int64_t count = std::min(max_tokens, num_tokens - first);
    visit(first, count, tile_cost(step, step.first_position(sequence) + first, count));
  }
}

int64_t total_cost(const AttentionStep& step) {
  int64_t total = 0;
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence)
    for_each_tile(step, sequence, [&](int64_t, int64_t, int64_t cost) { total += cost; });
  return total * step.num_kv_heads;
}

}  // namespace

void check_sequences(const AttentionStep& step, int64_t num_tokens) {
  if (step.query_start[0] != 0 || step.query_start[step.num_sequences] != num_tokens)
    refuse_attention("query_start runs from " + std::to_string(step.query_start[0]) + " to " +
                     std::to_string(step.query_start[step.num_sequences]) + ", expected 0 to " +
                     std::to_string(num_tokens));
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
    const int64_t count = step.num_tokens(sequence);
    if (count < 0) refuse_attention("query_start falls after entry " + std::to_string(sequence));
    if (count > step.context_tokens[sequence])
      refuse_attention("sequence " + std::to_string(sequence) + " has " + std::to_string(count) +
                       " tokens in the step but " + std::to_string(step.context_tokens[sequence]) +
                       " context_tokens");
  }
}

void check_step(const AttentionStep& step, int64_t num_tokens, int64_t table_width,
                int64_t num_blocks) {
  check_sequences(step, num_tokens);
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence)
    if (step.num_tokens(sequence) > 0) check_blocks(step, sequence, table_width, num_blocks);
}

AttentionStep make_step(const TensorView& query_start, const TensorView& context_tokens,
                        const TensorView& block_table) {
  context_tokens.expect("attention: context_tokens", DType::kInt32, 1);
  query_start.expect("attention: query_start", DType::kInt32, 1);
  block_table.expect("attention: block_table", DType::kInt32, 2);
  const int64_t count = context_tokens.size(0);
  query_start.expect_size("attention: query_start", 0, count + 1);
  block_table.expect_size("attention: block_table", 0, count);
  AttentionStep step;
  step.query_start = query_start.data<int32_t>();
  step.context_tokens = context_tokens.data<int32_t>();
  step.block_table = block_table.data<int32_t>();
  step.table_stride = block_table.stride(0);
  step.num_sequences = count;
  return step;
}

void refuse_attention(const std::string& message) {
  throw std::invalid_argument("attention: " + message);
}

float checked_scale_log2e(double scale) {
  constexpr double kLog2E = 1.4426950408889634;
  if (!(scale > 0) || !std::isfinite(scale))
    refuse_attention("scale is " + std::to_string(scale) + ", expected a positive number");
  return static_cast<float>(scale * kLog2E);
}

void AttentionPlan::build(const AttentionStep& step, int num_threads) {
  candidates_.clear();
  appends_.clear();
  items_.clear();
  small_.clear();
  expensive_.clear();
  num_shared_ = num_parts_ = max_rows_ = 0;
  const int64_t total = total_cost(step);
  split_cost_ = total / (4 * num_threads);
  expensive_cost_ = total / (32 * num_threads);
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence)
    add_sequence(step, sequence);
  prefixes_.find(step, candidates_);
  std::sort(expensive_.begin(), expensive_.end(),
            [](const Expensive& a, const Expensive& b) { return a.cost > b.cost; });
  for (const Expensive& expensive : expensive_) items_.push_back(expensive.item);
  items_.insert(items_.end(), small_.begin(), small_.end());
}

void AttentionPlan::add_sequence(const AttentionStep& step, int64_t sequence) {
  const int64_t num_tokens = step.num_tokens(sequence);
  // One tile with a part of its rows: a full one has nothing to gain.
  bool is_candidate = num_tokens > 0 && num_tokens < max_tile_tokens(step.group);
  for (int64_t head = 0; head < step.num_kv_heads; ++head) {
    AttentionItem tile{};
    tile.sequence = static_cast<int32_t>(sequence);
    tile.kv_head = static_cast<int32_t>(head);
    if (num_tokens > 1) add_appends(step, tile);
    for_each_tile(step, sequence, [&](int64_t first, int64_t count, int64_t cost) {
      tile.first_token = first;
      tile.num_tokens = count;
      is_candidate &= add_tile(step, tile, cost);
    });
  }
  if (is_candidate) candidates_.push_back(static_cast<int32_t>(sequence));
}

/// Items end where blocks do: who begins a block clears the rest of it.
void AttentionPlan::add_appends(const AttentionStep& step, const AttentionItem& tile) {
  const int64_t num_tokens = step.num_tokens(tile.sequence);
  const int64_t in_block = step.first_position(tile.sequence) % kBlockTokens;
  for (int64_t first = 0, end; first < num_tokens; first = end) {
    end = std::min(num_tokens, first + kAppendTokens - (first == 0 ? in_block : 0));
    appends_.push_back({tile.sequence, tile.kv_head, first, end - first});
  }
}

bool AttentionPlan::add_tile(const AttentionStep& step, AttentionItem tile, int64_t cost) {
  const int64_t position = step.first_position(tile.sequence) + tile.first_token;
  tile.first_split = step.first_visible(position) / kSplitTokens;
  tile.last_split = (position + tile.num_tokens - 1) / kSplitTokens;
  tile.shared = tile.part = -1;
  max_rows_ = std::max(max_rows_, tile.num_tokens * step.group);
  const int64_t num_splits = tile.last_split - tile.first_split + 1;
  if (num_splits == 1 || cost <= split_cost_) {
    add_item(tile, cost);
    return true;
  }
  AttentionItem item = tile;
  item.shared = num_shared_++;
  item.num_parts = num_splits;
  for (int64_t split = tile.first_split; split <= tile.last_split; ++split) {
    item.first_split = item.last_split = split;
    item.part = num_parts_++;
    add_item(item, cost / num_splits);
  }
  return false;
}

void AttentionPlan::add_item(const AttentionItem& item, int64_t cost) {
  if (cost > expensive_cost_)
    expensive_.push_back({cost, item});
  else
    small_.push_back(item);
}

}  // namespace raymoe
