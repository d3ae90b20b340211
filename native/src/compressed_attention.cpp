// Attention to last tokens and entries, and the pooling of entries: checks, and work for the pool.
#include "raymoe/compressed_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attention_step.h"
#include "parallel.h"
#include "raymoe/latent_attention.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("compressed attention: " + message);
}

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Cosines and sines of a position, and where the rotated dimensions of a row begin.
class Rotation {
 public:
  Rotation(const RotationTables& tables, int64_t width, int64_t num_positions)
      : half_(tables.cosine.size(1)), begin_(width - 2 * half_) {
    for (const TensorView* table : {&tables.cosine, &tables.sine})
      table->expect("compressed attention: table", DType::kFloat32, 2)
          .expect_size("compressed attention: table", 1, half_)
          .expect_contiguous("compressed attention: table");
    if (begin_ < 0)
      refuse("tables rotate " + std::to_string(2 * half_) + " dimensions, rows have " +
             std::to_string(width));
    for (const TensorView* table : {&tables.cosine, &tables.sine})
      if (table->size(0) < num_positions)
        refuse("tables have " + std::to_string(table->size(0)) + " positions, a sequence has " +
               std::to_string(num_positions));
    cosine_ = tables.cosine.data<float>();
    sine_ = tables.sine.data<float>();
  }

  /// Turns neighbouring pairs of a row by the angles of `position`; sign -1 turns them back.
  void apply(float* row, int64_t position, float sign) const {
    const float* cosine = cosine_ + position * half_;
    const float* sine = sine_ + position * half_;
    float* pairs = row + begin_;
    for (int64_t i = 0; i < half_; ++i) {
      const float first = pairs[2 * i], second = pairs[2 * i + 1], turned = sign * sine[i];
      pairs[2 * i] = first * cosine[i] - second * turned;
      pairs[2 * i + 1] = second * cosine[i] + first * turned;
    }
  }

 private:
  int64_t half_, begin_;
  const float *cosine_ = nullptr, *sine_ = nullptr;
};

/// The sequences of a step, and where their entries and slots are.
struct Layout {
  AttentionStep step;
  const int32_t* slots = nullptr;
  int64_t num_slots = 0;
  int64_t ratio = 0;  // 0: no entries
  char* entries = nullptr;
  int64_t block_bytes = 0, entry_bytes = 0;

  int64_t num_entries(int64_t tokens) const { return ratio == 0 ? 0 : tokens / ratio; }
  int64_t slot_index(int64_t sequence) const { return num_slots - 1 - slots[sequence]; }
  int64_t block_of(int64_t entry) const { return ((entry + 1) * ratio - 1) / kBlockTokens; }
  char* entry_of(int64_t sequence, int64_t entry) const {
    const int64_t row = ((entry + 1) * ratio - 1) % kBlockTokens / ratio;
    const int64_t block = step.block_table[sequence * step.table_stride + block_of(entry)];
    return entries + block * block_bytes + row * entry_bytes;
  }
  int64_t longest() const {
    int64_t longest = 0;
    for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence)
      longest = std::max<int64_t>(longest, step.context_tokens[sequence]);
    return longest;
  }
};

void check_slots(const Layout& layout) {
  std::vector<bool> is_taken(static_cast<size_t>(layout.num_slots));
  for (int64_t sequence = 0; sequence < layout.step.num_sequences; ++sequence) {
    if (layout.step.num_tokens(sequence) == 0) continue;
    const int64_t slot = layout.slots[sequence];
    const std::string what = "slots[" + std::to_string(sequence) + "] is " + std::to_string(slot);
    if (slot < 0 || slot >= layout.num_slots)
      refuse(what + ", there are " + std::to_string(layout.num_slots));
    if (is_taken[static_cast<size_t>(slot)]) refuse(what + ", as of a sequence before");
    is_taken[static_cast<size_t>(slot)] = true;
  }
}

