// The attention operation: checks, keys and values to the cache, work for the pool.
#include "raymoe/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "attention_step.h"
#include "raymoe/worker_pool.h"
#include "rotation.h"

namespace raymoe {
namespace {

/// Keys and values of consecutive tokens of one sequence and KV head, to be put into the cache.
struct AppendTask {
  const void* key = nullptr;  // first token
  const void* value = nullptr;
  int64_t key_stride = 0;  // elements between tokens
  int64_t value_stride = 0;
  void* cache = nullptr;  // block 0 of this KV head
  int64_t block_stride = 0;
  const int32_t* block_table = nullptr;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  int64_t first_position = 0;
  int64_t num_tokens = 0;
};

/// Writes the tokens, rounded to nearest even. The rest of a block whose first token is among them
/// becomes zero: masked tokens still meet a probability of zero, and 0 * NaN of a previous owner
/// would be NaN.
using AppendFunction = void (*)(const AppendTask& task);

template <typename C, typename Q>
inline C convert(Q x) {
  return from_float<C>(to_float(x));
}
template <>
inline bf16 convert<bf16, bf16>(bf16 x) {
  return x;
}
template <>
inline fp16 convert<fp16, fp16>(fp16 x) {
  return x;
}

/// Puts numbers into a cache of another type.
template <typename Q, typename C>
class Rounding {
 public:
  Rounding(const Q*, int64_t, float*) {}
  C operator()(Q x) const { return convert<C>(x); }
};

/// Integers from -127 to 127, the largest number one of them, and their common factor. Zero where
/// all are too small to have one; where a number is not finite the factor is NaN.
template <typename Q>
class Rounding<Q, int8_t> {
 public:
  Rounding(const Q* row, int64_t dim, float* scale) {
    constexpr uint32_t kInfinity = 0x7f800000u;
    uint32_t bits = 0;  // of the largest magnitude: they have the order of the numbers, then of NaN
    for (int64_t d = 0; d < dim; ++d) bits = std::max(bits, bits_of(to_float(row[d])) & ~kSign);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_finite = bits < kInfinity;
    const bool is_zero = is_finite && largest < kMax * std::numeric_limits<float>::min();
    *scale = is_zero ? 0 : largest / kMax;
    if (!is_finite) *scale = std::numeric_limits<float>::quiet_NaN();
    inverse_ = is_finite && !is_zero ? kMax / largest : 0;
  }
  int8_t operator()(Q x) const {
    if (inverse_ == 0) return 0;
    // The last bits of the sum are those of the number, rounded to nearest even.
    return static_cast<int8_t>(bits_of(to_float(x) * inverse_ + kWhole));
  }

 private:
  static constexpr float kMax = 127, kWhole = 12582912;  // 1.5 * 2^23
  static constexpr uint32_t kSign = 0x80000000u;

  static uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }

  float inverse_;
};

/// A key before it is rounded to the type of the cache; of int8 until the next on this thread.
template <typename C, typename Q>
const auto* key_to_store(const Q* key, int64_t dim) {
  if constexpr (kIsScaled<C>) {
    thread_local std::vector<float> rotated;
    rotated.resize(static_cast<size_t>(dim));
    for (int64_t d = 0; d < dim; ++d) rotated[static_cast<size_t>(d)] = to_float(key[d]);
    rotate_row(rotated.data(), dim);
    return static_cast<const float*>(rotated.data());
  } else {
    return key;
  }
}

/// Tokens [begin, end) of the task into rows row, row + 1, ... of one block.
template <typename Q, typename C>
void write_block(const AppendTask& task, int64_t begin, int64_t end, int64_t row, C* keys,
                 C* values) {
  constexpr int64_t pair = kPair<C>;
  const int64_t dim = task.head_dim, value_dim = task.value_dim;
  [[maybe_unused]] float* scales = reinterpret_cast<float*>(values + kBlockTokens * value_dim);
  for (int64_t token = begin; token < end; ++token, ++row) {
    const Q* given = static_cast<const Q*>(task.key) + token * task.key_stride;
    const auto* key = key_to_store<C>(given, dim);
    using K = std::remove_const_t<std::remove_pointer_t<decltype(key)>>;
    const Q* value = static_cast<const Q*>(task.value) + token * task.value_stride;
    const Rounding<K, C> key_rounding(key, dim, scales + row);
    const Rounding<Q, C> value_rounding(value, value_dim, scales + kBlockTokens + row);
    C* key_out = keys + row * pair;
    for (int64_t d = 0; d < dim; d += pair)
      for (int64_t p = 0; p < pair; ++p) key_out[d * kBlockTokens + p] = key_rounding(key[d + p]);
    for (int64_t column = 0; column < value_dim; column += kValueColumns) {
      C* value_out = values + value_offset(row, column, value_dim, pair);
      const int64_t end_column = std::min(value_dim, column + kValueColumns);
      for (int64_t d = column; d < end_column; ++d, value_out += pair)
        *value_out = value_rounding(value[d]);
    }
  }
}

template <typename Q, typename C>
void append_tokens(const AppendTask& task) {
  const int64_t key_size = kBlockTokens * task.head_dim;
  const int64_t elements = key_size + kBlockTokens * task.value_dim;
  const int64_t num_bytes = elements * int64_t{sizeof(C)} + (kIsScaled<C> ? kScaleBytes : 0);
  int64_t token = 0;
  while (token < task.num_tokens) {
    const int64_t position = task.first_position + token;
    const int64_t row = position % kBlockTokens;
    const int64_t end = std::min(task.num_tokens, token + kBlockTokens - row);
    C* keys =
        static_cast<C*>(task.cache) + task.block_table[position / kBlockTokens] * task.block_stride;
    if (row == 0 && end - token < kBlockTokens)
      std::memset(static_cast<void*>(keys), 0, static_cast<size_t>(num_bytes));
    write_block<Q, C>(task, token, end, row, keys, keys + key_size);
    token = end;
  }
}

template <typename Q>
AppendFunction append_of(DType cache) {
  switch (cache) {
    case DType::kFloat32:
      return append_tokens<Q, float>;
    case DType::kFloat16:
      return append_tokens<Q, fp16>;
    case DType::kBFloat16:
      return append_tokens<Q, bf16>;
    case DType::kInt8:
      return append_tokens<Q, int8_t>;
    default:
      return nullptr;
  }
}

/// The function for keys of type `query` and a cache of type `cache`; null if unsupported.
AppendFunction append_function(DType query, DType cache) {
  if (query == DType::kFloat32) return append_of<float>(cache);
  if (query != cache && cache != DType::kInt8) return nullptr;
  if (query == DType::kFloat16) return append_of<fp16>(cache);
  if (query == DType::kBFloat16) return append_of<bf16>(cache);
  return nullptr;
}

/// What the workers of one call read.
struct Call {
  AttentionStep step;
  AttentionShape shape;
  AppendTask append;  // what all append tasks share
  AppendFunction append_tokens;
  AttentionKernel kernel;
  const char* query;
  const char* key;
  const char* value;
  char* out;
  char* cache;
  const float* sinks;  // [heads], or null
  int64_t query_size;  // bytes of an element
  int64_t cache_size;

