// The bfloat16 matrix product under linear.cpp and experts.cpp: panels of packed weights, tiles of
// rows, and what happens to a finished tile.
//
// A weight [O, I] is packed into panels of 32 outputs, [ceil(O / 32)][ceil(I / 2)][32][2]: one
// vector holds 16 outputs x 2 inputs, the operand of the bfloat16 dot-product instruction; other
// files widen its two halves. Tails are zeros. A tile multiplies 1 to 14 rows by one panel: 28 of
// the 32 vector registers hold sums.
//
// Sums are float32 and run over the pairs of inputs in ascending order, whatever the number of
// rows, threads or blocks: a row gives the same bits in every batch.
//
// Panels of int8 are multiplied as they are, by rows of int8 in place of bfloat16 (int8.h). Those
// of other codes (panels.h) are multiplied in one of two ways, which the format and the
// instruction set decide, not the number of rows:
// - The numbers of codes, exact in bfloat16, are multiplied and summed over a span: up to 64 pairs
//   of a group. The sum times the scale of the group, in float32, is added to the sum of the spans
//   before, with one rounding where the set fuses. No weight is rounded. Without vectors and with
//   AVX512-BF16 and VBMI; for all kinds but E2M1 with scales that are powers of two, in groups of
//   an even number of inputs, at least 16, that are neighbours.
// - Else weights are decoded, number * scale rounded to bfloat16. The bits are those of a product
//   with the decoded weights, whether they are decoded block by block into scratch or, where they
//   are exact, in registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "int8.h"
#include "panels.h"
#include "raymoe/bf16.h"
#include "raymoe/experts.h"
#include "raymoe/kernels.h"
#include "rotation.h"

namespace raymoe {

constexpr int64_t kTileRows = 14;
// Of a block that is decoded: 32 KiB of bfloat16 weights stay near while tiles of rows use them.
constexpr int64_t kDecodedPairs = 256;
constexpr int64_t kDecodedElements = kDecodedPairs * kPanelColumns * 2;
// Scratch of a product: decoded weights, or scales.
constexpr int64_t kScratchBytes = std::max<int64_t>(kDecodedElements * 2, kScaleElements * 4);

/// Distance of rows, in elements, of a copy of `columns` columns: whole cache lines and never a
/// multiple of 1 KiB, so that the rows of a tile do not fall into the same sets of the L1 cache.
inline int64_t padded_stride(int64_t columns) {
  const int64_t stride = ceil_div(columns, 32) * 32;
  return stride % 512 == 0 ? stride + 32 : stride;
}

/// Rows times a panel, or a block of its pairs. The rows must be readable up to 2 * num_pairs.
struct GemmTile {
  const bf16* a;
  int64_t a_stride;  // elements
  const bf16* panel;
  int64_t num_pairs;
  float* sums;                // [rows][kPanelColumns], contiguous
  bool accumulate;            // start from `sums` instead of zero
  const bf16* prefetch;       // read into L2 meanwhile; may lie outside of any allocation
  int64_t lines_per_4_pairs;  // of the prefetch; 0 to 8
};

struct StoreTile {
  const float* sums;
  const bf16* bias;  // of these columns, or null
  bf16* out;
  int64_t out_stride;
  int64_t columns;        // valid ones, 1 to kPanelColumns
  float* wide = nullptr;  // in place of `out`, for sums that are not rounded
};

inline constexpr float kNoBias[kPanelColumns] = {};

/// Sums and biases hold 16 gate columns and 16 up columns; writes 16 columns of their product.
struct GateTile {
  const float* sums;
  const float* bias;  // [kPanelColumns]
  Gating gating;
  bf16* out;
  int64_t out_stride;
};

/// accumulator[token] += weight * (sums + bias), for each row.
struct ScatterTile {
  const float* sums;
  const float* bias;  // [kPanelColumns]
  const int32_t* tokens;
  const float* weights;
  float* accumulator;  // [tokens][kPanelColumns]
};

/// What an instruction set provides. `rows` is 1 to kTileRows for `tile`, any elsewhere.
struct GemmKernels {
  void (*tile)(int64_t rows, const GemmTile&);
  void (*store)(int64_t rows, const StoreTile&);
  void (*gate)(int64_t rows, const GateTile&);
  void (*scatter)(int64_t rows, const ScatterTile&);
};
RAYMOE_DECLARE_KERNELS(GemmKernels, gemm_kernels);

/// A packed weight [O, I], in bfloat16 or in codes.
struct PackedWeight {
  const uint8_t* data;
  const CodeFormat* format;  // null: bfloat16
  int64_t outputs, inputs;

  bool is_int8() const { return format != nullptr && format->kind == CodeKind::kInt8; }
  /// Inputs of a row that are rotated together before it becomes int8.
  int64_t run() const { return format->is_rotated ? input_run(inputs) : 1; }
  /// Words of four bytes that a row of inputs has: pairs, or four int8 each.
  int64_t num_words() const { return is_int8() ? ceil_div(inputs, 4) : num_pairs(inputs); }
  int64_t num_bytes() const {
    if (format != nullptr) return packed_codes_bytes(*format, outputs, inputs);
    return num_panels(outputs) * panel_elements(inputs) * static_cast<int64_t>(sizeof(bf16));
  }
};

struct PanelSource {
  const bf16* weights;         // where the weights are bfloat16, or words of int8
  CodePanel codes;             // where they are other codes
  bool is_coded;
  const float* column_scales;  // of int8

