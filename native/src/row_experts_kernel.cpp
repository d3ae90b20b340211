// Dot products of rows with rows of weights, in tiles of rows and outputs held in registers.
#include "raymoe/row_experts.h"

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "vec_f32.h"

namespace raymoe {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileOutputs = 4;  // 24 sums, 4 weights and a row in 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 3, kTileOutputs = 4;
#else
constexpr int kTileRows = 1, kTileOutputs = 1;
#endif

inline F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

/// Weights of type T and inputs in float32.
template <typename T>
struct Widened {
  using Input = float;
  using Vector = F32;
  static constexpr int64_t kStep = kLanes;
  template <typename Lanes>
  static Vector weights(const T* p, Lanes lanes) { return load(p, lanes); }
  template <typename Lanes>
  static Vector inputs(const float* p, Lanes lanes) { return load(p, lanes); }
  static F32 step(F32 sum, Vector input, Vector weight) { return multiply_add(input, weight, sum); }
  static void store(float* p, F32 x, Whole lanes) {
    raymoe::store(p, rounded_to<T>(x), lanes);
  }
  static void store(float* p, F32 x, Part lanes) { raymoe::store(p, rounded_to<T>(x), lanes); }
};

#if defined(__AVX512BF16__)
/// Pairs of bfloat16; vdpbf16ps reads and writes denormals as zero.
struct Pairs {
  using Input = bf16;
  using Vector = __m512bh;
  static constexpr int64_t kStep = 32;
  static Vector inputs(const bf16* p, Whole) {
    return reinterpret_cast<Vector>(_mm512_loadu_si512(p));
  }
  static Vector inputs(const bf16* p, Part part) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << part.count) - 1);
    return reinterpret_cast<Vector>(_mm512_maskz_loadu_epi16(mask, p));
  }
  template <typename Lanes>
  static Vector weights(const bf16* p, Lanes lanes) { return inputs(p, lanes); }
  static F32 step(F32 sum, Vector input, Vector weight) {
    return _mm512_dpbf16_ps(sum, input, weight);
  }
  template <typename Lanes>
  static void store(bf16* p, F32 x, Lanes lanes) { raymoe::store(p, x, lanes); }
};
#endif

template <typename T>
struct DotOf {
  using type = Widened<T>;
};
#if defined(__AVX512BF16__)
template <>
struct DotOf<bf16> {
  using type = Pairs;
};
#endif
template <typename T>
using Dot = typename DotOf<T>::type;

/// Brings the line of p[i] into L2; once for a line that several steps read.
template <int64_t kStep, typename W>
inline void prefetch([[maybe_unused]] const W* p, [[maybe_unused]] int64_t i) {
#if defined(__AVX2__)
  constexpr int64_t kLine = 64 / sizeof(W);
  if (kStep >= kLine || i % kLine == 0)
    _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
#endif
}

/// `next`: the weights of the next call at the same place, or null.
template <typename D, typename W, int kRows, int kOutputs, typename Lanes>
inline __attribute__((always_inline)) void step_tile(F32 (&sums)[kRows][kOutputs],
                                                     const typename D::Input* x, int64_t x_stride,
                                                     const W* weights, int64_t stride, int64_t i,
                                                     Lanes lanes, const W* next) {
  if (next != nullptr)
#pragma GCC unroll 8
    for (int output = 0; output < kOutputs; ++output)
      prefetch<D::kStep>(next + output * stride, i);
  typename D::Vector loaded[kOutputs];
#pragma GCC unroll 8
  for (int output = 0; output < kOutputs; ++output)
    loaded[output] = D::weights(weights + output * stride + i, lanes);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const typename D::Vector input = D::inputs(x + row * x_stride + i, lanes);
#pragma GCC unroll 8
    for (int output = 0; output < kOutputs; ++output)
      sums[row][output] = D::step(sums[row][output], input, loaded[output]);
  }
}

/// Inputs for which the weights of a few outputs stay in the first-level cache while rows pass by.
/// Sums of such chunks are added in order, so that the bits of a row are its own.
constexpr int64_t kChunk = 1024;

/// Adds the sum of the lanes of each output to `out`.
template <int kOutputs>
inline void add_sums(const F32 (&sums)[kOutputs], float* out) {
#if defined(__AVX2__)
  if constexpr (kOutputs == 4) {
#if defined(__AVX512F__)
    const auto pairs = [](F32 a, F32 b) {
      return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    };
    const __m512d first = _mm512_castps_pd(pairs(sums[0], sums[1]));
    const __m512d second = _mm512_castps_pd(pairs(sums[2], sums[3]));
    const F32 fours = add(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                          _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
#else
    const __m256 half =
        _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
#endif
    const __m128 all = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), all));
    return;
  }
#endif
  for (int output = 0; output < kOutputs; ++output) out[output] += sum_of(sums[output]);
}

/// Adds the dots of some rows with `kOutputs` rows of weights; `D` reads both.
template <typename D, int kRows, int kOutputs, typename W>
void dot_tile(const typename D::Input* x, int64_t x_stride, const W* weights, int64_t stride,
              int64_t inputs, float* out, const W* next) {
  F32 sums[kRows][kOutputs];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int output = 0; output < kOutputs; ++output) sums[row][output] = splat(0.0f);
  int64_t i = 0;
  for (; i + D::kStep <= inputs; i += D::kStep)
    step_tile<D>(sums, x, x_stride, weights, stride, i, Whole{}, next);
  if (i < inputs) step_tile<D>(sums, x, x_stride, weights, stride, i, Part{inputs - i}, next);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) add_sums(sums[row], out + row * kRowOutputs);
}

