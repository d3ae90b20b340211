// Panels of codes: what is packed is decoded and multiplied, the same on every instruction set, in
// memory of exactly the promised size so that the address sanitizer sees every read and write outside.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "gemm.h"
#include "raymoe/codes.h"
#include "raymoe/isa.h"

using namespace raymoe;

namespace {

uint32_t random_state = 1;

uint32_t random_bits() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

struct Free {
  void operator()(uint8_t* data) const { std::free(data); }
};
using Packed = std::unique_ptr<uint8_t, Free>;

struct Matrix {
  CodeFormat format;
  int64_t outputs, inputs, num_groups, scale_rows;
  std::vector<uint8_t> codes, scales, zeros;
  std::vector<int32_t> order;
  float multiplier = 1, divisor = 1;

  Matrix(const CodeFormat& stored, int64_t num_outputs, int64_t num_inputs)
      : format(stored), outputs(num_outputs), inputs(num_inputs) {
    num_groups = ceil_div(inputs, format.group_size);
    scale_rows = format.shares_scales ? 128 : 1;
    const uint32_t limit = is_four_bits(format.kind) ? 15 : 0x7e;
    for (int64_t i = 0; i < outputs * inputs; ++i)
      codes.push_back(static_cast<uint8_t>(random_bits() % (limit + 1)));
    for (int64_t i = 0; i < ceil_div(outputs, scale_rows) * num_groups; ++i) add_scale();
    for (int64_t i = 0; i < outputs * num_groups; ++i)
      zeros.push_back(static_cast<uint8_t>(random_bits() % 16));
    for (int64_t i = 0; i < inputs; ++i)
      order.push_back(static_cast<int32_t>(random_bits() % static_cast<uint32_t>(num_groups)));
    (random_bits() % 2 ? multiplier : divisor) = static_cast<float>(1 + random_bits() % 1000) / 96;
  }

  void add_scale() {
    const float value = static_cast<float>(1 + random_bits() % 100) / 64;
    const bool is_e4m3 = has_factors(format.kind);  // else E8M0
    uint8_t bytes[4] = {
        static_cast<uint8_t>(is_e4m3 ? random_bits() % 127 : 100 + random_bits() % 50)};
    const bf16 half_brain = from_float<bf16>(value);
    const fp16 half = from_float<fp16>(value);
    if (format.kind == CodeKind::kInt4BFloat16) std::memcpy(bytes, &half_brain, 2);
    if (format.kind == CodeKind::kInt4Float16) std::memcpy(bytes, &half, 2);
    if (format.kind == CodeKind::kE4m3) std::memcpy(bytes, &value, 4);
    scales.insert(scales.end(), bytes, bytes + scale_bytes(format.kind));
  }

  CodeSource source() const {
    return {codes.data(),
            outputs,
            inputs,
            inputs,
            1,
            scales.data(),
            num_groups,
            scale_rows,
            num_groups,
            1,
            format.has_zeros ? zeros.data() : nullptr,
            num_groups,
            1,
            format.has_order ? order.data() : nullptr,
            multiplier,
            divisor};
  }