void check_blocks(const Layout& layout, int64_t table_width, int64_t num_blocks) {
  for (int64_t sequence = 0; sequence < layout.step.num_sequences; ++sequence) {
    if (layout.step.num_tokens(sequence) == 0) continue;
    const int32_t* table = layout.step.block_table + sequence * layout.step.table_stride;
    const int64_t count = layout.num_entries(layout.step.context_tokens[sequence]);
    for (int64_t entry = 0; entry < count; ++entry) {
      const int64_t column = layout.block_of(entry);
      if (column >= table_width)
        refuse("sequence " + std::to_string(sequence) + " has " + std::to_string(count) +
               " entries, block_table room for " + std::to_string(table_width * kBlockTokens) +
               " tokens");
      if (table[column] < 0 || table[column] >= num_blocks)
        refuse("block_table[" + std::to_string(sequence) + ", " + std::to_string(column) +
               "] is " + std::to_string(table[column]) + ", the cache has " +
               std::to_string(num_blocks) + " blocks");
    }
  }
}

Layout make_layout(const CompressedStep& step, const TensorView& entries, int64_t num_tokens,
                   int64_t num_slots, int64_t width, int64_t ratio) {
  Layout layout;
  layout.step = make_step(step.query_start, step.context_tokens, step.block_table);
  check_sequences(layout.step, num_tokens);
  step.slots.expect("compressed attention: slots", DType::kInt32, 1)
      .expect_size("compressed attention: slots", 0, layout.step.num_sequences);
  layout.slots = step.slots.data<int32_t>();
  layout.num_slots = num_slots;
  check_slots(layout);
  if (ratio == 0) return layout;
  if (ratio < 1 || (ratio % kBlockTokens != 0 && kBlockTokens % ratio != 0))
    refuse("ratio is " + std::to_string(ratio) + ", expected a divisor or multiple of " +
           std::to_string(kBlockTokens));
  layout.ratio = ratio;
  const int64_t block_entries = std::max<int64_t>(1, kBlockTokens / ratio);
  entries.expect_rank("compressed attention: entries", 3)
      .expect_size("compressed attention: entries", 1, block_entries)
      .expect_size("compressed attention: entries", 2, width);
  if (block_entries > 1 && entries.num_elements() > 0 && entries.stride(1) != width)
    refuse("entries must be contiguous within a block");
  layout.entries = static_cast<char*>(entries.raw());
  layout.entry_bytes = width * element_size(entries.dtype());
  layout.block_bytes = entries.stride(0) * element_size(entries.dtype());
  check_blocks(layout, step.block_table.size(1), entries.size(0));
  return layout;
}

// ---- Pooling ----

using StoreEntry = void (*)(const float* from, char* to, int64_t width);

template <typename T>
void store_entry(const float* from, char* to, int64_t width) {
  T* out = reinterpret_cast<T*>(to);
  for (int64_t i = 0; i < width; ++i) out[i] = from_float<T>(from[i]);
}

StoreEntry store_of(DType dtype) {
  if (dtype == DType::kFloat32) return store_entry<float>;
  if (dtype == DType::kFloat16) return store_entry<fp16>;
  if (dtype == DType::kBFloat16) return store_entry<bf16>;
  refuse(std::string("entries have dtype ") + dtype_name(dtype) +
         ", expected float32, float16 or bfloat16");
}

struct PoolCall {
  Layout layout;
  PoolKernels::Kernel add = nullptr;
  StoreEntry store = nullptr;
  const char* values = nullptr;  // [T, A W]; scores follow each row of them
  int64_t value_size = 0;        // bytes of an element
  int64_t value_stride = 0;      // elements between tokens
  const float* bias = nullptr;
  const float* norm = nullptr;
  float eps = 0;
  float* sums = nullptr;
  int64_t slot_stride = 0;  // floats
  int64_t num_sums = 0, width = 0;
  float* averages = nullptr;           // [E, W], of the windows that end in the step
  std::vector<int64_t> first_entries;  // [S + 1], of each sequence among these

