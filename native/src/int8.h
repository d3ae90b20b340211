// Products of int8 by int8: weights with a scale for each output, inputs with one for each row.
//
// Where bfloat16 has a pair of inputs, int8 has four: a panel of 32 outputs is [ceil(I / 4)][32][4],
// and a row is as many words of four. So tiles, blocks and prefetches are those of gemm.h, with
// words in place of pairs; only the product of a tile differs. Weights are stored plus 128, the
// unsigned operand of the dot-product instruction, and the sums of a row start from -128 times the
// sum of its inputs. Tails are zeros, stored as 128.
//
// Sums are exact integers and out = (float(sum) * scale of the output) * scale of the row, in
// float32: every instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "raymoe/bf16.h"
#include "raymoe/kernels.h"

namespace raymoe {

constexpr int kInt8Zero = 128;
// Beyond this many inputs, sums of products of 127 by 127 leave 32 bits.
constexpr int64_t kMaxInt8Inputs = 1 << 17;

/// A row that is to be quantised, in runs that are rotated before (rotation.h); of 1: as it is.
struct Int8Source {
  const bf16* row;
  int64_t inputs, run;
};

/// What is known of a quantised row.
struct Int8Row {
  float scale;    // NaN if an input is not finite
  int32_t start;  // -128 times the sum of the row's integers
};

struct GemmTile;

/// A tile on words of four int8. `tile.sums` are int32 between blocks, float32 after the last.
struct Int8Tile {
  const GemmTile& tile;
  const Int8Row* rows;
  const float* column_scales;  // [kPanelColumns]
  bool is_last;                // block of inputs
};

struct Int8Kernels {
  void (*tile)(int64_t rows, const Int8Tile&);
  /// By the dot products of AVX512-VNNI, which machines of AVX512 may have; else null.
  void (*vnni_tile)(int64_t rows, const Int8Tile&);
  /// A row to integers of -127 to 127: x * (127 / largest), to the nearest, ties to even. Writes
  /// whole multiples of 16, with zeros at the end; `out` may be where the row is. Rows without a
  /// number above 2^-120 become zeros. `scratch` is of `inputs`.
  void (*quantise)(const Int8Source& source, float* scratch, int8_t* out, Int8Row* found);
};
RAYMOE_DECLARE_KERNELS(Int8Kernels, int8_kernels);

/// Whether this machine runs the kernels of AVX512-VNNI.
bool has_vnni();

inline void multiply_int8_tile(int64_t rows, const Int8Tile& tile) {
  const Int8Kernels& kernels = int8_kernels();
  (kernels.vnni_tile != nullptr && has_vnni() ? kernels.vnni_tile : kernels.tile)(rows, tile);
}

}  // namespace raymoe
