// The selection of positions and of blocks of positions: checks, scores, and the largest of them.
#include "raymoe/index_selection.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention_step.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("index selection: " + message);
}

void widen(const TensorView& rows, int64_t row, float* out) {
  const int64_t offset = row * rows.stride(0), count = rows.size(1);
  if (rows.dtype() == DType::kFloat32) {
    std::copy_n(static_cast<const float*>(rows.raw()) + offset, count, out);
  } else if (rows.dtype() == DType::kBFloat16) {
    const bf16* from = static_cast<const bf16*>(rows.raw()) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(from[i]);
  } else {
    const fp16* from = static_cast<const fp16*>(rows.raw()) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(from[i]);
  }
}

IndexKernels::Kernel kernel_of(DType dtype) {
  if (dtype == DType::kFloat32) return index_kernels().f32;
  if (dtype == DType::kFloat16) return index_kernels().f16;
  if (dtype == DType::kBFloat16) return index_kernels().bf16;
  refuse(std::string("keys have dtype ") + dtype_name(dtype) +
         ", expected float32, float16 or bfloat16");
}

void expect_float(const char* what, const TensorView& rows) {
  rows.expect_rank(what, 2);
  const DType dtype = rows.dtype();
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16)
    refuse(std::string(what) + " has dtype " + dtype_name(dtype) +
           ", expected float32, float16 or bfloat16");
}

/// Orders as the score does, larger ones first, then as the index does, lower ones first; NaN is
/// larger than every number, and both zeros are equal.
uint64_t rank_of(float score, int64_t index) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  if (score != score) bits = 0x7fffffffu;
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

int32_t index_of(uint64_t rank) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(rank));
}

/// Writes the indices of the `count` largest ranks in ascending order.
void write_largest(std::vector<uint64_t>& ranks, int64_t count, int32_t* out) {
  if (count < static_cast<int64_t>(ranks.size()))
    std::nth_element(ranks.begin(), ranks.begin() + count, ranks.end(), std::greater<>());
  for (int64_t i = 0; i < count; ++i) out[i] = index_of(ranks[static_cast<size_t>(i)]);
  std::sort(out, out + count);
}

/// What the workers of a call read.
struct Call {
  AttentionStep step;
  const char* keys = nullptr;
  int64_t block_bytes = 0;
  int64_t dim = 0;
  int64_t num_heads = 0;
  int64_t entry_tokens = 1;  // that a key stands for
  int64_t run_keys = kBlockTokens;
  IndexKernels::Kernel kernel = nullptr;
  std::vector<int64_t> sequences;  // of each token

  int64_t position_of(int64_t token) const {
    const int64_t sequence = sequences[static_cast<size_t>(token)];
    return step.first_position(sequence) + token - step.query_start[sequence];
  }

  /// Entries whose tokens a token sees.
  int64_t num_entries(int64_t token) const { return (position_of(token) + 1) / entry_tokens; }
};