  float* sum_of(int64_t sequence, int64_t sum) const {
    return sums + layout.slot_index(sequence) * slot_stride + sum * 3 * width;
  }
};

void clear(float* sum, int64_t width, int64_t begin, int64_t end) {
  std::fill(sum + begin, sum + end, -std::numeric_limits<float>::infinity());
  std::fill(sum + width + begin, sum + width + end, 0.0f);
  std::fill(sum + 2 * width + begin, sum + 2 * width + end, 0.0f);
}

/// Takes the average of the window that ends, and lets the next one be the open one.
void close_window(const PoolCall& call, int64_t sequence, float* average, int64_t begin,
                  int64_t end) {
  const int64_t width = call.width;
  const float* ended = call.sum_of(sequence, 0);
  for (int64_t i = begin; i < end; ++i) average[i] = ended[2 * width + i] / ended[width + i];
  for (int64_t sum = 1; sum < call.num_sums; ++sum)
    for (int64_t part = 0; part < 3; ++part) {
      const float* from = call.sum_of(sequence, sum) + part * width;
      std::copy(from + begin, from + end, call.sum_of(sequence, sum - 1) + part * width + begin);
    }
  clear(call.sum_of(sequence, call.num_sums - 1), width, begin, end);
}

/// The tokens of a sequence, for channels [begin, end).
void add_sequence(const PoolCall& call, int64_t sequence, int64_t begin, int64_t end) {
  const AttentionStep& step = call.layout.step;
  const int64_t first = step.first_position(sequence), count = step.num_tokens(sequence);
  const int64_t ratio = call.layout.ratio, num_sums = call.num_sums;
  if (first == 0)
    for (int64_t sum = 0; sum < num_sums; ++sum)
      clear(call.sum_of(sequence, sum), call.width, begin, end);
  float* average =
      call.averages + call.first_entries[static_cast<size_t>(sequence)] * call.width;
  for (int64_t token = 0; token < count;) {
    const int64_t place = (first + token) % ratio;
    PoolTile tile{};
    tile.num_tokens = std::min(ratio - place, count - token);
    tile.stride = call.value_stride;
    tile.bias_stride = num_sums * call.width;
    tile.width = call.width;
    for (int64_t sum = 0; sum < num_sums; ++sum) {
      const int64_t channel = (num_sums - 1 - sum) * call.width;
      const int64_t at = (step.query_start[sequence] + token) * call.value_stride + channel;
      tile.values = call.values + at * call.value_size;
      tile.scores = call.values + (at + num_sums * call.width) * call.value_size;
      tile.bias = call.bias + place * tile.bias_stride + channel;
      tile.sums = call.sum_of(sequence, sum);
      call.add(tile, begin, end);
    }
    token += tile.num_tokens;
    if (place + tile.num_tokens < ratio) return;
    close_window(call, sequence, average, begin, end);
    average += call.width;
  }
}

/// Norm and rotation of the entry whose average is the given one.
void finish_entry(const PoolCall& call, const Rotation& rotation, int64_t average) {
  const std::vector<int64_t>& firsts = call.first_entries;
  const int64_t sequence = std::upper_bound(firsts.begin(), firsts.end(), average) -
                           firsts.begin() - 1;
  const int64_t entry = call.layout.num_entries(call.layout.step.first_position(sequence)) +
                        average - firsts[static_cast<size_t>(sequence)];
  float* row = call.averages + average * call.width;
  float squares = 0;
  for (int64_t d = 0; d < call.width; ++d) squares += row[d] * row[d];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(call.width) + call.eps);
  for (int64_t d = 0; d < call.width; ++d) row[d] = row[d] * factor * call.norm[d];
  rotation.apply(row, entry * call.layout.ratio, 1.0f);
  call.store(row, call.layout.entry_of(sequence, entry), call.width);
}

