// How the work of one attention pass is cut into items for the worker pool.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_pass.h"
#include "raymoe/attention.h"

namespace raymoe {

/// One item of work: a tile, over all its splits or over one of them.
struct AttentionItem {
  int32_t sequence;
  int32_t kv_head;
  int64_t first_token;  // of the sequence's tokens in the pass
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
  void build(const AttentionPass& pass, int num_threads);

  /// To be done before the items: sequences with one token append within their item.
  const std::vector<AppendItem>& appends() const { return appends_; }
  /// The few expensive ones first, in falling order of cost, so that no thread ends late.
  const std::vector<AttentionItem>& items() const { return items_; }
  int64_t num_shared() const { return num_shared_; }
  int64_t num_parts() const { return num_parts_; }
  int64_t max_rows() const { return max_rows_; }

 private:
  struct Costly {
    int64_t cost;
    AttentionItem item;
  };

  void add_sequence(const AttentionPass& pass, int64_t sequence);
  void add_tile(const AttentionPass& pass, AttentionItem tile, int64_t cost);
  void add_item(const AttentionItem& item, int64_t cost);

  std::vector<AppendItem> appends_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionItem> small_;
  std::vector<Costly> costly_;
  int64_t num_shared_ = 0;
  int64_t num_parts_ = 0;
  int64_t max_rows_ = 0;
  int64_t split_cost_ = 0;   // a tile beyond it is cut into splits
  int64_t costly_cost_ = 0;  // an item beyond it goes first
};

}  // namespace raymoe
