// Appending keys and values to the paged cache; conversions round to nearest even.
#include <algorithm>
#include <cstring>

#include "raymoe/attention.h"

namespace raymoe {
namespace {

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

/// Tokens [begin, end) of the task into rows row, row + 1, ... of one block.
template <typename Q, typename C>
void write_block(const AppendTask& task, int64_t begin, int64_t end, int64_t row, C* keys,
                 C* values) {
  constexpr int64_t pair = kPair<C>;
  const int64_t dim = task.head_dim;
  for (int64_t token = begin; token < end; ++token, ++row) {
    const Q* key = static_cast<const Q*>(task.key) + token * task.key_stride;
    const Q* value = static_cast<const Q*>(task.value) + token * task.value_stride;
    C* key_out = keys + row * pair;
    for (int64_t d = 0; d < dim; d += pair)
      for (int64_t p = 0; p < pair; ++p) key_out[d * kBlockTokens + p] = convert<C>(key[d + p]);
    for (int64_t column = 0; column < dim; column += kValueColumns) {
      C* value_out = values + value_offset(row, column, dim, pair);
      const int64_t end_column = std::min(dim, column + kValueColumns);
      for (int64_t d = column; d < end_column; ++d, value_out += pair)
        *value_out = convert<C>(value[d]);
    }
  }
}

template <typename Q, typename C>
void append(const AppendTask& task) {
  const int64_t half = kBlockTokens * task.head_dim;
  int64_t token = 0;
  while (token < task.num_tokens) {
    const int64_t position = task.first_position + token;
    const int64_t row = position % kBlockTokens;
    const int64_t end = std::min(task.num_tokens, token + kBlockTokens - row);
    C* keys =
        static_cast<C*>(task.cache) + task.block_table[position / kBlockTokens] * task.block_stride;
    if (row == 0 && end - token < kBlockTokens)
      std::memset(static_cast<void*>(keys), 0, static_cast<size_t>(2 * half) * sizeof(C));
    write_block<Q, C>(task, token, end, row, keys, keys + half);
    token = end;
  }
}

template <typename Q>
AppendFunction append_of(DType cache) {
  switch (cache) {
    case DType::kFloat32:
      return append<Q, float>;
    case DType::kFloat16:
      return append<Q, fp16>;
    case DType::kBFloat16:
      return append<Q, bf16>;
    default:
      return nullptr;
  }
}

}  // namespace

AppendFunction append_function(DType query, DType cache) {
  if (query == DType::kFloat32) return append_of<float>(cache);
  if (query != cache) return nullptr;
  if (query == DType::kFloat16) return append<fp16, fp16>;
  if (query == DType::kBFloat16) return append<bf16, bf16>;
  return nullptr;
}

}  // namespace raymoe