PoolCall make_pool_call(const PoolInputs& inputs, const TensorView& sums,
                        const TensorView& entries, const CompressedStep& step, int64_t ratio) {
  PoolCall call;
  sums.expect("compressed attention: sums", DType::kFloat32, 4)
      .expect_size("compressed attention: sums", 2, 3);
  call.num_sums = sums.size(1);
  call.width = sums.size(3);
  const int64_t num_channels = call.num_sums * call.width;
  if (sums.num_elements() > 0 &&
      (sums.stride(2) != call.width || (call.num_sums > 1 && sums.stride(1) != 3 * call.width)))
    refuse("sums must be contiguous within a slot");
  if (ratio < 1 || call.num_sums < 1) refuse("there is nothing to pool");
  inputs.pooled.expect_rank("compressed attention: pooled", 2)
      .expect_size("compressed attention: pooled", 1, 2 * num_channels);
  inputs.bias.expect("compressed attention: bias", DType::kFloat32, 2)
      .expect_size("compressed attention: bias", 0, ratio)
      .expect_size("compressed attention: bias", 1, num_channels)
      .expect_contiguous("compressed attention: bias");
  inputs.norm.expect("compressed attention: norm", DType::kFloat32, 1)
      .expect_size("compressed attention: norm", 0, call.width);
  call.layout = make_layout(step, entries, inputs.pooled.size(0), sums.size(0), call.width, ratio);
  call.add = pool_kernels().of(inputs.pooled.dtype(), "compressed attention: pooled");
  call.store = store_of(entries.dtype());
  call.values = static_cast<const char*>(inputs.pooled.raw());
  call.value_size = element_size(inputs.pooled.dtype());
  call.value_stride = inputs.pooled.stride(0);
  call.bias = inputs.bias.data<float>();
  call.norm = inputs.norm.data<float>();
  call.eps = static_cast<float>(inputs.eps);
  call.sums = sums.data<float>();
  call.slot_stride = sums.stride(0);
  return call;
}

// ---- Attention ----

/// A token, and how many rows and entries it attends to.
struct Query {
  int64_t sequence;
  int64_t token;  // of the step
  int64_t position;
  int64_t num_chosen;
  int64_t num_seen;
};

struct Call {
  Layout layout;
  LatentShape shape;
  LatentKernel kernel;
  int64_t num_heads = 0, tile_heads = 0;
  int64_t window = 0;
  const char* query = nullptr;
  const char* new_rows = nullptr;
  int64_t new_row_bytes = 0;  // between tokens
  char* rows = nullptr;
  int64_t slot_bytes = 0, row_bytes = 0;
  char* out = nullptr;
  int64_t query_size = 0;  // bytes of an element
  const float* sinks = nullptr;
  const int32_t* chosen = nullptr;
  int64_t chosen_stride = 0;
  std::vector<Query> queries;

  int64_t num_tiles() const { return (num_heads + tile_heads - 1) / tile_heads; }
  char* row_of(int64_t sequence, int64_t position) const {
    return rows + layout.slot_index(sequence) * slot_bytes + position % window * row_bytes;
  }
  int64_t first_row(int64_t position) const { return std::max<int64_t>(0, position - window + 1); }
};

/// Entries that a token chose, up to the first that is negative.
int64_t count_chosen(const Call& call, int64_t num_chosen, int64_t token, int64_t num_entries) {
  const int32_t* chosen = call.chosen + token * call.chosen_stride;
  int64_t count = 0;
  for (; count < num_chosen && chosen[count] >= 0; ++count) {
    const bool follows = count == 0 || chosen[count] > chosen[count - 1];
    if (!follows || chosen[count] >= num_entries)
      refuse("chosen[" + std::to_string(token) + ", " + std::to_string(count) + "] is " +
             std::to_string(chosen[count]) + ", expected ascending entries below " +
             std::to_string(num_entries));
  }
  return count;
}