  char* cache_of(int64_t kv_head) const { return cache + kv_head * shape.head_stride * cache_size; }
  const int32_t* table_of(int64_t sequence) const {
    return step.block_table + sequence * step.table_stride;
  }
};

void run_append(const Call& call, int64_t sequence, int64_t kv_head, int64_t first_token,
                int64_t num_tokens) {
  const int64_t token = call.step.query_start[sequence] + first_token;
  AppendTask task = call.append;
  const int64_t key = token * task.key_stride + kv_head * task.head_dim;
  const int64_t value = token * task.value_stride + kv_head * task.value_dim;
  task.key = call.key + key * call.query_size;
  task.value = call.value + value * call.query_size;
  task.cache = call.cache_of(kv_head);
  task.block_table = call.table_of(sequence);
  task.first_position = call.step.first_position(sequence) + first_token;
  task.num_tokens = num_tokens;
  call.append_tokens(task);
}

/// Attention of a call for `run_attention`.
class GroupedAttention {
 public:
  GroupedAttention(const Call& call, const SharedPrefixes& prefixes)
      : call_(call), prefixes_(prefixes) {}

  int64_t head_dim() const { return call_.shape.value_dim; }
  int64_t num_rows(const AttentionItem& item) const { return item.num_tokens * call_.shape.group; }
  int64_t first_split(const AttentionItem& item) const {
    return call_.step.first_visible(first_position(item)) / kSplitTokens;
  }
  int64_t scratch_floats(int64_t rows) const {
    return attention_scratch_floats(rows, call_.shape.head_dim);
  }

  int64_t num_rows(const PrefixTile& tile) const { return tile.num_tokens * call_.shape.group; }

  void attend(const AttentionItem& item, int64_t split, NextSplit next,
              const AttentionState& state, float* scratch) const {
    AttentionTile tile = tile_of(item);
    set_next(next, tile);
    if (split == first_own_split(item) && appends(item))
      run_append(call_, item.sequence, item.kv_head, 0, 1);
    const int64_t num_done = prefixes_.num_blocks(item.sequence);
    BlockRange range = range_in_split(split, num_done, tile.last_position() / kBlockTokens + 1);
    range.first = std::max(range.first, tile.first_visible() / kBlockTokens);
    range.ends = true;
    call_.kernel.attend(tile, range, state, scratch);
  }

  /// What several sequences share.
  void attend(const PrefixTile& part, const int32_t* tokens, const AttentionState& state,
              float* scratch) const {
    const AttentionShape& shape = call_.shape;
    AttentionTile tile;
    tile.shape = &shape;
    tile.query = call_.query + part.kv_head * shape.group * shape.head_dim * call_.query_size;
    tile.tokens = tokens + part.first_token;
    tile.cache = call_.cache_of(part.kv_head);
    tile.block_table = call_.table_of(part.sequence);
    tile.num_tokens = part.num_tokens;
    for (const void*& keys : tile.next_keys)
      keys = call_.cache_of(part.kv_head) +
             tile.block_table[part.blocks.first] * shape.block_stride * call_.cache_size;
    call_.kernel.attend(tile, part.blocks, state, scratch);
  }

  void store(const AttentionItem& item, const AttentionState& state) const {
    const int64_t group = call_.shape.group;
    if (call_.sinks != nullptr)
      add_sinks(call_.sinks + item.kv_head * group, group, num_rows(item), state);
    call_.kernel.store(tile_of(item), state);
  }

 private:
  int64_t first_position(const AttentionItem& item) const {
    return call_.step.first_position(item.sequence) + item.first_token;
  }
  int64_t last_position(const AttentionItem& item) const {
    return first_position(item) + item.num_tokens - 1;
  }
  const void* keys_of(const AttentionItem& item, int64_t block) const {
    return call_.cache_of(item.kv_head) +
           call_.table_of(item.sequence)[block] * call_.shape.block_stride * call_.cache_size;
  }

  /// Whether the token of a sequence that has only one goes to the cache within this item.
  bool appends(const AttentionItem& item) const {
    return call_.step.num_tokens(item.sequence) == 1 &&
           item.last_split == last_position(item) / kSplitTokens;
  }

