// The kernels of int8 products: without vectors, the readable reference; by sums of 16-bit products,
// which are exact where those of 8-bit operands would saturate; and, beside those of AVX512, by the
// dot products of AVX512-VNNI for machines that have them.
#include "int8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "gemm.h"
#include "rotation.h"
#if defined(__AVX2__)
#include "vec_f32.h"
#endif
#if defined(__AVX512F__)
#include "row_pointers.h"
#endif

namespace raymoe {
namespace {

constexpr int64_t kWordBytes = 4 * kPanelColumns;  // of a panel
constexpr float kLargestInt8 = 127.0f;
constexpr float kSmallest = 7.52316385e-37f;  // 2^-120: 127 divided by it is finite

/// Null for rows without scale: `found` says what they are.
inline float factor_of(float largest, Int8Row* found) {
  *found = {0.0f, 0};
  if (!(largest <= std::numeric_limits<float>::max()))
    found->scale = std::numeric_limits<float>::quiet_NaN();
  else if (largest >= kSmallest)
    found->scale = largest / kLargestInt8;
  return found->scale > 0.0f ? kLargestInt8 / largest : 0.0f;
}

inline const int32_t* words_of(const GemmTile& tile, int64_t row) {
  return reinterpret_cast<const int32_t*>(tile.a + row * tile.a_stride);
}

#if defined(__AVX2__)

#if defined(__AVX512F__)
inline void store_int8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
inline int32_t sum_of(I32 x) { return _mm512_reduce_add_epi32(x); }
#else
inline void store_int8(int8_t* p, I32 x) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
inline int32_t sum_of(I32 x) {
  int32_t lanes[kLanes];
  store(lanes, x, Whole{});
  int32_t sum = 0;
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}
#endif

constexpr int32_t kSign = std::numeric_limits<int32_t>::min();

/// Sums and differences of lanes that are kStep apart, exactly as `rotate_runs` makes them.
template <int kStep>
inline F32 rotate_lanes(F32 x) {
  int32_t signs[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) signs[lane] = (lane & kStep) != 0 ? kSign : 0;
  return add(swap_lanes<kStep>(x), from_bits(bit_xor(bits_of(x), load(signs, Whole{}))));
}

inline F32 rotate_lanes(F32 x) {
  x = rotate_lanes<4>(rotate_lanes<2>(rotate_lanes<1>(x)));
  if constexpr (kLanes > 8) x = rotate_lanes<8>(x);
  return x;
}

void load_rotated(const Int8Source& source, float* out) {
  const bool is_in_vectors = source.run >= kLanes;  // and so is the whole row
  for_lanes(source.inputs, [&](int64_t i, auto part) {
    const F32 x = load(source.row + i, part);
    store(out + i, is_in_vectors ? rotate_lanes(x) : x, part);
  });
  rotate_runs(out, source.inputs, source.run, is_in_vectors ? kLanes : 1);
}

void quantise_row(const Int8Source& source, float* scratch, int8_t* out, Int8Row* found) {
  const int64_t inputs = source.inputs;
  load_rotated(source, scratch);
  const I32 magnitude = splat(0x7fffffff);
  I32 bits = splat(0);
  for_lanes(inputs, [&](int64_t i, auto part) {
    bits = max(bits, bit_and(bits_of(load(scratch + i, part)), magnitude));
  });
  const int32_t largest_bits = max_of(bits);
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const float factor = factor_of(largest, found);
  if (factor == 0.0f) {
    std::memset(out, 0, static_cast<size_t>(ceil_div(inputs, 16) * 16));
    return;
  }
  const F32 factors = splat(factor);
  I32 sum = splat(0);
  for_lanes(inputs, [&](int64_t i, auto part) {
    const I32 numbers = to_int(round_even(mul(load(scratch + i, part), factors)));
    sum = add(sum, numbers);
    store_int8(out + i, numbers);
  });
  // Vectors of eight may end before the sixteen.
  for (int64_t i = ceil_div(inputs, kLanes) * kLanes; i % 16 != 0; ++i) out[i] = 0;
  found->start = -kInt8Zero * sum_of(sum);
}

/// Sums of a tile's vector of columns to memory: int32, or scaled after the last block.
inline void store_sums(const Int8Tile& args, int64_t row, int64_t column, I32 sums) {
  float* out = args.tile.sums + row * kPanelColumns + column;
  if (!args.is_last) return store(reinterpret_cast<int32_t*>(out), sums, Whole{});
  const F32 scaled = mul(to_f32(sums), load(args.column_scales + column, Whole{}));
  store(out, mul(scaled, splat(args.rows[row].scale)), Whole{});
}

inline I32 first_sums(const Int8Tile& args, int64_t row, int64_t column) {
  if (!args.tile.accumulate) return splat(args.rows[row].start);
  const float* sums = args.tile.sums + row * kPanelColumns + column;
  return load(reinterpret_cast<const int32_t*>(sums), Whole{});
}

#endif  // __AVX2__

#if defined(__AVX512F__)

// As the tile of bfloat16: 14 rows x 32 columns of sums in 28 registers.

#define RAYMOE_VNNI __attribute__((target("avx512vnni")))
constexpr int kUnroll = 4;

template <int kRows>
RAYMOE_VNNI inline __attribute__((always_inline)) void multiply_word(__m512i (&sums)[kRows][2],
                                                         const RowPointers<kRows>& rows,
                                                         const char* weights, int word) {
  const __m512i left = _mm512_loadu_si512(weights + word * kWordBytes);
  const __m512i right = _mm512_loadu_si512(weights + word * kWordBytes + 64);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    int32_t inputs;
    std::memcpy(&inputs, rows.at(row, word), sizeof inputs);
    const __m512i activations = _mm512_set1_epi32(inputs);
    sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], left, activations);
    sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], right, activations);
  }
}