template <typename D, int kOutputs, typename W, int... kRows>
constexpr auto tile_table(std::integer_sequence<int, kRows...>) {
  return std::array{dot_tile<D, kRows + 1, kOutputs, W>...};
}

/// Rows in tiles of about the same size; the first one prefetches.
template <typename D, int kOutputs, typename W>
void dot_rows(const typename D::Input* x, int64_t x_stride, int64_t num_rows, const W* weights,
              int64_t stride, int64_t inputs, float* out, const W* next) {
  static constexpr auto kTable =
      tile_table<D, kOutputs, W>(std::make_integer_sequence<int, kTileRows>());
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = tile * num_rows / num_tiles;
    const int64_t count = (tile + 1) * num_rows / num_tiles - row;
    kTable[static_cast<size_t>(count - 1)](x + row * x_stride, x_stride, weights, stride, inputs,
                                           out + row * kRowOutputs, tile == 0 ? next : nullptr);
  }
}

/// A few outputs of all rows, over a chunk of inputs. Weights that many rows read are widened once;
/// that is exact, so the bits of a row do not depend on their number.
template <typename T, int kOutputs>
void dot_chunk(const RowDots& args, int64_t begin, int64_t end, int64_t output, int64_t i,
               int64_t inputs) {
  using D = Dot<T>;
  const auto* x = static_cast<const typename D::Input*>(args.x) + begin * args.x_stride + i;
  const T* weights = static_cast<const T*>(args.weights) + output * args.inputs + i;
  const T* next = static_cast<const T*>(args.next);
  if (next != nullptr) next += output * args.inputs + i;
  float* out = args.sums + output;
  if constexpr (!std::is_same_v<T, typename D::Input>) {
    if (end - begin > 2 * kTileRows) {
      float widened[kOutputs][kChunk];
      for (int row = 0; row < kOutputs; ++row)
        for_lanes(inputs, [&](int64_t at, auto lanes) {
          if (next != nullptr) prefetch<kLanes>(next + row * args.inputs, at);
          store(widened[row] + at, load(weights + row * args.inputs + at, lanes), lanes);
        });
      return dot_rows<Dot<float>, kOutputs, float>(x, args.x_stride, end - begin, &widened[0][0],
                                                   kChunk, inputs, out, nullptr);
    }
  }
  dot_rows<D, kOutputs, T>(x, args.x_stride, end - begin, weights, args.inputs, inputs, out, next);
}

template <typename T>
void dots(const RowDots& args, int64_t begin, int64_t end) {
  std::fill_n(args.sums, (end - begin) * kRowOutputs, 0.0f);
  for (int64_t i = 0; i < args.inputs; i += kChunk) {
    const int64_t inputs = std::min(kChunk, args.inputs - i);
    int64_t output = 0;
    for (; output + kTileOutputs <= args.num_outputs; output += kTileOutputs)
      dot_chunk<T, kTileOutputs>(args, begin, end, output, i, inputs);
    for (; output < args.num_outputs; ++output)
      dot_chunk<T, 1>(args, begin, end, output, i, inputs);
  }
}

/// x * sigmoid(gain * x * (1 + cubic * x^2))
inline F32 activate(F32 x, const Gating& gating) {
  F32 power = mul(x, splat(-gating.gain));
  if (gating.cubic != 0.0f)
    power = mul(power, add(mul(mul(x, splat(gating.cubic)), x), splat(1.0f)));
  return div(x, add(splat(1.0f), exp_of(power)));
}

template <typename T>
void gate(const RowGate& args, int64_t begin, int64_t end) {
  using D = Dot<T>;
  auto* out = static_cast<typename D::Input*>(args.out);
  const F32 limit = splat(args.gating.limit), minimum = splat(-args.gating.limit);
  const F32 gate_limit = splat(args.gating.gate_limit), offset = splat(args.gating.offset);
  for (int64_t row = begin; row < end; ++row)
    for_lanes(args.num_outputs, [&](int64_t i, auto lanes) {
      F32 gate = load(args.gate + row * kRowOutputs + i, lanes);
      F32 up = load(args.up + row * kRowOutputs + i, lanes);
      if (args.gate_bias != nullptr) {
        gate = add(gate, load(args.gate_bias + i, lanes));
        up = add(up, load(args.up_bias + i, lanes));
      }
      // Operand order: min and max return their second operand when one is NaN.
      gate = min(gate_limit, gate);
      up = add(max(minimum, min(limit, up)), offset);
      D::store(out + row * args.out_stride + i, mul(activate(gate, args.gating), up), lanes);
    });
}

template <typename T>
void gather(const RowGather& args, int64_t begin, int64_t end) {
  using Input = typename Dot<T>::Input;
  for (int64_t row = begin; row < end; ++row) {
    const T* source = static_cast<const T*>(args.source) + args.rows[row] * args.source_stride;
    Input* out = static_cast<Input*>(args.out) + (row - begin) * args.out_stride;
    if constexpr (std::is_same_v<T, Input>)
      std::copy_n(source, args.size, out);
    else
      for_lanes(args.size, [&](int64_t i, auto lanes) { store(out + i, load(source + i, lanes), lanes); });
  }
}

}  // namespace

RAYMOE_DEFINE_KERNELS(RowKernels, row_kernels) = {
    RAYMOE_FLOAT_KERNELS(dots),
    RAYMOE_FLOAT_KERNELS(gate),
    RAYMOE_FLOAT_KERNELS(gather),
    sizeof(Dot<bf16>::Input),
};

}  // namespace raymoe