/// The tokens, those that see the most first, so that no thread ends late.
void list_queries(Call& call, int64_t num_chosen) {
  const AttentionStep& step = call.layout.step;
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence)
    for (int64_t i = 0; i < step.num_tokens(sequence); ++i) {
      Query query{};
      query.sequence = sequence;
      query.token = step.query_start[sequence] + i;
      query.position = step.first_position(sequence) + i;
      query.num_chosen = call.layout.num_entries(query.position + 1);
      if (call.chosen != nullptr)
        query.num_chosen = count_chosen(call, num_chosen, query.token, query.num_chosen);
      query.num_seen = query.position + 1 - call.first_row(query.position) + query.num_chosen;
      call.queries.push_back(query);
    }
  std::stable_sort(call.queries.begin(), call.queries.end(), [](const Query& a, const Query& b) {
    return a.num_seen > b.num_seen;
  });
}

/// What a token attends to in the order of sums: rows from the oldest on, then entries.
void find_seen(const Call& call, const Query& query, std::vector<const void*>& seen) {
  const AttentionStep& step = call.layout.step;
  const int64_t first_new = step.first_position(query.sequence);
  const char* new_rows = call.new_rows + step.query_start[query.sequence] * call.new_row_bytes;
  seen.clear();
  for (int64_t at = call.first_row(query.position); at <= query.position; ++at)
    seen.push_back(at < first_new ? call.row_of(query.sequence, at)
                                  : new_rows + (at - first_new) * call.new_row_bytes);
  const int32_t* chosen =
      call.chosen == nullptr ? nullptr : call.chosen + query.token * call.chosen_stride;
  for (int64_t i = 0; i < query.num_chosen; ++i)
    seen.push_back(call.layout.entry_of(query.sequence, chosen == nullptr ? i : chosen[i]));
}

/// Sums that hold nothing but the sinks, scores that have no value.
void begin_state(const Call& call, int64_t first_head, int64_t num_heads,
                 const AttentionState& state) {
  constexpr float kLog2e = 1.44269504f;
  for (int64_t head = 0; head < padded_rows(num_heads); ++head) {
    state.max[head] = head < num_heads ? call.sinks[first_head + head] * kLog2e : 0.0f;
    state.sum[head] = 1.0f;
  }
  std::fill_n(state.out, num_heads * padded_head_dim(call.shape.rank), 0.0f);
}

void attend_tile(const Call& call, const Rotation& rotation, const Query& query,
                 int64_t first_head) {
  thread_local Scratch memory;
  thread_local std::vector<const void*> seen;
  const LatentShape& shape = call.shape;
  LatentTile tile;
  tile.shape = &shape;
  tile.query = call.query + (query.token * shape.query_stride + first_head * shape.width) *
                                call.query_size;
  tile.out =
      call.out + (query.token * shape.out_stride + first_head * shape.rank) * call.query_size;
  tile.num_tokens = 1;
  tile.num_heads = std::min(call.tile_heads, call.num_heads - first_head);
  const int64_t floats = state_floats(tile.num_heads, shape.rank);
  const int64_t scratch = latent_scratch_floats(shape, tile.num_heads);
  float* data = static_cast<float*>(memory.reserve((floats + scratch) * int64_t{sizeof(float)}));
  const AttentionState state = state_at(data, tile.num_heads);
  begin_state(call, first_head, tile.num_heads, state);
  find_seen(call, query, seen);
  call.kernel.attend_rows(tile, seen.data(), static_cast<int64_t>(seen.size()), state,
                          data + floats);
  for (int64_t head = 0; head < tile.num_heads; ++head)
    rotation.apply(state.out + head * padded_head_dim(shape.rank), query.position, -1.0f);
  call.kernel.store(tile, state);
}

/// The last new tokens of a sequence, after all of them have attended to the rows before.
void keep_rows(const Call& call, int64_t sequence) {
  const AttentionStep& step = call.layout.step;
  const int64_t first = step.first_position(sequence), end = step.context_tokens[sequence];
  const char* new_rows = call.new_rows + step.query_start[sequence] * call.new_row_bytes;
  for (int64_t at = std::max(first, end - call.window); at < end; ++at)
    std::memcpy(call.row_of(sequence, at), new_rows + (at - first) * call.new_row_bytes,
                static_cast<size_t>(call.row_bytes));
}