template <int kRows>
RAYMOE_VNNI void tile_rows(const Int8Tile& args) {
  const GemmTile& tile = args.tile;
  RowPointers<kRows> rows(tile.a, tile.a_stride * static_cast<int64_t>(sizeof(bf16)));
  const char* weights = reinterpret_cast<const char*>(tile.panel);
  const char* prefetch = reinterpret_cast<const char*>(tile.prefetch);
  __m512i sums[kRows][2];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    sums[row][0] = first_sums(args, row, 0);
    sums[row][1] = first_sums(args, row, 16);
  }
  int64_t words = tile.num_pairs;
  for (; words >= kUnroll; words -= kUnroll) {
    for (int64_t line = 0; line < tile.lines_per_4_pairs; ++line, prefetch += 64)
      _mm_prefetch(prefetch, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int word = 0; word < kUnroll; ++word) multiply_word<kRows>(sums, rows, weights, word);
    weights += kUnroll * kWordBytes;
    rows.advance(kUnroll);
  }
  for (; words > 0; --words) {
    multiply_word<kRows>(sums, rows, weights, 0);
    weights += kWordBytes;
    rows.advance(1);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    store_sums(args, row, 0, sums[row][0]);
    store_sums(args, row, 16, sums[row][1]);
  }
}

using TileRows = void (*)(const Int8Tile&);

template <int... kRows>
constexpr std::array<TileRows, kTileRows> tile_table(std::integer_sequence<int, kRows...>) {
  return {tile_rows<kRows + 1>...};
}

void multiply_vnni_tile(int64_t rows, const Int8Tile& args) {
  static constexpr auto kTable = tile_table(std::make_integer_sequence<int, kTileRows>());
  kTable[static_cast<size_t>(rows - 1)](args);
}

#endif  // __AVX512F__

#if defined(__AVX2__)

// The first and third input of a word are 16-bit numbers of their own once the others are cleared,
// the second and fourth once they are shifted down: two products and sums of pairs for a word.

