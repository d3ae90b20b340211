// What sequences of random trees share: everything, once, and nothing else.
#include <algorithm>
#include <map>
#include <tuple>

#include "../src/attention_step.h"
#include "paged_step.h"

namespace raymoe {
namespace {

/// A step whose sequences begin with the blocks of an earlier one, so many of them.
struct Tree {
  PagedStep step;
  AttentionStep view;

  Tree(std::vector<Sequence> sequences, const std::vector<std::pair<int, int64_t>>& parents)
      : step(std::move(sequences)) {
    for (size_t i = 0; i < parents.size(); ++i)
      for (int64_t block = 0; block < parents[i].second; ++block)
        step.table[i * static_cast<size_t>(step.table_width) + static_cast<size_t>(block)] =
            step.table[static_cast<size_t>(parents[i].first * step.table_width + block)];
    view.query_start = step.starts.data();
    view.context_tokens = step.contexts.data();
    view.block_table = step.table.data();
    view.table_stride = step.table_width;
    view.num_sequences = step.count();
    view.num_kv_heads = 2;
    view.group = 3;
    view.window = int64_t{1} << 40;
  }

  const int32_t* table(int64_t sequence) const {
    return step.table.data() + sequence * step.table_width;
  }

  /// Chunks of old tokens that two sequences have in common.
  int64_t common(int64_t a, int64_t b) const {
    const int64_t most =
        std::min(view.first_position(a), view.first_position(b)) / kChunkTokens;
    int64_t chunks = 0;
    while (chunks < most && std::equal(table(a) + chunks * kChunkBlocks,
                                       table(a) + (chunks + 1) * kChunkBlocks,
                                       table(b) + chunks * kChunkBlocks))
      ++chunks;
    return chunks;
  }

  int64_t shared(int64_t sequence) const {
    int64_t most = 0;
    for (int64_t other = 0; other < step.count(); ++other)
      if (other != sequence && step.sequences[static_cast<size_t>(other)].tokens > 0)
        most = std::max(most, common(sequence, other));
    return most;
  }
};

/// Each token meets the blocks that it shares once, in rising order, in tiles with these blocks.
void check_tiles(const Tree& tree, SharedPrefixes& prefixes) {
  std::vector<int64_t> sequence_of;
  for (int64_t i = 0; i < tree.step.count(); ++i)
    sequence_of.insert(sequence_of.end(),
                       static_cast<size_t>(tree.step.sequences[static_cast<size_t>(i)].tokens), i);
  std::map<std::pair<int32_t, int64_t>, int64_t> done;  // of a token and KV head, blocks
  for (const std::vector<PrefixTile>& tiles : prefixes.tiles()) {
    for (const PrefixTile& tile : tiles) {
      CHECK(tile.num_tokens * tree.view.group <= kAttentionRows);
      CHECK(tile.blocks.begins == (tile.blocks.first % kSplitBlocks == 0));
      CHECK(tile.blocks.ends == (tile.blocks.end % kSplitBlocks == 0));
      CHECK(tile.blocks.first / kSplitBlocks == tile.split);
      CHECK((tile.blocks.end - 1) / kSplitBlocks == tile.split);
      for (int64_t i = 0; i < tile.num_tokens; ++i) {
        const int32_t token = prefixes.tokens()[tile.first_token + i];
        int64_t& blocks = done[{token, tile.kv_head}];
        CHECK(blocks == tile.blocks.first);
        blocks = tile.blocks.end;
        const int32_t* table = tree.table(sequence_of[static_cast<size_t>(token)]);
        CHECK(std::equal(table + tile.blocks.first, table + tile.blocks.end,
                         tree.table(tile.sequence) + tile.blocks.first));
      }
    }
  }
  for (int64_t sequence = 0; sequence < tree.step.count(); ++sequence) {
    if (tree.step.sequences[static_cast<size_t>(sequence)].tokens == 0) continue;
    const int64_t blocks = tree.shared(sequence) * kChunkBlocks;
    CHECK(prefixes.num_blocks(sequence) == blocks);
    for (int64_t head = 0; head < tree.view.num_kv_heads; ++head)
      CHECK((done[{tree.view.query_start[sequence], head}] == blocks));
  }
}

void check_states(const Tree& tree, SharedPrefixes& prefixes) {
  constexpr int64_t dim = 24;
  std::vector<float> memory(static_cast<size_t>(prefixes.state_floats(dim)) + 1);
  prefixes.set_memory(memory.data());
  std::map<float*, std::tuple<int64_t, int64_t, int64_t>> owners;
  for (int64_t sequence = 0; sequence < tree.step.count(); ++sequence) {
    const int64_t blocks = prefixes.num_blocks(sequence);
    for (int64_t head = 0; head < tree.view.num_kv_heads; ++head)
      for (int64_t split = 0; split * kSplitBlocks < blocks; ++split)
        for (int64_t row = 0; row < tree.view.num_tokens(sequence) * tree.view.group; ++row) {
          const AttentionState state =
              prefixes.state(sequence, head, split).rows_from(row, dim);
          CHECK(owners.emplace(state.max, std::make_tuple(sequence, head, split)).second);
          CHECK(owners.emplace(state.sum, std::make_tuple(sequence, head, split)).second);
          CHECK(state.out + dim <= memory.data() + memory.size());
        }
  }
}

void test_random_trees() {
  std::mt19937 random(3);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  SharedPrefixes prefixes;  // one for all steps, as threads have it
  for (int round = 0; round < 200; ++round) {
    std::vector<Sequence> sequences;
    std::vector<std::pair<int, int64_t>> parents;
    std::vector<int32_t> candidates;
    const int64_t count = pick(1, 30), longest = round % 2 == 0 ? 400 : 3000;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t context = pick(1, longest);
      sequences.push_back({context, std::min(context, pick(0, 4))});
      const auto parent = static_cast<int>(pick(0, i));
      const int64_t most =
          std::min(context, sequences[static_cast<size_t>(parent)].context) / kBlockTokens;
      parents.push_back({parent, pick(0, 3) == 0 ? 0 : pick(0, most)});
      if (sequences.back().tokens > 0) candidates.push_back(static_cast<int32_t>(i));
    }
    Tree tree(sequences, parents);
    prefixes.find(tree.view, candidates);
    check_tiles(tree, prefixes);
    check_states(tree, prefixes);
  }
}

void test_rows_that_do_not_see_all_share_nothing() {
  Tree tree({{300, 1}, {300, 1}, {420, 1}}, {{0, 0}, {0, 8}, {0, 8}});
  tree.view.window = 400;
  SharedPrefixes prefixes;
  prefixes.find(tree.view, {0, 1, 2});
  CHECK(prefixes.num_blocks(0) == 8);
  CHECK(prefixes.num_blocks(1) == 8);
  CHECK(prefixes.num_blocks(2) == 0);
}

}  // namespace
}  // namespace raymoe

int main() {
  raymoe::test_random_trees();
  raymoe::test_rows_that_do_not_see_all_share_nothing();
  return 0;
}
