// Decoding of panels of codes. Without vectors it is the readable reference of the others.
#include "code_values.h"

namespace raymoe {
namespace {

#if defined(__AVX512F__)

// Sixteen elements at a time, 8 columns x 2 inputs, looked up in a table of sixteen numbers or
// widened through float16, scaled in float32 and rounded in pairs of vectors. Everything before the
// rounding is exact but the product with a float32 scale.

/// The bfloat16 nearest to two vectors.
inline __m512i rounded(__m512 left, __m512 right) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right, left));
#else
  const bf16* type = nullptr;
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(type, left)), narrow(type, right), 1);
#endif
}

constexpr int kVectors = 4;  // of 8 columns x 2 inputs
constexpr int64_t kPrefetchBytes = 1024;

/// What a group does to the numbers of its codes: number * factor + shift.
struct GroupScales {
  __m512 factor[kVectors];
  __m512 shift[kVectors];
};

/// Columns 0 to 7, or 8 to 15, of sixteen: each in two neighbouring lanes.
inline __m512 doubled(__m512 columns, int upper) {
  const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8 * upper)), columns);
}

template <CodeKind kKind>
GroupScales load_group(const CodePanel& panel, int64_t group) {
  GroupScales scales;
  for (int half = 0; half < 2; ++half) {
    __m512 factor = scales_of<kKind>(panel, group, half);
    // The numbers of E4M3 lack 256; see `e4m3_halves`.
    if constexpr (!is_four_bits(kKind)) factor = _mm512_mul_ps(factor, _mm512_set1_ps(256.0f));
    const __m512 zero = panel.zeros == nullptr ? _mm512_set1_ps(kInt4Zero)
                                               : load_zeros(panel.zeros + group * kHalfPanel, half);
    const __m512 shift = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), zero), factor);
    for (int upper = 0; upper < 2; ++upper) {
      scales.factor[2 * half + upper] = doubled(factor, upper);
      scales.shift[2 * half + upper] = doubled(shift, upper);
    }
  }
  return scales;
}

/// The first inputs of pairs from one group, the second ones from another.
inline GroupScales merged(const GroupScales& first, const GroupScales& second) {
  GroupScales scales;
  for (int v = 0; v < kVectors; ++v) {
    scales.factor[v] = _mm512_mask_mov_ps(first.factor[v], 0xaaaa, second.factor[v]);
    scales.shift[v] = _mm512_mask_mov_ps(first.shift[v], 0xaaaa, second.shift[v]);
  }
  return scales;
}

template <CodeKind kKind>
inline __m512 number_table() {
  if constexpr (kKind == CodeKind::kE2m1 || kKind == CodeKind::kE2m1E4m3)
    return _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
  return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

template <CodeKind kKind>
inline void load_numbers(const uint8_t* codes, __m512 (&numbers)[kVectors]) {
  for (int half = 0; half < 2; ++half) {
    if constexpr (!is_four_bits(kKind)) {
      const __m512i halves = e4m3_halves(load_256(codes + 32 * half));
      numbers[2 * half] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
      numbers[2 * half + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    } else {
      // The permutation looks at four bits of its indices.
      const __m512i bytes = _mm512_cvtepu8_epi32(load_128(codes + 16 * half));
      const __m512 table = number_table<kKind>();
      numbers[2 * half] = _mm512_permutexvar_ps(bytes, table);
      numbers[2 * half + 1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    }
  }
}

template <CodeKind kKind>
inline __m512 scaled(__m512 number, const GroupScales& scales, int v) {
  if constexpr (is_int4(kKind)) return _mm512_fmadd_ps(number, scales.factor[v], scales.shift[v]);
  return _mm512_mul_ps(number, scales.factor[v]);
}

template <CodeKind kKind>
inline void decode_pairs(const CodePanel& panel, const GroupScales& scales, int64_t begin,
                         int64_t end, bf16* out) {
  const int64_t bytes = pair_bytes(kKind);
  const uint8_t* codes = panel.codes + begin * bytes;
  for (int64_t pair = begin; pair < end; ++pair, codes += bytes, out += 2 * kPanelColumns) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes), _MM_HINT_T0);
    __m512 numbers[kVectors];
    load_numbers<kKind>(codes, numbers);
    for (int half = 0; half < 2; ++half) {
      const __m512 left = scaled<kKind>(numbers[2 * half], scales, 2 * half);
      const __m512 right = scaled<kKind>(numbers[2 * half + 1], scales, 2 * half + 1);
      _mm512_storeu_si512(out + 32 * half, rounded(left, right));
    }
  }
}

