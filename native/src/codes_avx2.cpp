// Decoding of panels on AVX2: eight elements at a time, 4 columns x 2 inputs, as on AVX512.
#include <algorithm>

#include "code_scales-inl.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

constexpr int kVectors = 8;  // of 4 columns x 2 inputs
constexpr int64_t kPrefetchBytes = 1024;

/// What a group does to the numbers of its codes: number * factor + shift, [column][input].
struct GroupScales {
  alignas(32) float factor[2 * kPanelColumns];
  alignas(32) float shift[2 * kPanelColumns];

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
  if constexpr (kKind == CodeKind::kE4m3) return e4m3_numbers(codes + 8 * v);
  const I32 bytes = _mm256_cvtepu8_epi32(load_8(codes + kHalfPanel * (v / 4) + 8 * (v % 2)));
  const I32 nibbles = v % 4 < 2 ? bit_and(bytes, splat(15)) : shift_right<4>(bytes);
  return kKind == CodeKind::kE2m1 ? e2m1_numbers(nibbles) : to_f32(nibbles);
}

template <CodeKind kKind>
inline void decode_pairs(const CodePanel& panel, const GroupScales& scales, int64_t begin,
                         int64_t end, bf16* out) {
  constexpr bool kHasZero = kKind == CodeKind::kInt4Float16 || kKind == CodeKind::kInt4BFloat16;
  const int64_t bytes = pair_bytes(kKind);
  const uint8_t* codes = panel.codes + begin * bytes;
  for (int64_t pair = begin; pair < end; ++pair, codes += bytes)
    for (int v = 0; v < kVectors; ++v, out += kLanes) {
      if (v == 0) _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes), _MM_HINT_T0);
      const F32 number = load_numbers<kKind>(codes, v);
      const F32 factor = load(scales.factor + kLanes * v, Whole{});
      const F32 shift = load(scales.shift + kLanes * v, Whole{});
      // (code - zero) * factor is exact: so is code * factor - zero * factor, fused.
      store(out, kHasZero ? _mm256_fmadd_ps(number, factor, shift) : mul(number, factor), Whole{});
    }
}

template <CodeKind kKind>
void decode(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  GroupScales scales;
  int64_t groups[2] = {-1, -1};
  while (begin < end) {
    const int64_t stop = end_of_groups(panel, begin, end);
    for (int input = 0; input < 2; ++input) {
      const int64_t group = group_of(panel, 2 * begin + input);
      if (group != groups[input]) scales.set(panel, group, input);
      groups[input] = group;
    }
    decode_pairs<kKind>(panel, scales, begin, stop, out);
    out += (stop - begin) * 2 * kPanelColumns;
    begin = stop;
  }
}

}  // namespace

void decode_panel_avx2(const CodePanel& panel, int64_t begin, int64_t end, bf16* out) {
  switch (panel.format->kind) {
    case CodeKind::kInt4Float16:
      return decode<CodeKind::kInt4Float16>(panel, begin, end, out);
    case CodeKind::kInt4BFloat16:
      return decode<CodeKind::kInt4BFloat16>(panel, begin, end, out);
    case CodeKind::kE2m1:
      return decode<CodeKind::kE2m1>(panel, begin, end, out);
    case CodeKind::kE4m3:
      return decode<CodeKind::kE4m3>(panel, begin, end, out);
  }
}

}  // namespace raymoe
