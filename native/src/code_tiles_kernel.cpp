// Tiles that multiply rows by codes without decoding them into memory: numbers of codes are looked
// up, multiplied and summed in registers over a span of one group, and the sum is scaled (gemm.h).
#include <algorithm>
#include <array>
#include <utility>

#include "code_values.h"
#if defined(__AVX512BF16__)
#include "bf16_rows.h"
#endif

namespace raymoe {
namespace {

#if defined(__AVX512BF16__)

// 12 rows x 32 columns of sums of a span in 24 registers; tables, codes and numbers in the rest.
// The sums of all spans stay in memory. Numbers are looked up again for each tile: storing them
// once for tiles of 14 rows is no faster with 256 rows and takes twice as long with one.
//
// A lookup gives columns in chunks of 4 or 8, those of even chunks in its first vector: this is the
// order of scales and sums until the end of a block. Lookups in bytes need VBMI, which machines
// with products of bfloat16 have, but for Cooper Lake.
#pragma GCC push_options
#pragma GCC target("avx512vbmi")

constexpr int kUnroll = 4;
constexpr int kTileRows = 12;

/// The bfloat16 of each E4M3 code without its sign, in two bytes.
struct E4m3Bytes {
  uint8_t low[128], high[128];
};

constexpr E4m3Bytes make_e4m3_bytes() {
  E4m3Bytes bytes{};
  for (int code = 0; code < 128; ++code) {
    int exponent = (code >> 3) + 120, fraction = code & 7;  // bfloat16 has a bias of 127, not 7
    if (code < 8) {                                         // subnormal
      exponent = code == 0 ? 0 : 121;
      for (; fraction != 0 && fraction < 8; fraction *= 2) --exponent;
      fraction &= 7;
    }
    const int bits = code == 127 ? 0x7fc0 : exponent << 7 | fraction << 4;
    bytes.low[code] = static_cast<uint8_t>(bits & 255);
    bytes.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}

alignas(64) constexpr E4m3Bytes kE4m3Bytes = make_e4m3_bytes();

/// A multiple of 1/2 below 16 in bfloat16.
constexpr uint16_t bits_of_halves(int halves) {
  int fraction = halves < 0 ? -halves : halves, exponent = 127 + 6;
  if (fraction == 0) return 0;
  for (; fraction < 128; fraction *= 2) --exponent;
  return static_cast<uint16_t>((halves < 0 ? 0x8000 : 0) | exponent << 7 | (fraction & 127));
}

using Table = std::array<uint16_t, 32>;

template <typename Entry>
constexpr Table make_table(const Entry& entry) {
  Table table{};
  for (int i = 0; i < 32; ++i) table[static_cast<size_t>(i)] = static_cast<uint16_t>(entry(i));
  return table;
}

constexpr uint16_t e2m1_bits(int code) {
  constexpr int kHalves[] = {0, 1, 2, 3, 4, 6, 8, 12};
  return bits_of_halves(code & 8 ? -kHalves[code & 7] : kHalves[code & 7]);
}

/// Without zero points, whatever the fifth bit.
alignas(64) constexpr Table kInt4Table =
    make_table([](int i) { return bits_of_halves(2 * ((i & 15) - kInt4Zero)); });
/// Differences of codes and zero points modulo 32.
alignas(64) constexpr Table kDifferenceTable =
    make_table([](int i) { return bits_of_halves(2 * (i < 16 ? i : i - 32)); });
alignas(64) constexpr Table kE2m1Table = make_table(e2m1_bits);
constexpr int kRaise = 126;  // of exponents; zeros become negative
alignas(64) constexpr Table kRaisedE2m1Table = make_table(
    [](int i) { return (i & 7) == 0 ? 0x8000 : e2m1_bits(i) + (kRaise << 7); });
/// Columns 0 to 7 in two words each, twice; and with columns 16 to 23 in place of the second ones.
alignas(64) constexpr Table kDoubledColumns = make_table([](int i) { return i % 16 / 2; });
alignas(64) constexpr Table kDoubledChunks =
    make_table([](int i) { return i % 16 / 2 + i / 16 * 16; });

inline __m512bh as_numbers(__m512i words) { return reinterpret_cast<__m512bh>(words); }

/// E4M3: two bytes of each number are looked up, the sign is added, and both are interleaved.
struct Bytes {
  static constexpr bool kAreScaled = false;
  static constexpr int kChunk = 4;
  static constexpr int64_t kPairBytes = 2 * kPanelColumns;
  __m512i low[2], high[2];

  explicit Bytes(const CodePanel&) {
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_load_si512(kE4m3Bytes.low + 64 * half);
      high[half] = _mm512_load_si512(kE4m3Bytes.high + 64 * half);
    }
  }
  void set_group(const CodePanel&, int64_t) {}
  void look_up(const uint8_t* p, __m512bh* first, __m512bh* second) const {
    const __m512i codes = _mm512_loadu_si512(p);
    const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    // magnitude | (codes & 0x80)
    const __m512i upper =
        _mm512_ternarylogic_epi64(magnitude, codes, _mm512_set1_epi8(int8_t(0x80)), 0xf8);
    *first = as_numbers(_mm512_unpacklo_epi8(lower, upper));
    *second = as_numbers(_mm512_unpackhi_epi8(lower, upper));
  }
};

/// Four bits: the lookup takes five bits of each word.
struct Nibbles {
  static constexpr bool kAreScaled = false;
  static constexpr int kChunk = 8;
  static constexpr int64_t kPairBytes = kPanelColumns;
  __m512i table;

