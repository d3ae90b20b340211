// Products of int8 keys and values by instructions that multiply bytes, for attention_kernel.cpp.
//
// The other operand, a row of queries or weights, becomes integers of 16 bits with a factor: they
// err by 2^-16 of the row's largest number at most. Each is a high and a low byte. Products and sums
// of bytes are exact, so that an element costs as much as with two bf16, and no conversion.
#pragma once

#include "attention_prefetch.h"
#include "attention_vector.h"
#include "raymoe/attention.h"

namespace raymoe {
namespace {

/// Elements that an instruction multiplies together.
constexpr int64_t kQuad = kPair<int8_t>;

/// The largest integers of queries, whose bytes have signs, and of weights, whose bytes have none.
constexpr float kMaxQuery = 127 * 256, kMaxWeight = 65535;

/// Weights of a chunk whose largest is smaller count nothing.
constexpr float kMinWeight = 0x1p-100f;

/// A row of queries: its high bytes, low bytes, then this.
struct ByteQuery {
  float scale;
  int32_t start[2];  // what the sums of products of high and low bytes begin with
};

constexpr int64_t byte_query_stride(int64_t head_dim) {
  return padded_head_dim(head_dim) * int64_t{sizeof(float)};
}

inline const ByteQuery& query_at(const uint8_t* row, int64_t head_dim) {
  return *reinterpret_cast<const ByteQuery*>(row + 2 * head_dim);
}

inline int32_t sum8(__m256i x) {
  alignas(32) int32_t each[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), x);
  int32_t sum = 0;
  for (int32_t one : each) sum += one;
  return sum;
}

/// The largest magnitude; NaN if there is one.
inline float largest_of(const float* row, int64_t count) {
  __m256i top = _mm256_setzero_si256();
  for (int64_t d = 0; d < count; d += 8) {
    const __m256i bits = _mm256_castps_si256(load8(row + d));
    top = _mm256_max_epu32(top, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  return _mm256_cvtss_f32(_mm256_castsi256_ps(_mm256_set1_epi32(
      static_cast<int32_t>(_mm512_reduce_max_epu32(_mm512_zextsi256_si512(top))))));
}

inline void pack_byte_query(const float* row, int64_t dim, uint8_t* to) {
  const float largest = largest_of(row, dim);
  const bool is_zero = largest < kMaxQuery * 0x1p-126f, is_finite = largest < __builtin_inff();
  const __m256 inverse = _mm256_set1_ps(is_zero || !is_finite ? 0 : kMaxQuery / largest);
  __m256i high_sum = _mm256_setzero_si256(), low_sum = _mm256_setzero_si256();
  for (int64_t d = 0; d < dim; d += 8) {
    const __m256i x = _mm256_cvtps_epi32(_mm256_mul_ps(load8(row + d), inverse));
    const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(128)), 8);
    const __m256i low = _mm256_sub_epi32(x, _mm256_slli_epi32(high, 8));
    high_sum = _mm256_add_epi32(high_sum, high);
    low_sum = _mm256_add_epi32(low_sum, low);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + d), _mm256_cvtepi32_epi8(high));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + dim + d), _mm256_cvtepi32_epi8(low));
  }
  // Keys are multiplied as numbers without sign, which are larger by 128.
  ByteQuery query{};
  query.scale = is_zero ? 0 : is_finite ? largest / kMaxQuery : __builtin_nanf("");
  query.start[0] = -128 * sum8(high_sum);
  query.start[1] = -128 * sum8(low_sum);
  __builtin_memcpy(to + 2 * dim, &query, sizeof query);
}

/// Bytes [2][kChunkTokens] of one row of weights; returns their factor. NaN makes it NaN.
inline float pack_byte_weights(const float* weights, int64_t count, uint8_t* to) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16)
    top = _mm512_max_epu32(top, _mm512_loadu_si512(weights + i));
  const uint32_t bits = _mm512_reduce_max_epu32(top);
  float largest;
  __builtin_memcpy(&largest, &bits, sizeof largest);
  const bool is_nothing = largest < kMinWeight;
  const __m512 inverse = _mm512_set1_ps(is_nothing ? 0 : kMaxWeight / largest);
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(weights + i), inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kChunkTokens + i), _mm512_cvtepi32_epi8(x));
  }
  return is_nothing ? 0 : largest / kMaxWeight;
}

/// Of keys: out = scale * a * matrix. Of values: out = factor * out + scale * a * matrices.
struct ByteProduct {
  const uint8_t* a;  // high bytes of the rows
  int64_t a_stride;  // between rows
  int64_t low;       // from high to low bytes
  const int8_t* matrices[kChunkBlocks];  // each [depth][columns][kQuad]
  int64_t num_matrices;
  int64_t depth;
  int64_t columns;
  float* out;
  int64_t out_stride;
  float scale[Vector::kMaxRows];
  const float* factor;              // of values
  int32_t start[Vector::kMaxRows][2];  // of keys
  const char* const* path;          // of the first matrix; null prefetches nothing
};