  AttentionTile tile_of(const AttentionItem& item) const {
    const AttentionShape& shape = call_.shape;
    const int64_t token = call_.step.query_start[item.sequence] + item.first_token;
    const int64_t head = item.kv_head * shape.group;
    AttentionTile tile;
    tile.shape = &shape;
    tile.query = call_.query + (token * shape.query_stride + head * shape.head_dim) * call_.query_size;
    tile.out = call_.out + (token * shape.out_stride + head * shape.value_dim) * call_.query_size;
    tile.cache = call_.cache_of(item.kv_head);
    tile.block_table = call_.table_of(item.sequence);
    tile.first_position = first_position(item);
    tile.num_tokens = item.num_tokens;
    return tile;
  }

  /// The first split that is not wholly shared with others.
  int64_t first_own_split(const AttentionItem& item) const {
    return std::max(item.first_split, prefixes_.num_blocks(item.sequence) / kSplitBlocks);
  }

  /// Tells the tile what its thread reads next.
  void set_next(NextSplit next, AttentionTile& tile) const {
    const int64_t visible = call_.step.first_visible(first_position(next.item));
    const int64_t first = std::max({visible, next.split * kSplitTokens,
                                    prefixes_.num_blocks(next.item.sequence) * kBlockTokens});
    const int64_t last_block = last_position(next.item) / kBlockTokens;
    for (int64_t i = 0; i < kChunkBlocks; ++i)
      tile.next_keys[i] = keys_of(next.item, std::min(first / kBlockTokens + i, last_block));
    const bool is_append = next.split <= first_own_split(next.item) && appends(next.item);
    tile.next_append = is_append ? keys_of(next.item, last_block) : nullptr;
  }

  const Call& call_;
  const SharedPrefixes& prefixes_;
};

void run_call(const Call& call) {
  thread_local AttentionPlan plan;
  const auto pool = worker_pool();
  plan.build(call.step, pool->num_threads());
  // The lambda runs on other threads: a thread_local name would be theirs, so bind a reference.
  const std::vector<AppendItem>& appends = plan.appends();
  pool->for_each(static_cast<int64_t>(appends.size()), 1, [&](int, int64_t index) {
    const AppendItem& item = appends[static_cast<size_t>(index)];
    run_append(call, item.sequence, item.kv_head, item.first_token, item.num_tokens);
  });
  const GroupedAttention operation(call, plan.prefixes());
  run_prefixes(plan.prefixes(), *pool, operation);
  run_attention(plan, *pool, operation);
}

/// [T, heads, `dim`] with both inner dimensions contiguous.
void check_tokens(const TensorView& tensor, const char* name, const TensorView& query,
                  int64_t dim) {
  const std::string what = std::string("attention: ") + name;
  tensor.expect(what.c_str(), query.dtype(), 3);
  tensor.expect_size(what.c_str(), 0, query.size(0)).expect_size(what.c_str(), 2, dim);
  if (dim < kHeadDimMultiple || dim % kHeadDimMultiple != 0)
    refuse_attention(std::string(name) + " has head_dim " + std::to_string(dim) +
                     ", expected a multiple of " + std::to_string(kHeadDimMultiple));
  if (tensor.num_elements() > 0 && tensor.size(1) > 1 && tensor.stride(1) != tensor.size(2))
    refuse_attention(std::string(name) + " must be contiguous in its last two dimensions");
}

void check_query_and_cache(const TensorView& query, const TensorView& key, const TensorView& value,
                           const TensorView& cache) {
  query.expect_rank("attention: query", 3);
  value.expect_rank("attention: value", 3);
  const int64_t dim = query.size(2), value_dim = value.size(2);
  check_tokens(query, "query", query, dim);
  check_tokens(key, "key", query, dim);
  check_tokens(value, "value", query, value_dim);
  const int64_t kv_heads = key.size(1);
  const int64_t scales = cache.dtype() == DType::kInt8 ? kScaleBytes : 0;
  const int64_t block_size = kBlockTokens * (dim + value_dim) + scales;
  value.expect_size("attention: value", 1, kv_heads);
  if (kv_heads < 1 || query.size(1) < 1 || query.size(1) % kv_heads != 0)
    refuse_attention("query has " + std::to_string(query.size(1)) +
                     " heads, not a multiple of key's " + std::to_string(kv_heads));
  cache.expect_rank("attention: cache", 3);
  if (append_function(query.dtype(), cache.dtype()) == nullptr)
    refuse_attention(std::string("query has dtype ") + dtype_name(query.dtype()) + " and cache " +
                     dtype_name(cache.dtype()) +
                     "; they must be equal, or query float32, or the cache int8");
  cache.expect_size("attention: cache", 1, kv_heads);
  cache.expect_size("attention: cache", 2, block_size);
  if (cache.num_elements() > 0 && (cache.stride(2) != 1 || cache.stride(1) != block_size))
    refuse_attention("cache must be contiguous within a block");
}

void check_out(const TensorView& query, const TensorView& value, const TensorView& out) {
  out.expect("attention: out", query.dtype(), 2).expect_contiguous("attention: out");
  out.expect_size("attention: out", 0, query.size(0));
  out.expect_size("attention: out", 1, query.size(1) * value.size(2));
}

int64_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2;
}