  explicit Nibbles(const CodePanel& panel)
      : table(_mm512_load_si512(is_int4(panel.format->kind) ? kInt4Table.data()
                                                            : kE2m1Table.data())) {}
  void set_group(const CodePanel&, int64_t) {}
  void look_up(const uint8_t* p, __m512bh* first, __m512bh* second) const {
    const __m512i codes = _mm512_cvtepu8_epi16(load_256(p));
    *first = as_numbers(_mm512_permutexvar_epi16(codes, table));
    *second = as_numbers(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
  }
};

/// INT4 with zero points: the table has an entry for each difference.
struct NibblesAboveZeros {
  static constexpr bool kAreScaled = false;
  static constexpr int kChunk = 8;
  static constexpr int64_t kPairBytes = kPanelColumns;
  __m512i table, zeros[2];

  explicit NibblesAboveZeros(const CodePanel&)
      : table(_mm512_load_si512(kDifferenceTable.data())) {}
  /// Byte b of the zero points holds column b below and column 16 + b above; here each column has
  /// two words.
  void set_group(const CodePanel& panel, int64_t group) {
    const __m512i bytes = _mm512_castsi256_si512(
        _mm256_cvtepu8_epi16(load_128(panel.zeros + group * kHalfPanel)));
    const __m512i columns = _mm512_load_si512(kDoubledColumns.data());
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    for (int upper = 0; upper < 2; ++upper) {
      const __m512i places = _mm512_add_epi16(columns, _mm512_set1_epi16(int16_t(8 * upper)));
      const __m512i both = _mm512_permutexvar_epi16(places, bytes);
      zeros[upper] = _mm512_and_si512(_mm512_srlv_epi16(both, shifts), _mm512_set1_epi16(15));
    }
  }
  void look_up(const uint8_t* p, __m512bh* first, __m512bh* second) const {
    const __m512i codes = _mm512_cvtepu8_epi16(load_256(p));
    const __m512i lower = _mm512_and_si512(codes, _mm512_set1_epi16(15));
    *first = as_numbers(_mm512_permutexvar_epi16(_mm512_sub_epi16(lower, zeros[0]), table));
    *second = as_numbers(
        _mm512_permutexvar_epi16(_mm512_sub_epi16(_mm512_srli_epi16(codes, 4), zeros[1]), table));
  }
};

/// E2M1 times powers of two, exact in bfloat16 and not scaled again. The exponents of the table are
/// too high and lowered for each column; its zeros are negative, where the difference saturates.
/// The smallest scale, 2^-127, counts as 2^-126.
struct ScaledNibbles {
  static constexpr bool kAreScaled = true;
  static constexpr int kChunk = 8;
  static constexpr int64_t kPairBytes = kPanelColumns;
  __m512i table, lowered[2];