template <CodeKind kKind>
void decode(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  while (begin < end) {
    const int64_t group = group_of(panel, 2 * begin), second = group_of(panel, 2 * begin + 1);
    GroupScales scales = load_group<kKind>(panel, group);
    if (second != group) scales = merged(scales, load_group<kKind>(panel, second));
    const int64_t stop = end_of_groups(panel, begin, end);
    decode_pairs<kKind>(panel, scales, begin, stop, out);
    out += (stop - begin) * 2 * kPanelColumns;
    begin = stop;
  }
}

#elif defined(__AVX2__)

// Eight elements at a time, 4 columns x 2 inputs.

constexpr int kVectors = 8;  // of 4 columns x 2 inputs
constexpr int64_t kPrefetchBytes = 1024;

inline __m128i load_8(const uint8_t* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}

/// E4M3 is float16 without its upper exponent bit and seven of its fraction: moved there, the
/// number over 256, subnormals included.
inline F32 e4m3_numbers(const uint8_t* codes) {
  const __m128i high = _mm_slli_epi16(_mm_cvtepu8_epi16(load_8(codes)), 8);
  const __m128i largest = _mm_set1_epi16(0x7f00);
  const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(high, largest), largest);
  const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(int16_t(0xbfff)));
  return _mm256_cvtph_ps(_mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), is_nan));
}

inline F32 powers_of_two(const uint8_t* exponents) {
  const I32 bits = shift_left<23>(_mm256_cvtepu8_epi32(load_8(exponents)));
  return from_bits(_mm256_max_epi32(bits, splat(0x00400000)));
}

/// Eight scales of one byte each, of neighbouring columns; those of FP8 times 256.
template <CodeKind kKind>
inline F32 load_scales(const CodePanel& panel, int64_t group, int64_t column) {
  const uint8_t* scales = panel.scales + kPanelColumns * group + column;
  if constexpr (kKind == CodeKind::kE4m3E8m0) return mul(powers_of_two(scales), splat(256.0f));
  const int64_t half = column / kHalfPanel;
  return div(mul(mul(e4m3_numbers(scales), splat(256.0f)), splat(float_at(panel.factors, 2 * half))),
             splat(float_at(panel.factors, 2 * half + 1)));
}

/// What a group does to the numbers of its codes: number * factor + shift, [column][input].
struct GroupScales {
  alignas(32) float factor[2 * kPanelColumns];
  alignas(32) float shift[2 * kPanelColumns];

  /// Set the scales of both inputs of pairs, where each column has a scale of one byte.
  template <CodeKind kKind>
  void set_both(const CodePanel& panel, int64_t group) {
    for (int64_t column = 0; column < kPanelColumns; column += kLanes) {
      const F32 scales = load_scales<kKind>(panel, group, column);
      const F32 low = _mm256_unpacklo_ps(scales, scales), high = _mm256_unpackhi_ps(scales, scales);
      store(factor + 2 * column, _mm256_permute2f128_ps(low, high, 0x20), Whole{});
      store(factor + 2 * column + kLanes, _mm256_permute2f128_ps(low, high, 0x31), Whole{});
    }
  }

  /// Set the scales of the first or second inputs of pairs.
  void set(const CodePanel& panel, int64_t group, int input) {
    // The numbers of E4M3 lack 256; see `e4m3_numbers`.
    const float scale = is_four_bits(panel.format->kind) ? 1.0f : 256.0f;
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const float zero = static_cast<float>(zero_at(panel, group, column));
      const float factor = scale * scale_at(panel, group, column);
      this->factor[2 * column + input] = factor;
      shift[2 * column + input] = -zero * factor;
    }
  }
};

/// The sign is the fourth bit.
inline F32 e2m1_numbers(I32 codes) {
  const F32 magnitude =
      _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), codes);
  const I32 sign = shift_left<28>(bit_and(codes, splat(8)));
  return from_bits(bit_xor(bits_of(magnitude), sign));
}