Call make_call(const TensorView& query, const TensorView& keys, const TensorView& query_start,
               const TensorView& context_tokens, const TensorView& block_table,
               int64_t entry_tokens) {
  expect_float("index selection: query", query);
  if (entry_tokens < 1 || (kBlockTokens % entry_tokens != 0 && entry_tokens % kBlockTokens != 0))
    refuse("entries of " + std::to_string(entry_tokens) +
           " tokens, expected a divisor or a multiple of " + std::to_string(kBlockTokens));
  Call call;
  call.entry_tokens = entry_tokens;
  call.run_keys = std::max<int64_t>(1, kBlockTokens / entry_tokens);
  keys.expect_rank("index selection: keys", 3);
  keys.expect_size("index selection: keys", 1, call.run_keys);
  call.kernel = kernel_of(keys.dtype());
  call.dim = keys.size(2);
  if (keys.num_elements() > 0 && keys.stride(1) != call.dim)
    refuse("keys must be contiguous within a block");
  if (call.dim < 1 || query.size(1) < call.dim || query.size(1) % call.dim != 0)
    refuse("query has width " + std::to_string(query.size(1)) + ", keys have " +
           std::to_string(call.dim) + " elements");
  call.num_heads = query.size(1) / call.dim;
  call.step = make_step(query_start, context_tokens, block_table);
  call.step.num_kv_heads = call.step.group = 1;
  call.step.window = std::numeric_limits<int64_t>::max();
  check_step(call.step, query.size(0), block_table.size(1), keys.size(0));
  call.keys = static_cast<const char*>(keys.raw());
  call.block_bytes = keys.stride(0) * (keys.dtype() == DType::kFloat32 ? 4 : 2);
  call.sequences.reserve(static_cast<size_t>(query.size(0)));
  for (int64_t sequence = 0; sequence < call.step.num_sequences; ++sequence)
    for (int64_t i = 0; i < call.step.num_tokens(sequence); ++i)
      call.sequences.push_back(sequence);
  return call;
}

/// Memory of a worker, kept from call to call.
struct Worker {
  std::vector<float> query, weights, products, scratch, pooled;
  std::vector<uint64_t> ranks;
};

Worker& worker_of(const Call& call) {
  thread_local Worker worker;
  worker.query.resize(static_cast<size_t>(call.num_heads * call.dim));
  worker.weights.resize(static_cast<size_t>(call.num_heads));
  worker.products.resize(static_cast<size_t>(call.num_heads * kBlockTokens));
  worker.scratch.resize(static_cast<size_t>(call.dim * kBlockTokens));
  return worker;
}

/// Calls visit(first entry, number of visible entries) after the products of each tile.
template <typename Visit>
void for_each_tile(const Call& call, int64_t token, Worker& worker, const Visit& visit) {
  const int64_t sequence = call.sequences[static_cast<size_t>(token)];
  const int32_t* table = call.step.block_table + sequence * call.step.table_stride;
  const int64_t end = call.num_entries(token);
  IndexTile tile;
  tile.query = worker.query.data();
  tile.run_keys = call.run_keys;
  tile.num_heads = call.num_heads;
  tile.dim = call.dim;
  tile.scratch = worker.scratch.data();
  tile.out = worker.products.data();
  for (int64_t first = 0; first < end; first += kBlockTokens) {
    const int64_t count = std::min(kBlockTokens, end - first);
    tile.num_runs = (count + call.run_keys - 1) / call.run_keys;
    for (int64_t run = 0; run < tile.num_runs; ++run) {
      const int64_t last_token = (first + run * call.run_keys + 1) * call.entry_tokens - 1;
      tile.runs[run] = call.keys + table[last_token / kBlockTokens] * call.block_bytes;
    }
    call.kernel(tile);
    visit(first, count);
  }
}

void rank_entries(const Call& call, int64_t token, Worker& worker) {
  worker.ranks.clear();
  for_each_tile(call, token, worker, [&](int64_t first, int64_t count) {
    float scores[kBlockTokens] = {};
    for (int64_t head = 0; head < call.num_heads; ++head) {
      const float weight = worker.weights[static_cast<size_t>(head)];
      const float* products = worker.products.data() + head * kBlockTokens;
      for (int64_t i = 0; i < kBlockTokens; ++i)
        scores[i] += weight * (products[i] < 0.0f ? 0.0f : products[i]);
    }
    for (int64_t i = 0; i < count; ++i) worker.ranks.push_back(rank_of(scores[i], first + i));
  });
}