  explicit ScaledNibbles(const CodePanel&) : table(_mm512_load_si512(kRaisedE2m1Table.data())) {}
  void set_group(const CodePanel& panel, int64_t group) {
    const __m512i exponents = _mm512_max_epi16(
        _mm512_cvtepu8_epi16(load_256(panel.scales + group * kPanelColumns)), _mm512_set1_epi16(1));
    const __m512i drops =
        _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(127 + kRaise), exponents), 7);
    const __m512i columns = _mm512_load_si512(kDoubledChunks.data());
    lowered[0] = _mm512_permutexvar_epi16(columns, drops);
    lowered[1] =
        _mm512_permutexvar_epi16(_mm512_add_epi16(columns, _mm512_set1_epi16(kChunk)), drops);
  }
  void look_up(const uint8_t* p, __m512bh* first, __m512bh* second) const {
    const __m512i codes = _mm512_cvtepu8_epi16(load_256(p));
    const __m512i lower = _mm512_permutexvar_epi16(codes, table);
    const __m512i upper = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    *first = as_numbers(_mm512_subs_epi16(lower, lowered[0]));
    *second = as_numbers(_mm512_subs_epi16(upper, lowered[1]));
  }
};

using Places = std::array<int32_t, 2 * kHalfPanel>;

/// Where the columns of the two vectors of a lookup are, of 32 columns in order.
template <int kChunk>
constexpr Places make_places_in_order() {
  Places places{};
  for (int lane = 0; lane < kHalfPanel; ++lane) {
    const int column = lane / kChunk * 2 * kChunk + lane % kChunk;
    places[static_cast<size_t>(lane)] = column;
    places[static_cast<size_t>(lane + kHalfPanel)] = column + kChunk;
  }
  return places;
}

/// Where the 32 columns in order are, of the two vectors of a lookup.
template <int kChunk>
constexpr Places make_places_in_tile() {
  Places places{};
  for (int lane = 0; lane < 2 * kHalfPanel; ++lane)
    places[static_cast<size_t>(make_places_in_order<kChunk>()[static_cast<size_t>(lane)])] = lane;
  return places;
}

template <int kChunk>
struct Orders {
  alignas(64) static constexpr Places kInOrder = make_places_in_order<kChunk>();
  alignas(64) static constexpr Places kInTile = make_places_in_tile<kChunk>();
};

/// Moves 32 floats to their places.
inline void permute(const Places& places, const float* from, float* to) {
  const __m512 left = _mm512_loadu_ps(from), right = _mm512_loadu_ps(from + kHalfPanel);
  const int32_t* p = places.data();
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(left, _mm512_load_si512(p), right));
  _mm512_storeu_ps(to + kHalfPanel,
                   _mm512_permutex2var_ps(left, _mm512_load_si512(p + kHalfPanel), right));
}

/// Products of kCount pairs.
template <int kCount, int kRows, typename Numbers>
inline __attribute__((always_inline)) void multiply_pairs(__m512 (&sums)[kRows][2],
                                                          const RowPointers<kRows>& rows,
                                                          const uint8_t* codes,
                                                          const Numbers& numbers) {
#pragma GCC unroll 4
  for (int pair = 0; pair < kCount; ++pair) {
    __m512bh first, second;
    numbers.look_up(codes + pair * Numbers::kPairBytes, &first, &second);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const __m512bh activation = broadcast_pair(rows.at(row, pair));
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], activation, first);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], activation, second);
    }
  }
}

template <int kRows>
inline __attribute__((always_inline)) void clear_sums(__m512 (&sums)[kRows][2]) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = _mm512_setzero_ps();
}

template <int kRows>
inline __attribute__((always_inline)) void load_sums(const float* from, __m512 (&sums)[kRows][2]) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row, from += kPanelColumns) {
    sums[row][0] = _mm512_loadu_ps(from);
    sums[row][1] = _mm512_loadu_ps(from + kHalfPanel);
  }
}

template <int kRows>
inline __attribute__((always_inline)) void store_sums(const __m512 (&sums)[kRows][2], float* to) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row, to += kPanelColumns) {
    _mm512_storeu_ps(to, sums[row][0]);
    _mm512_storeu_ps(to + kHalfPanel, sums[row][1]);
  }
}

/// Adds scaled sums of a span to those of the tile.
template <int kRows>
inline __attribute__((always_inline)) void add_scaled(const __m512 (&sums)[kRows][2],
                                                      const float* scales, float* totals) {
  const __m512 first = _mm512_loadu_ps(scales), second = _mm512_loadu_ps(scales + kHalfPanel);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    float* total = totals + row * kPanelColumns;
    _mm512_storeu_ps(total, _mm512_fmadd_ps(sums[row][0], first, _mm512_loadu_ps(total)));
    total += kHalfPanel;
    _mm512_storeu_ps(total, _mm512_fmadd_ps(sums[row][1], second, _mm512_loadu_ps(total)));
  }
}

