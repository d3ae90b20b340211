// The attention operation: checks, choice of the kernel, work for the pool.
#include "raymoe/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "attention_plan.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

/// 64-byte aligned floats that grow and stay with their thread.
class Scratch {
 public:
  float* reserve(int64_t floats) {
    if (floats > size_) {
      const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
      data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      size_ = data_ == nullptr ? 0 : floats;
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

int64_t state_floats(int64_t rows, int64_t head_dim) {
  return 2 * padded_rows(rows) + rows * padded_head_dim(head_dim);
}

AttentionState state_at(float* data, int64_t rows) {
  return {data, data + padded_rows(rows), data + 2 * padded_rows(rows)};
}

/// Everything that the workers of one call read.
struct Call {
  AttentionPass pass;
  AttentionShape shape;
  AppendTask append;  // what all append tasks share
  AppendFunction append_tokens;
  AttentionKernel kernel;
  const char* query;
  const char* key;
  const char* value;
  char* out;
  char* cache;
  int64_t query_size;  // bytes of an element
  int64_t cache_size;
  float* parts;  // states of the splits of shared tiles
  int64_t part_floats;
  std::atomic<int64_t>* unfinished;  // splits of each shared tile

  char* cache_of(int64_t kv_head) const { return cache + kv_head * shape.head_stride * cache_size; }
  const int32_t* table_of(int64_t sequence) const {
    return pass.block_table + sequence * pass.table_stride;
  }
};

void run_append(const Call& call, int64_t sequence, int64_t kv_head, int64_t first_token,
                int64_t num_tokens) {
  const int64_t token = call.pass.query_start[sequence] + first_token;
  const int64_t head_offset = kv_head * call.shape.head_dim;
  AppendTask task = call.append;
  task.key = call.key + (token * task.key_stride + head_offset) * call.query_size;
  task.value = call.value + (token * task.value_stride + head_offset) * call.query_size;
  task.cache = call.cache_of(kv_head);
  task.block_table = call.table_of(sequence);
  task.first_position = call.pass.first_position(sequence) + first_token;
  task.num_tokens = num_tokens;
  call.append_tokens(task);
}

AttentionTile tile_of(const Call& call, const AttentionItem& item) {
  const int64_t token = call.pass.query_start[item.sequence] + item.first_token;
  const int64_t head_offset = item.kv_head * call.shape.group * call.shape.head_dim;
  AttentionTile tile;
  tile.shape = &call.shape;
  tile.query = call.query + (token * call.shape.query_stride + head_offset) * call.query_size;
  tile.out = call.out + (token * call.shape.out_stride + head_offset) * call.query_size;
  tile.cache = call.cache_of(item.kv_head);
  tile.block_table = call.table_of(item.sequence);
  tile.first_position = call.pass.first_position(item.sequence) + item.first_token;
  tile.num_tokens = item.num_tokens;
  return tile;
}

/// One split of a shared tile; whoever ends the last one merges them all, in order.
void run_part(const Call& call, const AttentionItem& item, const AttentionTile& tile,
              float* scratch) {
  const int64_t rows = tile.num_rows();
  const auto part_state = [&](int64_t part) {
    return state_at(call.parts + part * call.part_floats, rows);
  };
  call.kernel.attend(tile, item.first_split, part_state(item.part), scratch);
  if (call.unfinished[item.shared].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const int64_t first = item.part - (item.first_split - tile.first_visible() / kSplitTokens);
  for (int64_t part = first + 1; part < first + item.num_parts; ++part)
    merge_attention(part_state(first), part_state(part), rows, call.shape.head_dim);
  call.kernel.store(tile, part_state(first));
}

const void* keys_of(const Call& call, const AttentionItem& item, int64_t block) {
  return call.cache_of(item.kv_head) +
         call.table_of(item.sequence)[block] * call.shape.block_stride * call.cache_size;
}

int64_t last_position(const Call& call, const AttentionItem& item) {
  return call.pass.first_position(item.sequence) + item.first_token + item.num_tokens - 1;
}

/// Whether the token of a sequence that has only one goes to the cache within this item.
bool is_append(const Call& call, const AttentionItem& item) {
  return call.pass.num_tokens(item.sequence) == 1 &&
         item.last_split == last_position(call, item) / kSplitTokens;
}

/// After its split, the tile's thread goes on to `split` of `item`.
void set_next(const Call& call, const AttentionItem& item, int64_t split, AttentionTile& tile) {
  const int64_t position = call.pass.first_position(item.sequence) + item.first_token;
  const int64_t first = std::max(call.pass.first_visible(position), split * kSplitTokens);
  const int64_t last_block = last_position(call, item) / kBlockTokens;
  for (int64_t i = 0; i < kStepBlocks; ++i)
    tile.next_keys[i] = keys_of(call, item, std::min(first / kBlockTokens + i, last_block));
  const bool appends = split == item.first_split && is_append(call, item);
  tile.next_append = appends ? keys_of(call, item, last_block) : nullptr;
}

void run_item(const Call& call, const AttentionItem& item, const AttentionItem& next) {
  thread_local Scratch memory;
  const int64_t dim = call.shape.head_dim;
  AttentionTile tile = tile_of(call, item);
  const auto prefetch_after = [&](int64_t split) {
    if (split < item.last_split)
      set_next(call, item, split + 1, tile);
    else
      set_next(call, next, next.first_split, tile);
  };
  prefetch_after(item.first_split);
  const int64_t rows = tile.num_rows();
  const int64_t state_size = (state_floats(rows, dim) + 15) / 16 * 16;
  float* data = memory.reserve(2 * state_size + attention_scratch_floats(rows, dim));
  float* scratch = data + 2 * state_size;
  if (is_append(call, item)) run_append(call, item.sequence, item.kv_head, 0, 1);
  if (item.part >= 0) return run_part(call, item, tile, scratch);
  const AttentionState total = state_at(data, rows);
  const AttentionState part = state_at(data + state_size, rows);
  call.kernel.attend(tile, item.first_split, total, scratch);
  for (int64_t split = item.first_split + 1; split <= item.last_split; ++split) {
    prefetch_after(split);
    call.kernel.attend(tile, split, part, scratch);
    merge_attention(total, part, rows, dim);
  }
  call.kernel.store(tile, total);
}

void run_call(Call& call) {
  thread_local AttentionPlan plan;
  thread_local Scratch parts;
  thread_local std::unique_ptr<std::atomic<int64_t>[]> unfinished;
  thread_local int64_t unfinished_size = 0;
  const auto pool = worker_pool();
  plan.build(call.pass, pool->num_threads());
  if (plan.num_shared() > unfinished_size) {
    unfinished.reset(new std::atomic<int64_t>[static_cast<size_t>(plan.num_shared())]);
    unfinished_size = plan.num_shared();
  }
  for (const AttentionItem& item : plan.items())
    if (item.shared >= 0) unfinished[static_cast<size_t>(item.shared)] = item.num_parts;
  call.unfinished = unfinished.get();
  call.part_floats = (state_floats(plan.max_rows(), call.shape.head_dim) + 15) / 16 * 16;
  call.parts = parts.reserve(plan.num_parts() * call.part_floats);
  // The lambdas run on other threads: thread_local names would be theirs, so bind references.
  const std::vector<AppendItem>& appends = plan.appends();
  const std::vector<AttentionItem>& items = plan.items();
  pool->for_each(static_cast<int64_t>(appends.size()), 1, [&](int, int64_t index) {
    const AppendItem& item = appends[static_cast<size_t>(index)];
    run_append(call, item.sequence, item.kv_head, item.first_token, item.num_tokens);
  });
  // Each thread claims an item before it works on the last one it claimed, so that it can prefetch.
  const auto num_items = static_cast<int64_t>(items.size());
  std::atomic<int64_t> unclaimed{0};
  pool->run([&](int) {
    int64_t index = unclaimed.fetch_add(1, std::memory_order_relaxed);
    while (index < num_items) {
      const int64_t next = unclaimed.fetch_add(1, std::memory_order_relaxed);
      run_item(call, items[static_cast<size_t>(index)],
               items[static_cast<size_t>(std::min(next, num_items - 1))]);
      index = next;
    }
  });
}

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("attention: " + message);
}

/// [T, heads, D] with both inner dimensions contiguous.
void check_tokens(const TensorView& tensor, const char* name, const TensorView& query) {
  const std::string what = std::string("attention: ") + name;
  tensor.expect(what.c_str(), query.dtype(), 3);
  for (int64_t axis : {0, 2}) tensor.expect_size(what.c_str(), axis, query.size(axis));
  if (tensor.num_elements() > 0 && tensor.size(1) > 1 && tensor.stride(1) != tensor.size(2))
    refuse(std::string(name) + " must be contiguous in its last two dimensions");
}

void check_query_and_cache(const TensorView& query, const TensorView& key, const TensorView& value,
                           const TensorView& cache) {
  query.expect_rank("attention: query", 3);
  check_tokens(query, "query", query);
  check_tokens(key, "key", query);
  check_tokens(value, "value", query);
  const int64_t kv_heads = key.size(1), dim = query.size(2);
  value.expect_size("attention: value", 1, kv_heads);
  if (kv_heads < 1 || query.size(1) < 1 || query.size(1) % kv_heads != 0)
    refuse("query has " + std::to_string(query.size(1)) + " heads, not a multiple of key's " +
           std::to_string(kv_heads));
  if (dim < 8 || dim % 8 != 0)
    refuse("query has head_dim " + std::to_string(dim) + ", expected a multiple of 8");
  cache.expect_rank("attention: cache", 4);
  if (append_function(query.dtype(), cache.dtype()) == nullptr)
    refuse(std::string("query has dtype ") + dtype_name(query.dtype()) + " and cache " +
           dtype_name(cache.dtype()) + "; they must be equal, or query float32");
  cache.expect_size("attention: cache", 1, kv_heads);
  cache.expect_size("attention: cache", 2, 2);
  cache.expect_size("attention: cache", 3, kBlockTokens * dim);
  if (cache.num_elements() > 0 &&
      (cache.stride(2) != kBlockTokens * dim || cache.stride(1) != 2 * kBlockTokens * dim))
    refuse("cache must be contiguous within a block");
}

void check_out(const TensorView& query, const TensorView& out) {
  out.expect("attention: out", query.dtype(), 2).expect_contiguous("attention: out");
  out.expect_size("attention: out", 0, query.size(0));
  out.expect_size("attention: out", 1, query.size(1) * query.size(2));
}

void check_blocks(const AttentionPass& pass, int64_t sequence, int64_t table_width,
                  int64_t num_blocks) {
  const int64_t first = pass.first_visible(pass.first_position(sequence)) / kBlockTokens;
  const int64_t end = (pass.context_tokens[sequence] + kBlockTokens - 1) / kBlockTokens;
  if (end > table_width)
    refuse("sequence " + std::to_string(sequence) + " has " +
           std::to_string(pass.context_tokens[sequence]) +
           " context_tokens, block_table room for " + std::to_string(table_width * kBlockTokens));
  const int32_t* table = pass.block_table + sequence * pass.table_stride;
  for (int64_t i = first; i < end; ++i)
    if (table[i] < 0 || table[i] >= num_blocks)
      refuse("block_table[" + std::to_string(sequence) + ", " + std::to_string(i) + "] is " +
             std::to_string(table[i]) + ", the cache has " + std::to_string(num_blocks) +
             " blocks");
}

void check_pass(const AttentionPass& pass, int64_t num_tokens, int64_t table_width,
                int64_t num_blocks) {
  if (pass.query_start[0] != 0 || pass.query_start[pass.num_sequences] != num_tokens)
    refuse("query_start runs from " + std::to_string(pass.query_start[0]) + " to " +
           std::to_string(pass.query_start[pass.num_sequences]) + ", expected 0 to " +
           std::to_string(num_tokens));
  for (int64_t sequence = 0; sequence < pass.num_sequences; ++sequence) {
    const int64_t count = pass.num_tokens(sequence);
    if (count < 0) refuse("query_start falls after entry " + std::to_string(sequence));
    if (count > pass.context_tokens[sequence])
      refuse("sequence " + std::to_string(sequence) + " has " + std::to_string(count) +
             " tokens in the pass but " + std::to_string(pass.context_tokens[sequence]) +
             " context_tokens");
    if (count > 0) check_blocks(pass, sequence, table_width, num_blocks);
  }
}

AttentionPass make_pass(const TensorView& query_start, const TensorView& context_tokens,
                        const TensorView& block_table) {
  context_tokens.expect("attention: context_tokens", DType::kInt32, 1);
  query_start.expect("attention: query_start", DType::kInt32, 1);
  block_table.expect("attention: block_table", DType::kInt32, 2);
  const int64_t count = context_tokens.size(0);
  query_start.expect_size("attention: query_start", 0, count + 1);
  block_table.expect_size("attention: block_table", 0, count);
  AttentionPass pass;
  pass.query_start = query_start.data<int32_t>();
  pass.context_tokens = context_tokens.data<int32_t>();
  pass.block_table = block_table.data<int32_t>();
  pass.table_stride = block_table.stride(0);
  pass.num_sequences = count;
  return pass;
}

AttentionKernel choose_kernel(DType query, DType cache) {
#if defined(RAYMOE_X86_KERNELS)
  switch (active_isa()) {
    case Isa::kAvx2:
      return attention_kernel_avx2(query, cache);
    case Isa::kAvx512:
      return attention_kernel_avx512(query, cache);
    case Isa::kAvx512Bf16:
      return attention_kernel_avx512_bf16(query, cache);
    case Isa::kScalar:
      break;
  }
#endif
  return attention_kernel_scalar(query, cache);
}

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Addresses, strides and types of a call.
void set_memory(Call& call, const TensorView& query, const TensorView& key,
                const TensorView& value, const TensorView& cache) {
  const int64_t dim = query.size(2);
  call.shape.head_dim = dim;
  call.shape.group = call.pass.group;
  call.shape.query_stride = query.stride(0);
  call.shape.block_stride = cache.stride(0);
  call.shape.head_stride = 2 * kBlockTokens * dim;
  call.append.key_stride = key.stride(0);
  call.append.value_stride = value.stride(0);
  call.append.block_stride = cache.stride(0);
  call.append.head_stride = call.shape.head_stride;
  call.append.head_dim = dim;
  call.append_tokens = append_function(query.dtype(), cache.dtype());
  call.query = static_cast<const char*>(query.raw());
  call.key = static_cast<const char*>(key.raw());
  call.value = static_cast<const char*>(value.raw());
  call.cache = static_cast<char*>(cache.raw());
  call.query_size = element_size(query.dtype());
  call.cache_size = element_size(cache.dtype());
}

}  // namespace

void merge_attention(const AttentionState& total, const AttentionState& part, int64_t rows,
                     int64_t head_dim) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const int64_t padded = padded_head_dim(head_dim);
  for (int64_t row = 0; row < rows; ++row) {
    if (part.max[row] == kNothing && part.sum[row] == 0) continue;  // out of this row's window
    const float max = std::max(total.max[row], part.max[row]);
    const float reference = max == kNothing ? 0 : max;
    const float old_factor = std::exp2(total.max[row] - reference);
    const float factor = std::exp2(part.max[row] - reference);
    total.max[row] = max;
    total.sum[row] = total.sum[row] * old_factor + part.sum[row] * factor;
    float* out = total.out + row * padded;
    const float* added = part.out + row * padded;
    for (int64_t d = 0; d < head_dim; ++d) out[d] = out[d] * old_factor + added[d] * factor;
  }
}

void append_and_attend(const TensorView& query, const TensorView& key, const TensorView& value,
                       const TensorView& cache, const TensorView& query_start,
                       const TensorView& context_tokens, const TensorView& block_table,
                       const TensorView& out, double scale, int64_t sliding_window) {
  check_query_and_cache(query, key, value, cache);
  check_out(query, out);
  if (!(scale > 0) || !std::isfinite(scale))
    refuse("scale is " + std::to_string(scale) + ", expected a positive number");
  if (sliding_window < 1)
    refuse("sliding_window is " + std::to_string(sliding_window) + ", expected 1 or more");
  Call call{};
  call.pass = make_pass(query_start, context_tokens, block_table);
  call.pass.num_kv_heads = key.size(1);
  call.pass.group = query.size(1) / key.size(1);
  call.pass.window = sliding_window;
  check_pass(call.pass, query.size(0), block_table.size(1), cache.size(0));
  if (query.size(0) == 0) return;
  constexpr double kLog2E = 1.4426950408889634;
  call.shape.window = call.pass.window;
  call.shape.scale_log2e = static_cast<float>(scale * kLog2E);
  set_memory(call, query, key, value, cache);
  call.shape.out_stride = query.size(1) * query.size(2);
  call.kernel = choose_kernel(query.dtype(), cache.dtype());
  call.out = static_cast<char*>(out.raw());
  run_call(call);
}

void append(const TensorView& key, const TensorView& value, const TensorView& cache,
            const TensorView& query_start, const TensorView& context_tokens,
            const TensorView& block_table) {
  check_query_and_cache(key, key, value, cache);
  Call call{};
  call.pass = make_pass(query_start, context_tokens, block_table);
  call.pass.num_kv_heads = key.size(1);
  call.pass.group = 1;
  call.pass.window = std::numeric_limits<int64_t>::max();
  check_pass(call.pass, key.size(0), block_table.size(1), cache.size(0));
  set_memory(call, key, key, value, cache);
  const int64_t heads = key.size(1);
  worker_pool()->for_each(call.pass.num_sequences * heads, 1, [&](int, int64_t index) {
    const int64_t sequence = index / heads;
    run_append(call, sequence, index % heads, 0, call.pass.num_tokens(sequence));
  });
}

}  // namespace raymoe
