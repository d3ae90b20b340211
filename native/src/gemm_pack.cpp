// Packing of weights into panels (layout: gemm.h). Bound by memory, so plain loops do.
#include <algorithm>
#include <array>
#include <cstring>

#include "gemm.h"
#include "raymoe/linear.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

using Columns = std::array<const bf16*, kPanelColumns>;  // first input of each; null: zeros

/// Sixteen pairs at a time: one cache line of each source row, 2 KiB of the panel.
void pack_panel(const Columns& columns, int64_t inputs, int64_t input_stride, bf16* panel) {
  constexpr int64_t kChunk = 32;
  for (int64_t begin = 0; begin < inputs; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, inputs);
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const bf16* source = columns[static_cast<size_t>(column)];
      bf16* target = panel + (begin / 2 * kPanelColumns + column) * 2;
      for (int64_t input = begin; input < end; input += 2, target += 2 * kPanelColumns) {
        target[0] = source == nullptr ? bf16{0} : source[input * input_stride];
        target[1] =
            source == nullptr || input + 1 == inputs ? bf16{0} : source[(input + 1) * input_stride];
      }
    }
  }
}

const bf16* column_of(const WeightSource& weight, int64_t output) {
  return output < weight.outputs ? weight.data + output * weight.output_stride : nullptr;
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
    pack_panel(columns, weight.inputs, weight.input_stride,
               packed + panel * panel_elements(weight.inputs));
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
    pack_panel(columns, gate.inputs, gate.input_stride,
               packed + panel * panel_elements(gate.inputs));
  });
}

}  // namespace raymoe