inline __m512i load_quads(const int8_t* from, bool half) {
  return half ? _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))
              : _mm512_loadu_si512(from);
}

inline __m512i broadcast_quad(const uint8_t* from) {
  int32_t quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return _mm512_set1_epi32(quad);
}

template <int kRows, int kCols, bool kIsKeys, bool kPrefetch>
__attribute__((noinline)) void multiply_byte_columns(const ByteProduct& product, int64_t column,
                                                     bool half) {
  constexpr int64_t row_bytes = kCols * Vector::kLanes * kQuad;
  __m512i high[kRows][kCols], low[kRows][kCols];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) {
      high[i][j] = kIsKeys ? _mm512_set1_epi32(product.start[i][0]) : _mm512_setzero_si512();
      low[i][j] = kIsKeys ? _mm512_set1_epi32(product.start[i][1]) : _mm512_setzero_si512();
    }
  const int64_t b_stride = product.columns * kQuad;
  const int64_t matrix_bytes = product.depth * b_stride;
  const int64_t done_bytes = column * product.depth * kQuad;
  const uint8_t* a = product.a;
  for (int64_t matrix = 0; matrix < product.num_matrices; ++matrix) {
    const int8_t* b = product.matrices[matrix] + column * kQuad;
    const char* const* path = product.path + matrix * pages_of(matrix_bytes);
    for_each_row<kPrefetch, row_bytes>(path, done_bytes, product.depth, [&]() RAYMOE_INLINE {
      __m512i quads[kCols];
      for (int j = 0; j < kCols; ++j) {
        quads[j] = load_quads(b + j * Vector::kLanes * kQuad, half);
        if constexpr (kIsKeys) quads[j] = _mm512_xor_si512(quads[j], _mm512_set1_epi8(-128));
      }
      for (int i = 0; i < kRows; ++i) {
        const __m512i x = broadcast_quad(a + i * product.a_stride);
        const __m512i y = broadcast_quad(a + i * product.a_stride + product.low);
        for (int j = 0; j < kCols; ++j) {
          high[i][j] = kIsKeys ? _mm512_dpbusd_epi32(high[i][j], quads[j], x)
                               : _mm512_dpbusd_epi32(high[i][j], x, quads[j]);
          low[i][j] = kIsKeys ? _mm512_dpbusd_epi32(low[i][j], quads[j], y)
                              : _mm512_dpbusd_epi32(low[i][j], y, quads[j]);
        }
      }
      a += kQuad;
      b += b_stride;
    });
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) {
      float* out = product.out + i * product.out_stride + column + j * Vector::kLanes;
      const Vector::Reg sum = Vector::fma(_mm512_cvtepi32_ps(high[i][j]), Vector::set1(256),
                                          _mm512_cvtepi32_ps(low[i][j]));
      const Vector::Reg scaled = Vector::mul(sum, Vector::set1(product.scale[i]));
      Vector::store(out, kIsKeys ? scaled
                                 : Vector::fma(Vector::load(out),
                                               Vector::set1(product.factor[i]), scaled));
    }
}

template <int kRows, bool kIsKeys, bool kPrefetch>
void multiply_all_bytes(const ByteProduct& product) {
  constexpr int64_t lanes = Vector::kLanes;
  constexpr int cols = 2 * kRows <= Vector::kNarrowRows ? Vector::kWideColumns : Vector::kColumns;
  const int64_t columns = product.columns;
  int64_t column = 0;
  for (; column + cols * lanes <= columns; column += cols * lanes)
    multiply_byte_columns<kRows, cols, kIsKeys, kPrefetch>(product, column, false);
  for (; column + 2 * lanes <= columns; column += 2 * lanes)
    multiply_byte_columns<kRows, 2, kIsKeys, kPrefetch>(product, column, false);
  for (; column + lanes <= columns; column += lanes)
    multiply_byte_columns<kRows, 1, kIsKeys, kPrefetch>(product, column, false);
  if (column < columns) multiply_byte_columns<kRows, 1, kIsKeys, kPrefetch>(product, column, true);
}

template <int kRows, bool kIsKeys>
void multiply_bytes(const ByteProduct& product) {
  if (product.path == nullptr)
    multiply_all_bytes<kRows, kIsKeys, false>(product);
  else
    multiply_all_bytes<kRows, kIsKeys, true>(product);
}

}  // namespace
}  // namespace raymoe