/// The largest product of each head with the keys of each block that the token sees.
void pool_blocks(const Call& call, int64_t token, int64_t block_tokens, int64_t num_blocks,
                 Worker& worker) {
  worker.pooled.assign(static_cast<size_t>(call.num_heads * num_blocks),
                       -std::numeric_limits<float>::infinity());
  for_each_tile(call, token, worker, [&](int64_t first, int64_t count) {
    for (int64_t head = 0; head < call.num_heads; ++head) {
      const float* products = worker.products.data() + head * kBlockTokens;
      float& pooled =
          worker.pooled[static_cast<size_t>(head * num_blocks + first / block_tokens)];
      for (int64_t i = 0; i < count; ++i) pooled = std::max(pooled, products[i]);
    }
  });
}

}  // namespace

void choose_positions(const TensorView& query, const TensorView& weights, const TensorView& keys,
                      const TensorView& query_start, const TensorView& context_tokens,
                      const TensorView& block_table, int64_t entry_tokens, const TensorView& out) {
  const Call call =
      make_call(query, keys, query_start, context_tokens, block_table, entry_tokens);
  const int64_t num_tokens = query.size(0);
  expect_float("index selection: weights", weights);
  weights.expect_size("index selection: weights", 0, num_tokens);
  weights.expect_size("index selection: weights", 1, call.num_heads);
  out.expect("index selection: out", DType::kInt32, 2).expect_contiguous("index selection: out");
  out.expect_size("index selection: out", 0, num_tokens);
  const int64_t top_k = out.size(1);
  worker_pool()->for_each(num_tokens, 1, [&](int, int64_t token) {
    Worker& worker = worker_of(call);
    widen(query, token, worker.query.data());
    widen(weights, token, worker.weights.data());
    rank_entries(call, token, worker);
    int32_t* chosen = out.data<int32_t>() + token * top_k;
    const int64_t count = std::min(top_k, call.num_entries(token));
    write_largest(worker.ranks, count, chosen);
    std::fill(chosen + count, chosen + top_k, -1);
  });
}

void choose_blocks(const TensorView& query, const TensorView& keys, const TensorView& query_start,
                   const TensorView& context_tokens, const TensorView& block_table,
                   int64_t block_tokens, int64_t num_local, const TensorView& out) {
  const Call call = make_call(query, keys, query_start, context_tokens, block_table, 1);
  const int64_t num_tokens = query.size(0);
  if (block_tokens < kBlockTokens || block_tokens % kBlockTokens != 0)
    refuse("blocks of " + std::to_string(block_tokens) + " tokens, expected a multiple of " +
           std::to_string(kBlockTokens));
  if (num_local < 1) refuse("a token's own block must be among those that it always sees");
  out.expect("index selection: out", DType::kInt32, 3).expect_contiguous("index selection: out");
  out.expect_size("index selection: out", 0, num_tokens);
  out.expect_size("index selection: out", 1, call.num_heads);
  const int64_t top_k = out.size(2);
  for (int64_t token = 0; token < num_tokens; ++token)
    if (call.position_of(token) / block_tokens + 1 < top_k)
      refuse("a token at position " + std::to_string(call.position_of(token)) + " cannot choose " +
             std::to_string(top_k) + " blocks of " + std::to_string(block_tokens));
  worker_pool()->for_each(num_tokens, 1, [&](int, int64_t token) {
    Worker& worker = worker_of(call);
    widen(query, token, worker.query.data());
    const int64_t own = call.position_of(token) / block_tokens, num_blocks = own + 1;
    pool_blocks(call, token, block_tokens, num_blocks, worker);
    for (int64_t head = 0; head < call.num_heads; ++head) {
      worker.ranks.clear();
      for (int64_t block = 0; block < num_blocks; ++block) {
        const bool is_local = block > own - num_local;
        const float score = worker.pooled[static_cast<size_t>(head * num_blocks + block)];
        worker.ranks.push_back(
            rank_of(is_local ? std::numeric_limits<float>::infinity() : score, block));
      }
      int32_t* chosen = out.data<int32_t>() + (token * call.num_heads + head) * top_k;
      write_largest(worker.ranks, top_k, chosen);
    }
  });
}

}  // namespace raymoe
