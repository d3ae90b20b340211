// Sequences of a step whose contexts begin with the same blocks of the cache: what they share is
// attended once, as one product for the queries of all of them.
//
// Shared blocks are found by their numbers, in whole chunks. A row meets the same numbers in the
// same order as if it were alone, because chunks and splits lie at fixed positions and its sums go
// on from run to run: the same bits, whoever shares.
#pragma once

#include <cstdint>
#include <vector>

#include "raymoe/attention.h"

namespace raymoe {

struct AttentionStep;

/// Chunks that neighbours of the order of SharedPrefixes have in common.
struct SharedRun {
  int64_t first_member;
  int64_t end_member;
  int64_t first_chunk;
  int64_t end_chunk;
  int64_t depth;  // how many runs come before it
};

/// Queries of several sequences for one KV head, over blocks of one split that all of them share.
struct PrefixTile {
  int64_t first_token;  // in the order of SharedPrefixes
  int64_t num_tokens;
  int64_t kv_head;
  int64_t split;
  int64_t sequence;  // one of those that have these blocks
  BlockRange blocks;
};

class SharedPrefixes {
 public:
  /// Finds what `candidates` share: sequences with few new tokens. Those of which some token does
  /// not see the whole context share nothing.
  void find(const AttentionStep& step, const std::vector<int32_t>& candidates);

  /// Tiles that need nothing of one another; those of a depth need the depths before it.
  const std::vector<std::vector<PrefixTile>>& tiles() const { return tiles_; }

  /// Blocks that a sequence need not attend to any more.
  int64_t num_blocks(int64_t sequence) const {
    const int32_t member = member_of_[static_cast<size_t>(sequence)];
    return member < 0 ? 0 : members_[static_cast<size_t>(member)].shared_chunks * kChunkBlocks;
  }

  /// Tokens of the step, in the order that tiles count them in.
  const int32_t* tokens() const { return tokens_.data(); }

  /// Floats of memory for the sums of all rows, of which each has `dim`.
  int64_t state_floats(int64_t dim);
  void set_memory(float* memory) { memory_ = memory; }
  AttentionState state(const PrefixTile& tile) const;
  AttentionState state(int64_t sequence, int64_t kv_head, int64_t split) const;

 private:
  struct Member {
    int32_t sequence;
    int64_t num_chunks;     // that all its queries see
    int64_t shared_chunks;  // with any other member
    int64_t first_token;
    int64_t num_tokens;
    int64_t family;
  };
  /// Members that share their first chunk; their sums lie together.
  struct Family {
    int64_t first_token;
    int64_t num_tokens;
    int64_t num_splits;
    int64_t offset;  // of its sums
  };

  void sort_members(const AttentionStep& step);
  void find_runs(int64_t first, int64_t end, int64_t chunk, int64_t depth);
  void number_tokens(const AttentionStep& step);
  void cut(const AttentionStep& step, const SharedRun& run);
  AttentionState state_at_token(int64_t family, int64_t token, int64_t kv_head,
                                int64_t split) const;

  std::vector<Member> members_;
  std::vector<int64_t> common_;  // chunks that a member and the next one share
  std::vector<SharedRun> runs_;
  std::vector<Family> families_;
  std::vector<std::vector<PrefixTile>> tiles_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> member_of_;
  int64_t num_kv_heads_ = 0;
  int64_t group_ = 0;
  int64_t dim_ = 0;
  float* memory_ = nullptr;
};

}  // namespace raymoe