#if defined(__AVX512F__)
inline I32 sum_of_products(I32 a, I32 b) { return _mm512_madd_epi16(a, b); }
inline I32 high_bytes(I32 x) { return _mm512_srai_epi16(x, 8); }
inline I32 low_bytes(I32 x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
#else
inline I32 sum_of_products(I32 a, I32 b) { return _mm256_madd_epi16(a, b); }
inline I32 high_bytes(I32 x) { return _mm256_srai_epi16(x, 8); }
inline I32 low_bytes(I32 x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
#endif

constexpr int kSideBySide = 2;  // vectors of columns
// Rows whose sums stay in registers: 12 x 2 of 32, or 5 x 2 of 16.
constexpr int kRegisterRows = kLanes == 16 ? 12 : 5;
constexpr int64_t kChunkWords = 128;
// Of a widened row, first and third inputs before the others; rows in different sets of the cache.
constexpr int64_t kWideStride = 2 * kChunkWords + 16;

/// Some rows of a chunk of inputs times two vectors of columns.
struct Chunk {
  const int32_t* wide;    // [rows][kWideStride]
  const char* weights;    // of the first word, at the first of the columns
  int64_t num_words;
  int32_t* sums;  // [rows][kPanelColumns], at the first of the columns
};

template <int kRows>
void multiply_chunk(const Chunk& chunk) {
  const I32 low = splat(0x00ff00ff);
  I32 sums[kRows][kSideBySide];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kSideBySide; ++v)
      sums[row][v] = load(chunk.sums + row * kPanelColumns + v * kLanes, Whole{});
  for (int64_t word = 0; word < chunk.num_words; ++word) {
    const auto* weights = reinterpret_cast<const int32_t*>(chunk.weights + word * kWordBytes);
    const I32 left = load(weights, Whole{}), right = load(weights + kLanes, Whole{});
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const I32 a = bit_and(part == 0 ? left : shift_right<8>(left), low);
      const I32 b = bit_and(part == 0 ? right : shift_right<8>(right), low);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const I32 x = splat(chunk.wide[row * kWideStride + part * kChunkWords + word]);
        sums[row][0] = add(sums[row][0], sum_of_products(a, x));
        sums[row][1] = add(sums[row][1], sum_of_products(b, x));
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kSideBySide; ++v)
      store(chunk.sums + row * kPanelColumns + v * kLanes, sums[row][v], Whole{});
}

using MultiplyChunk = void (*)(const Chunk&);

template <int... kRows>
constexpr std::array<MultiplyChunk, kRegisterRows> chunk_table(
    std::integer_sequence<int, kRows...>) {
  return {multiply_chunk<kRows + 1>...};
}

inline void multiply_columns(int64_t rows, const Chunk& whole) {
  static constexpr auto kTable = chunk_table(std::make_integer_sequence<int, kRegisterRows>());
  const int64_t num_groups = ceil_div(rows, kRegisterRows);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = group * rows / num_groups;
    const int64_t count = (group + 1) * rows / num_groups - first;
    for (int64_t column = 0; column < kPanelColumns; column += kSideBySide * kLanes) {
      Chunk chunk = whole;
      chunk.wide += first * kWideStride;
      chunk.weights += 4 * column;
      chunk.sums += first * kPanelColumns + column;
      kTable[static_cast<size_t>(count - 1)](chunk);
    }
  }
}

inline void widen_row(const int32_t* row, int64_t num_words, int32_t* wide) {
  int64_t word = 0;
  for (; word + kLanes <= num_words; word += kLanes) {
    const I32 bytes = load(row + word, Whole{});
    store(wide + word, low_bytes(bytes), Whole{});
    store(wide + kChunkWords + word, high_bytes(bytes), Whole{});
  }
  for (; word < num_words; ++word) {
    int8_t bytes[4];
    std::memcpy(bytes, row + word, sizeof bytes);
    const int16_t first[2] = {bytes[0], bytes[2]}, second[2] = {bytes[1], bytes[3]};
    std::memcpy(wide + word, first, sizeof first);
    std::memcpy(wide + kChunkWords + word, second, sizeof second);
  }
}