  Packed pack() const {
    const int64_t bytes = packed_codes_bytes(format, outputs, inputs);
    CHECK(bytes % 64 == 0);
    Packed packed(static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
    std::memset(packed.get(), 0xff, static_cast<size_t>(bytes));
    pack_codes(format, source(), packed.get());
    return packed;
  }
};

using Decode = void (*)(const CodePanel&, int64_t, int64_t, bf16*);

std::vector<bf16> decode_panel(Decode decode, const CodePanel& panel, int64_t begin, int64_t end) {
  std::vector<bf16> out(static_cast<size_t>((end - begin) * kPanelColumns * 2));
  decode(panel, begin, end, out.data());
  return out;
}

void check_same(const Matrix& matrix) {
  const Packed packed = matrix.pack();
  const CodeLayout layout(matrix.format, matrix.inputs);
  const int64_t pairs = num_pairs(matrix.inputs);
  for (int64_t index = 0; index < num_panels(matrix.outputs); ++index) {
    const CodePanel panel = code_panel(matrix.format, layout, packed.get(), index);
    const auto want = decode_panel(code_kernels_scalar.decode, panel, 0, pairs);
    for (int64_t middle : {int64_t{0}, pairs / 3, pairs}) {
      auto got = decode_panel(code_kernels().decode, panel, 0, middle);
      const auto rest = decode_panel(code_kernels().decode, panel, middle, pairs);
      got.insert(got.end(), rest.begin(), rest.end());
      for (size_t i = 0; i < want.size(); ++i) CHECK(to_float(got[i]) == to_float(want[i]));
    }
  }
}

/// Codes of INT4 without zero points are numbers from -8 to 7 times the scale of their group.
void check_numbers() {
  const Matrix matrix({CodeKind::kInt4Float16, 6, false, false, false}, 37, 21);
  const Packed packed = matrix.pack();
  const CodeLayout layout(matrix.format, matrix.inputs);
  for (int64_t output = 0; output < matrix.outputs; ++output) {
    const CodePanel panel = code_panel(matrix.format, layout, packed.get(), output / 32);
    const auto got = decode_panel(code_kernels().decode, panel, 0, num_pairs(matrix.inputs));
    for (int64_t input = 0; input < matrix.inputs; ++input) {
      fp16 scale;
      std::memcpy(&scale, &matrix.scales[static_cast<size_t>(2 * (output * 4 + input / 6))], 2);
      const int code = matrix.codes[static_cast<size_t>(output * matrix.inputs + input)];
      const float want = to_float(from_float<bf16>(static_cast<float>(code - 8) * to_float(scale)));
      const int64_t place = (input / 2 * kPanelColumns + output % 32) * 2 + input % 2;
      CHECK(to_float(got[static_cast<size_t>(place)]) == want);
    }
  }
}

/// Sums of all rows and a panel, on the active instruction set.
std::vector<float> multiply(const PackedWeight& weight, int64_t index, const std::vector<bf16>& x,
                            int64_t rows) {
  std::vector<float> sums(static_cast<size_t>(rows * kPanelColumns));
  std::vector<char> scratch(kScratchBytes);
  const int64_t pairs = num_pairs(weight.inputs);
  const PanelSource panel = panel_of(weight, index);
  int64_t done = 0;
  multiply_panel(gemm_kernels(),
                 {x.data(), 2 * pairs, rows, panel, pairs, panel.begin(), sums.data(),
                  scratch.data()},
                 [&](int64_t, int64_t count, const float*) { done += count; });
  CHECK(done == rows);
  return sums;
}

/// Products are those of the kernels without vectors, but for the rounding of weights where they
/// are decoded.
void check_products(const Matrix& matrix, int64_t rows) {
  const Packed packed = matrix.pack();
  const PackedWeight weight{packed.get(), &matrix.format, matrix.outputs, matrix.inputs};
  const int64_t pairs = num_pairs(matrix.inputs);
  const auto width = static_cast<size_t>(2 * pairs);
  std::vector<bf16> x(static_cast<size_t>(rows) * width);
  for (size_t i = 0; i < x.size(); ++i) {
    const float value = static_cast<float>(random_bits() % 512) / 256 - 1;
    const bool is_zero = static_cast<int64_t>(i % width) >= matrix.inputs;
    x[i] = from_float<bf16>(is_zero ? 0.0f : value);
  }
  const CodeLayout layout(matrix.format, matrix.inputs);
  const Isa isa = active_isa();
  const double rounding = is_decoded(matrix.format) ? 1.0 / 256 : 1e-6;
  for (int64_t index = 0; index < num_panels(matrix.outputs); ++index) {
    const auto got = multiply(weight, index, x, rows);
    set_isa(Isa::kScalar);
    const auto want = multiply(weight, index, x, rows);
    const auto decoded =
        decode_panel(code_kernels().decode,
                     code_panel(matrix.format, layout, packed.get(), index), 0, pairs);
    set_isa(isa);
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t row = i / kPanelColumns, column = i % kPanelColumns;
      double size = 0;
      for (size_t input = 0; input < width; ++input)
        size += std::fabs(
            double{to_float(x[row * width + input])} *
            double{to_float(decoded[(input / 2 * kPanelColumns + column) * 2 + input % 2])});
      CHECK_NEAR(got[i], want[i], rounding * size + 1e-30);
    }
  }
}

void check_all() {
  check_numbers();
  for (CodeKind kind : {CodeKind::kInt4Float16, CodeKind::kInt4BFloat16, CodeKind::kE2m1,
                        CodeKind::kE2m1E4m3, CodeKind::kE4m3, CodeKind::kE4m3E8m0})
    for (int64_t group : {int64_t{1}, int64_t{3}, int64_t{32}, int64_t{400}})
      for (bool is_odd : {false, true})
        for (bool flag : {false, true}) {
          const bool is_int = is_int4(kind);
          const CodeFormat format{kind, group, flag && !is_int, flag && is_int, is_odd && flag};
          check_same(Matrix(format, is_odd ? 33 : 64, is_odd ? 77 : 300));
          check_products(Matrix(format, is_odd ? 33 : 32, is_odd ? 77 : 300), is_odd ? 5 : 27);
        }
  for (int64_t rows = 1; rows <= 14; ++rows) {
    const CodeFormat int4{CodeKind::kInt4BFloat16, 24, false, rows % 2 == 0, false};
    check_products(Matrix(int4, 20, 75), rows);
    check_products(Matrix({CodeKind::kE4m3, 128, true, false, false}, 32, 200), rows);
  }
  check_products(Matrix({CodeKind::kE2m1E4m3, 16, false, false, false}, 32, 2 * 4096 + 7), 1);
}

}  // namespace

int main() {
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    check_all();
  }
  return 0;
}