/// Adds products of neighbouring pairs.
template <int kRows, typename Numbers>
inline __attribute__((always_inline)) void add_pairs(int64_t pairs, const uint8_t* codes,
                                                     int64_t prefetch, const Numbers& numbers,
                                                     RowPointers<kRows> rows,
                                                     __m512 (&sums)[kRows][2]) {
  for (; pairs >= kUnroll; pairs -= kUnroll) {
    constexpr int64_t kBytes = kUnroll * Numbers::kPairBytes;
#pragma GCC unroll 4
    for (int64_t line = 0; line < kBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(codes + line + prefetch), _MM_HINT_T1);
    multiply_pairs<kUnroll, kRows>(sums, rows, codes, numbers);
    codes += kBytes;
    rows.advance(kUnroll);
  }
  for (; pairs > 0; --pairs, codes += Numbers::kPairBytes) {
    multiply_pairs<1, kRows>(sums, rows, codes, numbers);
    rows.advance(1);
  }
}

/// Adds the products of all pairs to the sums of a tile: span by span, or, where numbers are scaled
/// before, all in registers.
template <typename Numbers, int kRows>
void multiply_rows(const CodeTile& tile) {
  const CodePanel& panel = *tile.panel;
  const int64_t stride = tile.a_stride * static_cast<int64_t>(sizeof(bf16));
  const uint8_t* codes = panel.codes + tile.begin * Numbers::kPairBytes;
  const float* scales = tile.scales;
  Numbers numbers(panel);
  __m512 sums[kRows][2];
  if (Numbers::kAreScaled) load_sums<kRows>(tile.sums, sums);
  int64_t group = group_of(panel, 2 * tile.begin);
  for (int64_t pair = tile.begin; pair < tile.end; ++group, scales += kPanelColumns) {
    const int64_t end = end_of_group(panel, group, tile.end);
    numbers.set_group(panel, group);
    for (int64_t count; pair < end; pair += count, codes += count * Numbers::kPairBytes) {
      count = std::min(end - pair, kSpanPairs);
      if (!Numbers::kAreScaled) clear_sums<kRows>(sums);
      const RowPointers<kRows> rows(tile.a + 2 * (pair - tile.begin), stride);
      add_pairs<kRows>(count, codes, tile.prefetch, numbers, rows, sums);
      if (!Numbers::kAreScaled) add_scaled<kRows>(sums, scales, tile.sums);
    }
  }
  if (Numbers::kAreScaled) store_sums<kRows>(sums, tile.sums);
}

using MultiplyRows = void (*)(const CodeTile&);

template <typename Numbers, int... kRows>
constexpr std::array<MultiplyRows, kTileRows> tile_table(std::integer_sequence<int, kRows...>) {
  return {multiply_rows<Numbers, kRows + 1>...};
}

template <typename Numbers>
void multiply_tiles(int64_t num_rows, const CodeTile& all) {
  static constexpr auto kTable = tile_table<Numbers>(std::make_integer_sequence<int, kTileRows>());
  const int64_t num_tiles = ceil_div(num_rows, kTileRows);
  CodeTile tile = all;
  for (int64_t index = 0; index < num_tiles; ++index) {
    const int64_t first = index * num_rows / num_tiles;
    const int64_t rows = (index + 1) * num_rows / num_tiles - first;
    tile.a = all.a + first * all.a_stride;
    tile.sums = all.sums + first * kPanelColumns;
    kTable[static_cast<size_t>(rows - 1)](tile);
    tile.prefetch = 0;  // once is enough
  }
}

void permute_all(int64_t rows, const Places& places, float* sums) {
  for (int64_t row = 0; row < rows; ++row, sums += kPanelColumns) permute(places, sums, sums);
}

template <typename Numbers>
void multiply_all(int64_t rows, const CodeTile& tile) {
  using Order = Orders<Numbers::kChunk>;
  if (tile.accumulate)
    permute_all(rows, Order::kInOrder, tile.sums);
  else
    std::fill_n(tile.sums, rows * kPanelColumns, 0.0f);
  multiply_tiles<Numbers>(rows, tile);
  permute_all(rows, Order::kInTile, tile.sums);
}

void multiply_tile(int64_t rows, const CodeTile& tile) {
  const CodeFormat& format = *tile.panel->format;
  if (!is_four_bits(format.kind)) return multiply_all<Bytes>(rows, tile);
  if (format.kind == CodeKind::kE2m1) return multiply_all<ScaledNibbles>(rows, tile);
  if (format.has_zeros) return multiply_all<NibblesAboveZeros>(rows, tile);
  multiply_all<Nibbles>(rows, tile);
}

