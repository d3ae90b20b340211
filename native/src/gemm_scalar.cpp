// The matrix product without vectors: the readable reference of the other files.
#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace raymoe {
namespace {

void tile_scalar(int64_t rows, const GemmTile& tile) {
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* a = tile.a + row * tile.a_stride;
    float* sums = tile.sums + row * kPanelColumns;
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      float sum = tile.accumulate ? sums[column] : 0.0f;
      for (int64_t pair = 0; pair < tile.num_pairs; ++pair) {
        const bf16* b = tile.panel + (pair * kPanelColumns + column) * 2;
        sum += to_float(a[2 * pair + 1]) * to_float(b[1]);
        sum += to_float(a[2 * pair]) * to_float(b[0]);
      }
      sums[column] = sum;
    }
  }
}

void store_scalar(int64_t rows, const StoreTile& tile) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < tile.columns; ++column) {
      const float bias = tile.bias == nullptr ? 0.0f : to_float(tile.bias[column]);
      const float sum = tile.sums[row * kPanelColumns + column] + bias;
      if (tile.wide != nullptr)
        tile.wide[row * tile.out_stride + column] = sum;
      else
        tile.out[row * tile.out_stride + column] = from_float<bf16>(sum);
    }
}

void gate_scalar(int64_t rows, const GateTile& tile) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < kPanelColumns / 2; ++column) {
      const int64_t other = column + kPanelColumns / 2;
      const float* sums = tile.sums + row * kPanelColumns;
      const Gating& gating = tile.gating;
      // Operand order: NaN passes through std::min and std::max as their first operand.
      const float gate = std::min(sums[column] + tile.bias[column], gating.limit);
      const float up = std::min(sums[other] + tile.bias[other], gating.limit);
      tile.out[row * tile.out_stride + column] =
          from_float<bf16>(gate / (1.0f + std::exp(-gating.gain * gate)) *
                           (std::max(up, -gating.limit) + gating.offset));
    }
}

void scatter_scalar(int64_t rows, const ScatterTile& tile) {
  for (int64_t row = 0; row < rows; ++row) {
    float* accumulator = tile.accumulator + tile.tokens[row] * kPanelColumns;
    for (int64_t column = 0; column < kPanelColumns; ++column)
      accumulator[column] +=
          tile.weights[row] * (tile.sums[row * kPanelColumns + column] + tile.bias[column]);
  }
}

}  // namespace

const GemmKernels& gemm_kernels_scalar() {
  static const GemmKernels kernels{tile_scalar, store_scalar, gate_scalar, scatter_scalar,
                                   decode_panel_scalar};
  return kernels;
}

}  // namespace raymoe