void multiply_tile(int64_t rows, const Int8Tile& args) {
  const GemmTile& tile = args.tile;
  alignas(64) int32_t wide[kTileRows * kWideStride];
  alignas(64) int32_t sums[kTileRows * kPanelColumns];
  const char* prefetch = reinterpret_cast<const char*>(tile.prefetch);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < kPanelColumns; column += kLanes)
      store(sums + row * kPanelColumns + column, first_sums(args, row, column), Whole{});
  for (int64_t word = 0; word < tile.num_pairs; word += kChunkWords) {
    const int64_t count = std::min(kChunkWords, tile.num_pairs - word);
    for (int64_t line = 0; line < tile.lines_per_4_pairs * count / 4; ++line, prefetch += 64)
      _mm_prefetch(prefetch, _MM_HINT_T1);
    for (int64_t row = 0; row < rows; ++row)
      widen_row(words_of(tile, row) + word, count, wide + row * kWideStride);
    const char* weights = reinterpret_cast<const char*>(tile.panel) + word * kWordBytes;
    multiply_columns(rows, {wide, weights, count, sums});
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < kPanelColumns; column += kLanes)
      store_sums(args, row, column, load(sums + row * kPanelColumns + column, Whole{}));
}

#else  // without vectors

void quantise_row(const Int8Source& source, float* scratch, int8_t* out, Int8Row* found) {
  const int64_t inputs = source.inputs;
  for (int64_t i = 0; i < inputs; ++i) scratch[i] = to_float(source.row[i]);
  rotate_runs(scratch, inputs, source.run);
  float largest = 0.0f;
  bool is_finite = true;
  for (int64_t i = 0; i < inputs; ++i) {
    const float magnitude = std::fabs(scratch[i]);
    is_finite &= magnitude <= std::numeric_limits<float>::max();
    largest = std::max(largest, magnitude);
  }
  const float factor = factor_of(is_finite ? largest : std::numeric_limits<float>::infinity(), found);
  int32_t sum = 0;
  for (int64_t i = 0; i < ceil_div(inputs, 16) * 16; ++i) {
    const float number =
        i < inputs && factor != 0.0f ? std::nearbyint(scratch[i] * factor) : 0.0f;
    out[i] = static_cast<int8_t>(number);
    sum += out[i];
  }
  found->start = -kInt8Zero * sum;
}

void multiply_tile(int64_t rows, const Int8Tile& args) {
  const GemmTile& tile = args.tile;
  const auto* panel = reinterpret_cast<const uint8_t*>(tile.panel);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* a = reinterpret_cast<const int8_t*>(words_of(tile, row));
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      float* out = tile.sums + row * kPanelColumns + column;
      auto sum = static_cast<uint32_t>(args.rows[row].start);  // wraps where signed would not
      if (tile.accumulate) std::memcpy(&sum, out, sizeof sum);
      for (int64_t input = 0; input < 4 * tile.num_pairs; ++input)
        sum += static_cast<uint32_t>(a[input] *
                                     panel[input / 4 * kWordBytes + 4 * column + input % 4]);
      if (args.is_last)
        *out = static_cast<float>(static_cast<int32_t>(sum)) * args.column_scales[column] *
               args.rows[row].scale;
      else
        std::memcpy(out, &sum, sizeof sum);
    }
  }
}

#endif  // __AVX2__

#if !defined(__AVX512F__)
constexpr void (*multiply_vnni_tile)(int64_t, const Int8Tile&) = nullptr;
#endif

}  // namespace

RAYMOE_DEFINE_KERNELS(Int8Kernels, int8_kernels) = {multiply_tile, multiply_vnni_tile,
                                                   quantise_row};

}  // namespace raymoe
