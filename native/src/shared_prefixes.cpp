// Which sequences of a step share chunks, and what of them is computed together.
#include "shared_prefixes.h"

#include <algorithm>

#include "attention_step.h"

namespace raymoe {
namespace {

/// Blocks of a sequence in the order of their positions.
const int32_t* table_of(const AttentionStep& step, int32_t sequence) {
  return step.block_table + sequence * step.table_stride;
}

int64_t common_chunks(const int32_t* a, const int32_t* b, int64_t most) {
  const auto differ = std::mismatch(a, a + most * kChunkBlocks, b);
  return (differ.first - a) / kChunkBlocks;
}

}  // namespace

void SharedPrefixes::find(const AttentionStep& step, const std::vector<int32_t>& candidates) {
  num_kv_heads_ = step.num_kv_heads;
  group_ = step.group;
  members_.clear();
  runs_.clear();
  member_of_.assign(static_cast<size_t>(step.num_sequences), -1);
  for (const int32_t sequence : candidates) {
    const int64_t num_chunks = step.first_position(sequence) / kChunkTokens;
    if (num_chunks > 0 && step.first_visible(step.context_tokens[sequence] - 1) == 0)
      members_.push_back({sequence, num_chunks, 0, 0, step.num_tokens(sequence), 0});
  }
  sort_members(step);
  find_runs(0, static_cast<int64_t>(members_.size()), 0, 0);
  number_tokens(step);
  for (std::vector<PrefixTile>& tiles : tiles_) tiles.clear();
  for (const SharedRun& run : runs_) cut(step, run);
}

/// Keeps those that share something, neighbours in the order of their blocks.
void SharedPrefixes::sort_members(const AttentionStep& step) {
  std::sort(members_.begin(), members_.end(), [&](const Member& a, const Member& b) {
    const int32_t* first = table_of(step, a.sequence);
    const int32_t* second = table_of(step, b.sequence);
    const int64_t blocks = std::min(a.num_chunks, b.num_chunks) * kChunkBlocks;
    const auto differ = std::mismatch(first, first + blocks, second);
    if (differ.first != first + blocks) return *differ.first < *differ.second;
    return a.num_chunks != b.num_chunks ? a.num_chunks < b.num_chunks : a.sequence < b.sequence;
  });
  common_.clear();
  size_t kept = 0;
  int64_t before = 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    int64_t after = 0;
    if (i + 1 < members_.size())
      after = common_chunks(table_of(step, members_[i].sequence),
                            table_of(step, members_[i + 1].sequence),
                            std::min(members_[i].num_chunks, members_[i + 1].num_chunks));
    if (before > 0 || after > 0) {
      members_[kept++] = members_[i];
      common_.push_back(after);
    }
    before = after;
  }
  members_.resize(kept);
}

/// Runs of the members [first, end), all of which share the chunks before `chunk`.
void SharedPrefixes::find_runs(int64_t first, int64_t end, int64_t chunk, int64_t depth) {
  while (first < end) {
    int64_t last = first, end_chunk = members_[static_cast<size_t>(first)].num_chunks;
    for (; last + 1 < end && common_[static_cast<size_t>(last)] > chunk; ++last)
      end_chunk = std::min(end_chunk, common_[static_cast<size_t>(last)]);
    if (last > first) {
      runs_.push_back({first, last + 1, chunk, end_chunk, depth});
      for (int64_t i = first; i <= last; ++i)
        members_[static_cast<size_t>(i)].shared_chunks = end_chunk;
      find_runs(first, last + 1, end_chunk, depth + 1);
    }
    first = last + 1;
  }
}

void SharedPrefixes::number_tokens(const AttentionStep& step) {
  tokens_.clear();
  families_.clear();
  for (const SharedRun& run : runs_) {
    if (run.depth > 0) continue;
    Family family{static_cast<int64_t>(tokens_.size()), 0, 0, 0};
    for (int64_t i = run.first_member; i < run.end_member; ++i) {
      Member& member = members_[static_cast<size_t>(i)];
      member_of_[static_cast<size_t>(member.sequence)] = static_cast<int32_t>(i);
      member.family = static_cast<int64_t>(families_.size());
      member.first_token = static_cast<int64_t>(tokens_.size());
      for (int64_t token = 0; token < member.num_tokens; ++token)
        tokens_.push_back(step.query_start[member.sequence] + static_cast<int32_t>(token));
      const int64_t blocks = member.shared_chunks * kChunkBlocks;
      family.num_splits = std::max(family.num_splits, (blocks + kSplitBlocks - 1) / kSplitBlocks);
    }
    family.num_tokens = static_cast<int64_t>(tokens_.size()) - family.first_token;
    families_.push_back(family);
  }
}

void SharedPrefixes::cut(const AttentionStep& step, const SharedRun& run) {
  const Member& first = members_[static_cast<size_t>(run.first_member)];
  const Member& last = members_[static_cast<size_t>(run.end_member - 1)];
  const int64_t end_token = last.first_token + last.num_tokens;
  const int64_t most = std::max<int64_t>(1, kAttentionRows / group_);
  const auto depth = static_cast<size_t>(run.depth);
  if (tiles_.size() <= depth) tiles_.resize(depth + 1);
  const int64_t begin = run.first_chunk * kChunkBlocks, end = run.end_chunk * kChunkBlocks;
  for (int64_t head = 0; head < step.num_kv_heads; ++head)
    for (int64_t split = begin / kSplitBlocks; split * kSplitBlocks < end; ++split) {
      const BlockRange blocks = range_in_split(split, begin, end);
      for (int64_t token = first.first_token; token < end_token; token += most)
        tiles_[depth].push_back(
            {token, std::min(most, end_token - token), head, split, first.sequence, blocks});
    }
}

int64_t SharedPrefixes::state_floats(int64_t dim) {
  dim_ = dim;
  int64_t floats = 0;
  for (Family& family : families_) {
    family.offset = floats;
    floats += num_kv_heads_ * family.num_splits *
              raymoe::state_floats(family.num_tokens * group_, dim);
  }
  return floats;
}

AttentionState SharedPrefixes::state(const PrefixTile& tile) const {
  const int32_t member = member_of_[static_cast<size_t>(tile.sequence)];
  return state_at_token(members_[static_cast<size_t>(member)].family, tile.first_token,
                        tile.kv_head, tile.split);
}

AttentionState SharedPrefixes::state(int64_t sequence, int64_t kv_head, int64_t split) const {
  const Member& member =
      members_[static_cast<size_t>(member_of_[static_cast<size_t>(sequence)])];
  return state_at_token(member.family, member.first_token, kv_head, split);
}

AttentionState SharedPrefixes::state_at_token(int64_t family, int64_t token, int64_t kv_head,
                                              int64_t split) const {
  const Family& all = families_[static_cast<size_t>(family)];
  const int64_t rows = all.num_tokens * group_;
  float* data = memory_ + all.offset +
                (kv_head * all.num_splits + split) * raymoe::state_floats(rows, dim_);
  return state_at(data, rows).rows_from((token - all.first_token) * group_, dim_);
}

}  // namespace raymoe