void check_rows(const TensorView& new_rows, const TensorView& rows, const TensorView& entries) {
  rows.expect_rank("compressed attention: rows", 3);
  const int64_t width = rows.size(2);
  if (width < kHeadDimMultiple || width % kHeadDimMultiple != 0)
    refuse("rows have width " + std::to_string(width) + ", expected a multiple of " +
           std::to_string(kHeadDimMultiple));
  if (rows.size(1) < 1) refuse("slots have no rows");
  if (rows.num_elements() > 0 && rows.size(1) > 1 && rows.stride(1) != width)
    refuse("rows must be contiguous within a slot");
  new_rows.expect("compressed attention: new_rows", rows.dtype(), 2)
      .expect_size("compressed attention: new_rows", 1, width);
  if (entries.dtype() != rows.dtype())
    refuse(std::string("entries have dtype ") + dtype_name(entries.dtype()) + ", rows " +
           dtype_name(rows.dtype()));
}

void check_query(const CompressedInputs& inputs, const TensorView& rows, const TensorView& out) {
  const DType type = inputs.query.dtype(), cache = rows.dtype();
  for (DType dtype : {type, cache})
    if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16)
      refuse(std::string("dtype ") + dtype_name(dtype) +
             " is not supported, expected float32, float16 or bfloat16");
  if (type != cache && type != DType::kFloat32)
    refuse(std::string("query has dtype ") + dtype_name(type) + " and rows " +
           dtype_name(cache) + "; they must be equal, or query float32");
  const int64_t num_tokens = inputs.new_rows.size(0), width = rows.size(2);
  inputs.query.expect_rank("compressed attention: query", 3)
      .expect_size("compressed attention: query", 0, num_tokens)
      .expect_size("compressed attention: query", 2, width);
  const int64_t num_heads = inputs.query.size(1);
  if (num_heads < 1) refuse("query has no heads");
  if (num_tokens > 0 && num_heads > 1 && inputs.query.stride(1) != width)
    refuse("query must be contiguous in its last two dimensions");
  out.expect("compressed attention: out", type, 3).expect_contiguous("compressed attention: out");
  for (int64_t axis = 0; axis < 3; ++axis)
    out.expect_size("compressed attention: out", axis, inputs.query.size(axis));
  inputs.sinks.expect("compressed attention: sinks", DType::kFloat32, 1)
      .expect_size("compressed attention: sinks", 0, num_heads)
      .expect_contiguous("compressed attention: sinks");
  if (inputs.chosen != nullptr)
    inputs.chosen->expect("compressed attention: chosen", DType::kInt32, 2)
        .expect_size("compressed attention: chosen", 0, num_tokens);
}

/// Heads of a tile: fewer where there are few tokens, so that every thread has some. Tiles of one
/// token take equally long, and each of them widens all rows: one for a thread is enough.
int64_t heads_of_tiles(int64_t num_heads, int64_t num_tokens, int num_threads) {
  constexpr int64_t kFewest = 16, kTilesOfThread = 2;
  int64_t count = (num_heads + kLatentHeads - 1) / kLatentHeads;
  const bool are_equal = num_threads == 1 || num_tokens == 1;
  const int64_t wanted = are_equal ? num_threads : kTilesOfThread * num_threads;
  while (num_tokens * count < wanted && num_heads / (2 * count) >= kFewest) count *= 2;
  return (num_heads + count - 1) / count;
}

