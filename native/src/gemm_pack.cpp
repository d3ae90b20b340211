// Packing of weights into panels (layout: gemm.h). Bound by memory, so plain loops do.
#include <algorithm>
#include <array>
#include <cstring>

#include "gemm.h"
#include "raymoe/linear.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

/// Where the inputs of one output come from.
struct Column {
  const bf16* data = nullptr;  // null: zeros
  int64_t stride = 1;
};
using Columns = std::array<Column, kPanelColumns>;

/// Inputs [begin, end) of one column; `begin` is even.
void pack_column(const Column& column, int64_t begin, int64_t end, bf16* target) {
  constexpr int64_t kStep = 2 * kPanelColumns;
  const bf16* source = column.data;
  if (source == nullptr) {
    for (int64_t input = begin; input < end; input += 2, target += kStep)
      target[0] = target[1] = bf16{0};
    return;
  }
  int64_t input = begin;
  if (column.stride == 1) {
    for (; input + 1 < end; input += 2, target += kStep)
      std::memcpy(target, source + input, 2 * sizeof(bf16));
  } else {
    for (; input + 1 < end; input += 2, target += kStep) {
      target[0] = source[input * column.stride];
      target[1] = source[(input + 1) * column.stride];
    }
  }
  if (input < end) {
    target[0] = source[input * column.stride];
    target[1] = bf16{0};
  }
}

/// Sixteen pairs at a time: one cache line of each source row, 2 KiB of the panel.
void pack_panel(const Columns& columns, int64_t inputs, bf16* panel) {
  constexpr int64_t kChunk = 32;
  for (int64_t begin = 0; begin < inputs; begin += kChunk)
    for (int64_t column = 0; column < kPanelColumns; ++column)
      pack_column(columns[static_cast<size_t>(column)], begin, std::min(begin + kChunk, inputs),
                  panel + (begin / 2 * kPanelColumns + column) * 2);
}

Column column_of(const WeightSource& weight, int64_t output) {
  if (output >= weight.outputs) return {};
  return {weight.data + output * weight.output_stride, weight.input_stride};
}

}  // namespace

int64_t packed_bytes(int64_t outputs, int64_t inputs) {
  return num_panels(outputs) * panel_elements(inputs) * static_cast<int64_t>(sizeof(bf16));
}

void pack_weight(const WeightSource& weight, bf16* packed) {
  worker_pool()->for_each(num_panels(weight.outputs), 1, [&](int, int64_t panel) {
    Columns columns;
    for (int64_t column = 0; column < kPanelColumns; ++column)
      columns[static_cast<size_t>(column)] = column_of(weight, panel * kPanelColumns + column);
    pack_panel(columns, weight.inputs, packed + panel * panel_elements(weight.inputs));
  });
}

void pack_gate_up(const WeightSource& gate, const WeightSource& up, bf16* packed) {
  constexpr int64_t kHalf = kPanelColumns / 2;
  worker_pool()->for_each(ceil_div(gate.outputs, kHalf), 1, [&](int, int64_t panel) {
    Columns columns;
    for (int64_t column = 0; column < kHalf; ++column) {
      columns[static_cast<size_t>(column)] = column_of(gate, panel * kHalf + column);
      columns[static_cast<size_t>(column + kHalf)] = column_of(up, panel * kHalf + column);
    }
    pack_panel(columns, gate.inputs, packed + panel * panel_elements(gate.inputs));
  });
}

}  // namespace raymoe