void set_memory(Call& call, const TensorView& query, const TensorView& key,
                const TensorView& value, const TensorView& cache) {
  call.shape.head_dim = query.size(2);
  call.shape.value_dim = value.size(2);
  call.shape.group = call.step.group;
  call.shape.query_stride = query.stride(0);
  call.shape.block_stride = cache.stride(0);
  call.shape.head_stride = cache.size(2);
  call.append.key_stride = key.stride(0);
  call.append.value_stride = value.stride(0);
  call.append.block_stride = cache.stride(0);
  call.append.head_dim = call.shape.head_dim;
  call.append.value_dim = call.shape.value_dim;
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
                       const TensorView& out, double scale, int64_t sliding_window,
                       const TensorView* sinks) {
  check_query_and_cache(query, key, value, cache);
  check_out(query, value, out);
  if (sinks != nullptr)
    sinks->expect("attention: sinks", DType::kFloat32, 1)
        .expect_size("attention: sinks", 0, query.size(1))
        .expect_contiguous("attention: sinks");
  if (sliding_window < 1)
    refuse_attention("sliding_window is " + std::to_string(sliding_window) +
                     ", expected 1 or more");
  Call call{};
  call.step = make_step(query_start, context_tokens, block_table);
  call.step.num_kv_heads = key.size(1);
  call.step.group = query.size(1) / key.size(1);
  call.step.window = sliding_window;
  check_step(call.step, query.size(0), block_table.size(1), cache.size(0));
  if (query.size(0) == 0) return;
  call.shape.window = call.step.window;
  call.shape.scale_log2e = checked_scale_log2e(scale);
  set_memory(call, query, key, value, cache);
  call.shape.out_stride = out.size(1);
  call.kernel = attention_kernel()(query.dtype(), cache.dtype());
  call.out = static_cast<char*>(out.raw());
  call.sinks = sinks == nullptr ? nullptr : sinks->data<float>();
  run_call(call);
}

void append(const TensorView& key, const TensorView& value, const TensorView& cache,
            const TensorView& query_start, const TensorView& context_tokens,
            const TensorView& block_table) {
  check_query_and_cache(key, key, value, cache);
  Call call{};
  call.step = make_step(query_start, context_tokens, block_table);
  call.step.num_kv_heads = key.size(1);
  call.step.group = 1;
  call.step.window = std::numeric_limits<int64_t>::max();
  check_step(call.step, key.size(0), block_table.size(1), cache.size(0));
  set_memory(call, key, key, value, cache);
  const int64_t heads = key.size(1);
  worker_pool()->for_each(call.step.num_sequences * heads, 1, [&](int, int64_t index) {
    const int64_t sequence = index / heads;
    run_append(call, sequence, index % heads, 0, call.step.num_tokens(sequence));
  });
}

}  // namespace raymoe