/// Vector `v` of a pair; four bits hold two vectors of columns, and two above them.
template <CodeKind kKind>
inline F32 load_numbers(const uint8_t* codes, int v) {
  if constexpr (!is_four_bits(kKind)) return e4m3_numbers(codes + 8 * v);
  const I32 bytes = _mm256_cvtepu8_epi32(load_8(codes + kHalfPanel * (v / 4) + 8 * (v % 2)));
  const I32 nibbles = v % 4 < 2 ? bit_and(bytes, splat(15)) : shift_right<4>(bytes);
  return is_int4(kKind) ? to_f32(nibbles) : e2m1_numbers(nibbles);
}

template <CodeKind kKind>
inline void decode_pairs(const CodePanel& panel, const GroupScales& scales, int64_t begin,
                         int64_t end, bf16* out) {
  const int64_t bytes = pair_bytes(kKind);
  const uint8_t* codes = panel.codes + begin * bytes;
  for (int64_t pair = begin; pair < end; ++pair, codes += bytes)
    for (int v = 0; v < kVectors; ++v, out += kLanes) {
      if (v == 0) _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes), _MM_HINT_T0);
      const F32 number = load_numbers<kKind>(codes, v);
      const F32 factor = load(scales.factor + kLanes * v, Whole{});
      const F32 shift = load(scales.shift + kLanes * v, Whole{});
      // (code - zero) * factor is exact: so is code * factor - zero * factor, fused.
      store(out, is_int4(kKind) ? _mm256_fmadd_ps(number, factor, shift) : mul(number, factor),
            Whole{});
    }
}

template <CodeKind kKind>
void decode(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  GroupScales scales;
  int64_t groups[2] = {-1, -1};
  while (begin < end) {
    const int64_t stop = end_of_groups(panel, begin, end);
    const int64_t first = group_of(panel, 2 * begin), second = group_of(panel, 2 * begin + 1);
    constexpr bool kIsMicro = kKind == CodeKind::kE2m1E4m3 || kKind == CodeKind::kE4m3E8m0;
    if constexpr (kIsMicro)
      if (first == second && !panel.format->shares_scales) {
        scales.set_both<kKind>(panel, first);
        groups[0] = groups[1] = first;
      }
    if (first != groups[0]) scales.set(panel, first, 0);
    if (second != groups[1]) scales.set(panel, second, 1);
    groups[0] = first, groups[1] = second;
    decode_pairs<kKind>(panel, scales, begin, stop, out);
    out += (stop - begin) * 2 * kPanelColumns;
    begin = stop;
  }
}

#else  // without vectors

void decode_panel(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  for (int64_t pair = begin; pair < end; ++pair)
    for (int64_t column = 0; column < kPanelColumns; ++column)
      for (int64_t half_pair = 0; half_pair < 2; ++half_pair) {
        const int64_t group = group_of(panel, 2 * pair + half_pair);
        const int code = code_at(panel, pair, column, half_pair);
        *out++ = from_float<bf16>(number_of(panel, code, group, column) *
                                  scale_at(panel, group, column));
      }
}

#endif  // __AVX512F__

#if defined(__AVX2__)
void decode_panel(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  switch (panel.format->kind) {
    case CodeKind::kInt4Float16:
      return decode<CodeKind::kInt4Float16>(panel, begin, end, out);
    case CodeKind::kInt4BFloat16:
      return decode<CodeKind::kInt4BFloat16>(panel, begin, end, out);
    case CodeKind::kE2m1:
      return decode<CodeKind::kE2m1>(panel, begin, end, out);
    case CodeKind::kE2m1E4m3:
      return decode<CodeKind::kE2m1E4m3>(panel, begin, end, out);
    case CodeKind::kE4m3:
      return decode<CodeKind::kE4m3>(panel, begin, end, out);
    case CodeKind::kE4m3E8m0:
      return decode<CodeKind::kE4m3E8m0>(panel, begin, end, out);
    case CodeKind::kInt8:
      return;  // never decoded
  }
}
#endif

}  // namespace

RAYMOE_DEFINE_KERNELS(CodeKernels, code_kernels) = {decode_panel};

}  // namespace raymoe