template <CodeKind kKind>
void write_scales(const CodePanel& panel, int64_t begin, int64_t end, int64_t prefetch,
                  float* out) {
  using Order = Orders<is_four_bits(kKind) ? Nibbles::kChunk : Bytes::kChunk>;
  const int64_t first = group_of(panel, 2 * begin), last = group_of(panel, 2 * end - 2);
  const int64_t num_scales = panel.format->shares_scales ? 2 : kPanelColumns;
  const int64_t group_bytes = scale_bytes(kKind) * num_scales;
  const uint8_t* next = panel.scales + first * group_bytes + prefetch;
  for (int64_t group = first; group <= last; ++group, next += group_bytes, out += kPanelColumns) {
    _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
    if (kKind == CodeKind::kE2m1) continue;  // scales its numbers instead
    _mm512_storeu_ps(out, scales_of<kKind>(panel, group, 0));
    _mm512_storeu_ps(out + kHalfPanel, scales_of<kKind>(panel, group, 1));
    permute(Order::kInOrder, out, out);
  }
}

void scales(const CodePanel& panel, int64_t begin, int64_t end, int64_t prefetch, float* out) {
  switch (panel.format->kind) {
    case CodeKind::kInt4Float16:
      return write_scales<CodeKind::kInt4Float16>(panel, begin, end, prefetch, out);
    case CodeKind::kInt4BFloat16:
      return write_scales<CodeKind::kInt4BFloat16>(panel, begin, end, prefetch, out);
    case CodeKind::kE2m1:
      return write_scales<CodeKind::kE2m1>(panel, begin, end, prefetch, out);
    case CodeKind::kE2m1E4m3:
      return write_scales<CodeKind::kE2m1E4m3>(panel, begin, end, prefetch, out);
    case CodeKind::kE4m3:
      return write_scales<CodeKind::kE4m3>(panel, begin, end, prefetch, out);
    case CodeKind::kE4m3E8m0:
      return write_scales<CodeKind::kE4m3E8m0>(panel, begin, end, prefetch, out);
    case CodeKind::kInt8:
      return;  // never coded in panels
  }
}
#pragma GCC pop_options

bool takes(const CodeFormat& format) {
  static const bool has_lookups = __builtin_cpu_supports("avx512vbmi");
  return has_lookups && (has_spans(format) || is_exact(format));
}

constexpr CodeTileKernels kKernels{takes, scales, multiply_tile};

#elif !defined(__AVX2__)  // without vectors

bool takes(const CodeFormat& format) { return has_spans(format); }

void scales(const CodePanel& panel, int64_t begin, int64_t end, int64_t, float* out) {
  const int64_t first = group_of(panel, 2 * begin), last = group_of(panel, 2 * end - 2);
  for (int64_t group = first; group <= last; ++group)
    for (int64_t column = 0; column < kPanelColumns; ++column)
      *out++ = scale_at(panel, group, column);
}

float sum_of_span(const CodePanel& panel, const bf16* a, int64_t begin, int64_t end,
                  int64_t column) {
  float sum = 0.0f;
  const int64_t group = group_of(panel, 2 * begin);
  for (int64_t pair = begin; pair < end; ++pair)
    for (int64_t half_pair = 1; half_pair >= 0; --half_pair) {
      const int code = code_at(panel, pair, column, half_pair);
      const float x = to_float(a[2 * (pair - begin) + half_pair]);
      sum += x * number_of(panel, code, group, column);
    }
  return sum;
}

void multiply_tile(int64_t rows, const CodeTile& tile) {
  const CodePanel& panel = *tile.panel;
  const int64_t first_group = group_of(panel, 2 * tile.begin);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      float* total = tile.sums + row * kPanelColumns + column;
      if (!tile.accumulate) *total = 0.0f;
      for (int64_t pair = tile.begin; pair < tile.end;) {
        const int64_t stop = end_of_span(panel, pair, tile.end);
        const bf16* a = tile.a + row * tile.a_stride + 2 * (pair - tile.begin);
        const int64_t group = group_of(panel, 2 * pair) - first_group;
        *total += sum_of_span(panel, a, pair, stop, column) *
                  tile.scales[group * kPanelColumns + column];
        pair = stop;
      }
    }
}

constexpr CodeTileKernels kKernels{takes, scales, multiply_tile};

#else

// Here products widen weights to float32: decoding them costs little more.
bool takes(const CodeFormat&) { return false; }

constexpr CodeTileKernels kKernels{takes, nullptr, nullptr};

#endif

}  // namespace

RAYMOE_DEFINE_KERNELS(CodeTileKernels, code_tile_kernels) = kKernels;

}  // namespace raymoe
