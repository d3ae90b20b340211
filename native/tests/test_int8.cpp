// Tiles of int8 on every instruction set, by each of its kernels, against sums of 64 bits; in memory
// of exactly the promised size so that the address sanitizer sees every read and write outside.
#include <cstring>
#include <vector>

#include "check.h"
#include "gemm.h"
#include "raymoe/isa.h"

using namespace raymoe;

namespace {

uint32_t random_state = 1;

uint32_t random_bits() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

using Tile = void (*)(int64_t, const Int8Tile&);

struct Case {
  int64_t rows, words, stride;  // stride in bytes
  std::vector<int8_t> a;
  std::vector<uint8_t> panel;
  std::vector<Int8Row> found;
  std::vector<float> scales;

  Case(int64_t num_rows, int64_t num_words)
      : rows(num_rows), words(num_words), stride(4 * num_words + 8) {
    a.resize(static_cast<size_t>((rows - 1) * stride + 4 * words));
    for (int8_t& number : a) number = static_cast<int8_t>(static_cast<int>(random_bits() % 255) - 127);
    for (int64_t i = 0; i < words * 4 * kPanelColumns; ++i)
      panel.push_back(static_cast<uint8_t>(random_bits() % 256));
    for (int64_t column = 0; column < kPanelColumns; ++column)
      scales.push_back(0.01f * static_cast<float>(1 + random_bits() % 100));
    for (int64_t row = 0; row < rows; ++row) {
      int32_t sum = 0;
      for (int64_t i = 0; i < 4 * words; ++i) sum += at(row, i);
      found.push_back({0.5f + static_cast<float>(row), -128 * sum});
    }
  }

  int at(int64_t row, int64_t input) const {
    return a[static_cast<size_t>(row * stride + input)];
  }

  float exact(int64_t row, int64_t column) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < 4 * words; ++i)
      sum += at(row, i) *
             (panel[static_cast<size_t>((i / 4 * kPanelColumns + column) * 4 + i % 4)] - 128);
    return static_cast<float>(sum) * scales[static_cast<size_t>(column)] *
           found[static_cast<size_t>(row)].scale;
  }

  /// In two blocks where there is more than a word.
  std::vector<float> multiply(Tile tile) const {
    std::vector<float> sums(static_cast<size_t>(rows * kPanelColumns));
    const int64_t middle = words / 3;
    for (int64_t begin = 0; begin < words;) {
      const int64_t end = begin < middle ? middle : words;
      const GemmTile block{reinterpret_cast<const bf16*>(a.data() + 4 * begin),
                           stride / 2,
                           reinterpret_cast<const bf16*>(panel.data() + begin * 4 * kPanelColumns),
                           end - begin,
                           sums.data(),
                           begin > 0,
                           nullptr,
                           0};
      tile(rows, {block, found.data(), scales.data(), end == words});
      begin = end;
    }
    return sums;
  }
};

void check_tiles(Tile tile) {
  for (int64_t words : {1, 2, 5, 16, 127, 128, 129, 300})
    for (int64_t rows = 1; rows <= kTileRows; ++rows) {
      const Case product(rows, words);
      const std::vector<float> sums = product.multiply(tile);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < kPanelColumns; ++column)
          CHECK(sums[static_cast<size_t>(row * kPanelColumns + column)] ==
                product.exact(row, column));
    }
}

void check_row(int64_t inputs, int64_t run) {
  std::vector<bf16> row;
  std::vector<float> x, floats(static_cast<size_t>(inputs));
  for (int64_t i = 0; i < inputs; ++i) {
    row.push_back(from_float<bf16>(static_cast<float>(random_bits() % 2001) - 1000.0f));
    x.push_back(to_float(row.back()));
  }
  rotate_runs(x.data(), inputs, run);
  float largest = 0.0f;
  for (const float number : x) largest = std::fmax(largest, std::fabs(number));
  std::vector<int8_t> out(static_cast<size_t>(ceil_div(inputs, 16) * 16), 99);
  Int8Row found{};
  int8_kernels().quantise({row.data(), inputs, run}, floats.data(), out.data(), &found);
  CHECK(found.scale == largest / 127.0f);
  x.resize(out.size());  // with zeros
  int32_t sum = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    CHECK(out[i] == static_cast<int>(std::nearbyint(x[i] * (127.0f / largest))));
    sum += out[i];
  }
  CHECK(found.start == -128 * sum);
}

void check_rows() {
  for (int64_t inputs : {1, 7, 8, 9, 15, 16, 17, 100}) check_row(inputs, 1);
  for (int64_t inputs : {2, 4, 24, 48, 64, 96, 384, 640}) check_row(inputs, input_run(inputs));
}

}  // namespace

int main() {
  for (Isa isa : supported_isas()) {
    set_isa(isa);
    check_rows();
    check_tiles(int8_kernels().tile);
    if (has_vnni() && int8_kernels().vnni_tile != nullptr) check_tiles(int8_kernels().vnni_tile);
  }
  return 0;
}
