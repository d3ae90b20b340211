// The latent attention operation: checks, rows to the cache, work for the pool.
#include "raymoe/latent_attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "attention_step.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Writes consecutive rows, rounded to nearest even.
using Convert = void (*)(const void* from, void* to, int64_t elements);

template <typename Q, typename C>
void convert(const void* from, void* to, int64_t elements) {
  const Q* source = static_cast<const Q*>(from);
  C* target = static_cast<C*>(to);
  for (int64_t i = 0; i < elements; ++i) target[i] = from_float<C>(to_float(source[i]));
}

template <typename T>
void copy(const void* from, void* to, int64_t elements) {
  std::memcpy(to, from, static_cast<size_t>(elements) * sizeof(T));
}

/// The conversion from rows of type `latent` to a cache of type `cache`; null if unsupported.
Convert conversion(DType latent, DType cache) {
  if (latent == cache) return latent == DType::kFloat32 ? copy<float> : copy<bf16>;
  if (latent != DType::kFloat32) return nullptr;
  if (cache == DType::kFloat16) return convert<float, fp16>;
  if (cache == DType::kBFloat16) return convert<float, bf16>;
  return nullptr;
}

/// What the workers of one call read.
struct Call {
  AttentionStep step;
  LatentShape shape;
  LatentKernel kernel;
  Convert convert;
  int64_t num_heads;
  const char* query;
  const char* latent;
  int64_t latent_stride;
  char* out;
  char* cache;
  const float* sinks;  // [heads], or null
  int64_t query_size;  // bytes of an element
  int64_t cache_size;

  const int32_t* table_of(int64_t sequence) const {
    return step.block_table + sequence * step.table_stride;
  }
  char* block_of(int64_t sequence, int64_t position) const {
    return cache + table_of(sequence)[position / kBlockTokens] * shape.block_stride * cache_size;
  }
};

void run_append(const Call& call, int64_t sequence) {
  const int64_t begin = call.step.query_start[sequence];
  const int64_t first = call.step.first_position(sequence), width = call.shape.width;
  for (int64_t i = 0; i < call.step.num_tokens(sequence); ++i) {
    const int64_t row = (first + i) % kBlockTokens;
    call.convert(call.latent + (begin + i) * call.latent_stride * call.query_size,
                 call.block_of(sequence, first + i) + row * width * call.cache_size, width);
  }
}

void append_all(const Call& call, WorkerPool& pool) {
  pool.for_each(call.step.num_sequences, 8,
                [&](int, int64_t sequence) { run_append(call, sequence); });
}

/// Attention of a call for `run_attention`. A KV head of the plan is a range of heads.
class LatentAttention {
 public:
  LatentAttention(const Call& call, const SharedPrefixes& prefixes)
      : call_(call), prefixes_(prefixes) {}

  int64_t head_dim() const { return call_.shape.rank; }
  int64_t num_rows(const AttentionItem& item) const { return tile_of(item).num_rows(); }
  int64_t first_split(const AttentionItem&) const { return 0; }
  int64_t scratch_floats(int64_t rows) const { return latent_scratch_floats(call_.shape, rows); }

  /// Of a step that shares: tiles of several tokens have all heads.
  int64_t num_rows(const PrefixTile& tile) const { return tile.num_tokens * call_.num_heads; }

  void attend(const AttentionItem& item, int64_t split, NextSplit next,
              const AttentionState& state, float* scratch) const {
    LatentTile tile = tile_of(item);
    const int64_t last = tile_of(next.item).last_position();
    const int64_t num_done = prefixes_.num_blocks(next.item.sequence) * kBlockTokens;
    const int64_t first = std::max(next.split * kSplitTokens, num_done);
    for (int64_t i = 0; i < kChunkBlocks; ++i)
      tile.next_blocks[i] =
          call_.block_of(next.item.sequence, std::min(first + i * kBlockTokens, last));
    const BlockRange range = range_in_split(split, prefixes_.num_blocks(item.sequence),
                                            tile.last_position() / kBlockTokens + 1);
    call_.kernel.attend(tile, range, state, scratch);
  }

  /// What several sequences share.
  void attend(const PrefixTile& part, const int32_t* tokens, const AttentionState& state,
              float* scratch) const {
    LatentTile tile;
    tile.shape = &call_.shape;
    tile.query = call_.query;
    tile.tokens = tokens + part.first_token;
    tile.cache = call_.cache;
    tile.block_table = call_.table_of(part.sequence);
    tile.num_tokens = part.num_tokens;
    tile.num_heads = call_.num_heads;
    for (const void*& block : tile.next_blocks)
      block = call_.block_of(part.sequence, part.blocks.first * kBlockTokens);
    call_.kernel.attend(tile, part.blocks, state, scratch);
  }

  void store(const AttentionItem& item, const AttentionState& state) const {
    const LatentTile tile = tile_of(item);
    if (call_.sinks != nullptr)
      add_sinks(call_.sinks + item.kv_head * call_.step.group, tile.num_heads, tile.num_rows(),
                state);
    call_.kernel.store(tile, state);
  }

 private:
  LatentTile tile_of(const AttentionItem& item) const {
    const LatentShape& shape = call_.shape;
    const int64_t token = call_.step.query_start[item.sequence] + item.first_token;
    const int64_t head = item.kv_head * call_.step.group;
    LatentTile tile;
    tile.shape = &shape;
    tile.query =
        call_.query + (token * shape.query_stride + head * shape.width) * call_.query_size;
    tile.out = call_.out + (token * shape.out_stride + head * shape.rank) * call_.query_size;
    tile.cache = call_.cache;
    tile.block_table = call_.table_of(item.sequence);
    tile.first_position = call_.step.first_position(item.sequence) + item.first_token;
    tile.num_tokens = item.num_tokens;
    tile.num_heads = std::min(call_.step.group, call_.num_heads - head);
    return tile;
  }