Call make_call(const CompressedInputs& inputs, const TensorView& rows, const TensorView& entries,
               const CompressedStep& step, int64_t ratio, const TensorView& out) {
  check_rows(inputs.new_rows, rows, entries);
  check_query(inputs, rows, out);
  Call call;
  const int64_t width = rows.size(2), cache_size = element_size(rows.dtype());
  call.layout =
      make_layout(step, entries, inputs.query.size(0), rows.size(0), width, ratio);
  call.shape.width = call.shape.rank = width;
  call.shape.scale_log2e = checked_scale_log2e(inputs.scale);
  call.shape.query_stride = inputs.query.stride(0);
  call.shape.out_stride = out.stride(0);
  call.kernel = latent_kernel()(inputs.query.dtype(), rows.dtype());
  call.num_heads = inputs.query.size(1);
  call.window = rows.size(1);
  call.query = static_cast<const char*>(inputs.query.raw());
  call.new_rows = static_cast<const char*>(inputs.new_rows.raw());
  call.new_row_bytes = inputs.new_rows.stride(0) * cache_size;
  call.rows = static_cast<char*>(rows.raw());
  call.slot_bytes = rows.stride(0) * cache_size;
  call.row_bytes = width * cache_size;
  call.out = static_cast<char*>(out.raw());
  call.query_size = element_size(inputs.query.dtype());
  call.sinks = inputs.sinks.data<float>();
  if (inputs.chosen != nullptr) {
    call.chosen = inputs.chosen->data<int32_t>();
    call.chosen_stride = inputs.chosen->stride(0);
  }
  list_queries(call, inputs.chosen == nullptr ? 0 : inputs.chosen->size(1));
  return call;
}

}  // namespace

void pool_entries(const PoolInputs& inputs, const TensorView& sums, const TensorView& entries,
                  const CompressedStep& step, const RotationTables& tables, int64_t ratio) {
  PoolCall call = make_pool_call(inputs, sums, entries, step, ratio);
  const AttentionStep& sequences = call.layout.step;
  const Rotation rotation(tables, call.width, call.layout.longest());
  int64_t num_entries = 0;
  call.first_entries.push_back(0);
  for (int64_t i = 0; i < sequences.num_sequences; ++i) {
    num_entries += call.layout.num_entries(sequences.context_tokens[i]) -
                   call.layout.num_entries(sequences.first_position(i));
    call.first_entries.push_back(num_entries);
  }
  thread_local Scratch averages;
  call.averages = static_cast<float*>(
      averages.reserve(num_entries * call.width * int64_t{sizeof(float)}));
  const auto pool = worker_pool();
  constexpr int64_t kChannels = 128;  // of a task
  const int64_t num_ranges = (call.width + kChannels - 1) / kChannels;
  pool->for_each(sequences.num_sequences * num_ranges, 1, [&](int, int64_t task) {
    const int64_t begin = task % num_ranges * kChannels;
    if (sequences.num_tokens(task / num_ranges) > 0)
      add_sequence(call, task / num_ranges, begin, std::min(begin + kChannels, call.width));
  });
  pool->for_each(num_entries, 1,
                 [&](int, int64_t average) { finish_entry(call, rotation, average); });
}

void append_and_attend_compressed(const CompressedInputs& inputs, const TensorView& rows,
                                  const TensorView& entries, const CompressedStep& step,
                                  const RotationTables& tables, int64_t ratio,
                                  const TensorView& out) {
  Call call = make_call(inputs, rows, entries, step, ratio, out);
  if (call.queries.empty()) return;
  const Rotation rotation(tables, call.shape.width, call.layout.longest());
  const auto num_queries = static_cast<int64_t>(call.queries.size());
  const auto pool = worker_pool();
  call.tile_heads = heads_of_tiles(call.num_heads, num_queries, pool->num_threads());
  const int64_t num_tiles = call.num_tiles();
  pool->for_each(num_queries * num_tiles, 1, [&](int, int64_t task) {
    attend_tile(call, rotation, call.queries[static_cast<size_t>(task / num_tiles)],
                task % num_tiles * call.tile_heads);
  });
  pool->for_each(call.layout.step.num_sequences, 8,
                 [&](int, int64_t sequence) { keep_rows(call, sequence); });
}

}  // namespace raymoe