  const void* begin() const {
    return is_coded ? static_cast<const void*>(codes.codes) : static_cast<const void*>(weights);
  }
};

inline PanelSource panel_of(const PackedWeight& weight, int64_t index) {
  if (weight.format == nullptr) {
    const bf16* panels = reinterpret_cast<const bf16*>(weight.data);
    return {panels + index * panel_elements(weight.inputs), {}, false, nullptr};
  }
  const CodeLayout layout(*weight.format, weight.inputs);
  const CodePanel panel = code_panel(*weight.format, layout, weight.data, index);
  if (weight.is_int8())
    return {reinterpret_cast<const bf16*>(panel.codes), {}, false,
            reinterpret_cast<const float*>(panel.scales)};
  return {nullptr, panel, true, nullptr};
}

/// Rows of one expert, or of a block of tokens, times one panel.
struct PanelProduct {
  const bf16* a;
  int64_t a_stride;
  int64_t num_rows;
  PanelSource panel;
  int64_t num_pairs;
  const void* next_panel;  // begin of the one that this thread multiplies next
  float* sums;             // scratch, [num_rows][kPanelColumns]
  void* scratch;           // of kScratchBytes, for codes
  const Int8Row* int8_rows = nullptr;  // where `a` and the panel are words of int8
};

/// Prefetches a share of `next` with each of the first tiles that use a block of a panel:
/// four pairs of a panel are eight cache lines.
inline void set_prefetch(GemmTile* tile, const bf16* next, int64_t index, int64_t num_tiles) {
  const int64_t lines = ceil_div(8, num_tiles);
  const bool is_needed = next != nullptr && index * lines < 8;
  tile->lines_per_4_pairs = is_needed ? lines : 0;
  tile->prefetch = is_needed ? next + index * lines * 32 * (tile->num_pairs / 4) : nullptr;
}

/// Pairs [pair, end) of a panel in bfloat16, and what to prefetch meanwhile.
struct PanelBlock {
  const bf16* weights;
  const bf16* next;
};

inline PanelBlock block_of(const PanelProduct& product, int64_t pair, int64_t end) {
  if (product.panel.is_coded) {
    bf16* decoded = static_cast<bf16*>(product.scratch);
    code_kernels().decode(product.panel.codes, pair, end, decoded);
    return {decoded, nullptr};
  }
  const bf16* panel = product.panel.weights;
  const bool is_last = end == product.num_pairs;
  return {panel + pair * kPanelColumns * 2,
          is_last ? static_cast<const bf16*>(product.next_panel) : panel + end * kPanelColumns * 2};
}

/// As `multiply_panel`, without decoding.
template <typename Epilogue>
void multiply_codes(const CodeTileKernels& kernels, const PanelProduct& product,
                    const Epilogue& epilogue) {
  const CodePanel& panel = product.panel.codes;
  float* scales = static_cast<float*>(product.scratch);
  const int64_t to_next = static_cast<const uint8_t*>(product.next_panel) - panel.codes;
  for (int64_t pair = 0; pair < product.num_pairs; pair += kBlockPairs) {
    const int64_t end = std::min(pair + kBlockPairs, product.num_pairs);
    const bool is_last = end == product.num_pairs;
    const int64_t prefetch = is_last ? to_next : kBlockPairs * pair_bytes(panel.format->kind);
    kernels.scales(panel, pair, end, to_next, scales);
    kernels.multiply(product.num_rows,
                     {product.a + pair * 2, product.a_stride, &panel, pair, end, scales,
                      product.sums, pair > 0, prefetch});
  }
  epilogue(0, product.num_rows, product.sums);
}

/// Multiplies all rows by a panel; calls epilogue(first_row, rows, sums) for each finished tile.
template <typename Epilogue>
void multiply_panel(const GemmKernels& kernels, const PanelProduct& product,
                    const Epilogue& epilogue) {
  if (product.panel.is_coded && code_tile_kernels().takes(*product.panel.codes.format))
    return multiply_codes(code_tile_kernels(), product, epilogue);
  const int64_t num_tiles = ceil_div(product.num_rows, kTileRows);
  const int64_t block_pairs = product.panel.is_coded ? kDecodedPairs : kBlockPairs;
  for (int64_t pair = 0; pair < product.num_pairs; pair += block_pairs) {
    const int64_t end = std::min(pair + block_pairs, product.num_pairs);
    const PanelBlock block = block_of(product, pair, end);
    for (int64_t index = 0; index < num_tiles; ++index) {
      const int64_t first = index * product.num_rows / num_tiles;
      const int64_t rows = (index + 1) * product.num_rows / num_tiles - first;
      GemmTile tile{product.a + first * product.a_stride + pair * 2,
                    product.a_stride,
                    block.weights,
                    end - pair,
                    product.sums + first * kPanelColumns,
                    pair > 0,
                    nullptr,
                    0};
      set_prefetch(&tile, block.next, index, num_tiles);
      if (product.int8_rows != nullptr)
        multiply_int8_tile(rows, {tile, product.int8_rows + first, product.panel.column_scales,
                                  end == product.num_pairs});
      else
        kernels.tile(rows, tile);
      if (end == product.num_pairs) epilogue(first, rows, tile.sums);
    }
  }
}

}  // namespace raymoe