  const Call& call_;
  const SharedPrefixes& prefixes_;
};

void check_latent_and_cache(const TensorView& latent, const TensorView& cache) {
  latent.expect_rank("attention: latent", 2);
  const int64_t width = latent.size(1);
  if (width < kHeadDimMultiple || width % kHeadDimMultiple != 0)
    refuse_attention("latent has width " + std::to_string(width) + ", expected a multiple of " +
                     std::to_string(kHeadDimMultiple));
  cache.expect_rank("attention: cache", 3);
  if (conversion(latent.dtype(), cache.dtype()) == nullptr)
    refuse_attention(std::string("latent has dtype ") + dtype_name(latent.dtype()) +
                     " and cache " + dtype_name(cache.dtype()) +
                     "; they must be equal, or latent float32");
  cache.expect_size("attention: cache", 1, kBlockTokens);
  cache.expect_size("attention: cache", 2, width);
  if (cache.num_elements() > 0 && cache.stride(1) != width)
    refuse_attention("cache must be contiguous within a block");
}

void check_query_and_out(const TensorView& query, const TensorView& latent, const TensorView& out) {
  const int64_t num_tokens = latent.size(0), width = latent.size(1);
  query.expect("attention: query", latent.dtype(), 3);
  query.expect_size("attention: query", 0, num_tokens).expect_size("attention: query", 2, width);
  const int64_t num_heads = query.size(1);
  if (num_heads < 1) refuse_attention("query has no heads");
  if (query.num_elements() > 0 && num_heads > 1 && query.stride(1) != width)
    refuse_attention("query must be contiguous in its last two dimensions");
  out.expect("attention: out", latent.dtype(), 3).expect_contiguous("attention: out");
  out.expect_size("attention: out", 0, num_tokens).expect_size("attention: out", 1, num_heads);
  const int64_t rank = out.size(2);
  if (rank < kHeadDimMultiple || rank % kHeadDimMultiple != 0 || rank > width)
    refuse_attention("out has rank " + std::to_string(rank) + ", expected a multiple of " +
                     std::to_string(kHeadDimMultiple) + " up to " + std::to_string(width));
}

/// The arrays of a call that appends.
Call make_call(const TensorView& latent, const TensorView& cache, const TensorView& query_start,
               const TensorView& context_tokens, const TensorView& block_table) {
  check_latent_and_cache(latent, cache);
  Call call{};
  call.step = make_step(query_start, context_tokens, block_table);
  call.step.num_kv_heads = call.step.group = 1;
  call.step.window = std::numeric_limits<int64_t>::max();
  check_step(call.step, latent.size(0), block_table.size(1), cache.size(0));
  call.shape.width = latent.size(1);
  call.shape.block_stride = cache.stride(0);
  call.convert = conversion(latent.dtype(), cache.dtype());
  call.latent = static_cast<const char*>(latent.raw());
  call.latent_stride = latent.stride(0);
  call.cache = static_cast<char*>(cache.raw());
  call.query_size = element_size(latent.dtype());
  call.cache_size = element_size(cache.dtype());
  return call;
}

}  // namespace

int64_t latent_scratch_floats(const LatentShape& shape, int64_t rows) {
  constexpr int64_t kSlack = 64;  // between the parts, and where the last row is read beyond
  const int64_t padded = padded_rows(rows);
  const int64_t widest = std::max(shape.width, padded_head_dim(shape.rank));
  return padded * (3 + 2 * kChunkTokens + shape.width) + kChunkTokens * (widest + kRowPadding) +
         4 * kSlack;
}

void append_and_attend_latent(const TensorView& query, const TensorView& latent,
                              const TensorView& cache, const TensorView& query_start,
                              const TensorView& context_tokens, const TensorView& block_table,
                              const TensorView& out, double scale, const TensorView* sinks) {
  thread_local AttentionPlan plan;
  Call call = make_call(latent, cache, query_start, context_tokens, block_table);
  check_query_and_out(query, latent, out);
  if (sinks != nullptr)
    sinks->expect("attention: sinks", DType::kFloat32, 1)
        .expect_size("attention: sinks", 0, query.size(1))
        .expect_contiguous("attention: sinks");
  call.shape.scale_log2e = checked_scale_log2e(scale);
  if (query.size(0) == 0) return;
  call.num_heads = query.size(1);
  call.step.num_kv_heads = (call.num_heads + kLatentHeads - 1) / kLatentHeads;
  call.step.group = (call.num_heads + call.step.num_kv_heads - 1) / call.step.num_kv_heads;
  call.shape.rank = out.size(2);
  call.shape.query_stride = query.stride(0);
  call.shape.out_stride = out.stride(0);
  call.kernel = latent_kernel()(query.dtype(), cache.dtype());
  call.sinks = sinks == nullptr ? nullptr : sinks->data<float>();
  call.query = static_cast<const char*>(query.raw());
  call.out = static_cast<char*>(out.raw());
  const auto pool = worker_pool();
  plan.build(call.step, pool->num_threads());
  append_all(call, *pool);
  const LatentAttention operation(call, plan.prefixes());
  run_prefixes(plan.prefixes(), *pool, operation);
  run_attention(plan, *pool, operation);
}

void append_latent(const TensorView& latent, const TensorView& cache,
                   const TensorView& query_start, const TensorView& context_tokens,
                   const TensorView& block_table) {
  const Call call = make_call(latent, cache, query_start, context_tokens, block_table);
  append_all(call, *worker_pool());
}

}  // namespace raymoe
