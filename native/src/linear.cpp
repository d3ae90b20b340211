// Dense projections: packing of weights; blocks of rows times ranges of panels for the workers.
#include "raymoe/linear.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm.h"
#include "parallel.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

// Packing is bound by memory: plain loops suffice.

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

constexpr int64_t kBlockBytes = 512 << 10;  // of the rows of a task: half of a 1 MiB L2 cache
constexpr int64_t kTasksPerWorker = 32;
constexpr int64_t kInlineCycles = 20'000;  // below about 5 microseconds waking workers costs more

struct LinearPlan {
  int64_t num_blocks, block_rows;  // of a group; rows of a block
  int64_t num_chunks, num_panels;  // panels are split into chunks
  bool copies_rows;
  int64_t a_stride;
  int64_t block_elements;  // of the copy of a worker
};

LinearPlan make_plan(const LinearProblem& problem, const PackedWeight& weight, int num_workers) {
  LinearPlan plan{};
  const int64_t row_bytes = 4 * weight.num_words();
  const int64_t max_rows = std::clamp<int64_t>(kBlockBytes / row_bytes, 4 * kTileRows, 256);
  plan.num_blocks = ceil_div(problem.num_rows, max_rows);
  plan.block_rows = ceil_div(problem.num_rows, plan.num_blocks);
  plan.num_panels = num_panels(problem.outputs);
  const int64_t num_blocks = plan.num_blocks * problem.num_groups;
  const int64_t wanted = ceil_div(kTasksPerWorker * num_workers, num_blocks);
  plan.num_chunks = std::min(wanted, plan.num_panels);
  // An odd row has no zero after its last input; rows 4 KiB apart evict each other from L1.
  plan.copies_rows =
      !weight.is_int8() && (problem.inputs % 2 != 0 ||
                            (problem.num_rows > kTileRows && problem.x_stride * 2 % 4096 == 0));
  plan.a_stride = plan.copies_rows ? padded_stride(problem.inputs) : problem.x_stride;
  plan.block_elements = plan.copies_rows ? plan.block_rows * plan.a_stride : 0;
  return plan;
}

void copy_rows(const LinearProblem& problem, const bf16* x, int64_t rows, int64_t stride,
               bf16* out) {
  const size_t row_bytes = static_cast<size_t>(problem.inputs) * sizeof(bf16);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out + row * stride, x + row * problem.x_stride, row_bytes);
    if (problem.inputs % 2 != 0) out[row * stride + problem.inputs] = bf16{0};
  }
}

/// Puts rows of int8 in the place of those of bfloat16; quantised once for all panels.
const Int8Row* quantise_rows(LinearProblem* problem, int64_t run, Scratch* scratch) {
  const int64_t stride = padded_stride(ceil_div(problem->inputs, 2)), rows = problem->num_rows;
  const int64_t bytes = rows * stride * static_cast<int64_t>(sizeof(bf16));
  char* memory = static_cast<char*>(
      scratch->reserve(bytes + rows * static_cast<int64_t>(sizeof(Int8Row))));
  bf16* words = reinterpret_cast<bf16*>(memory);
  auto* found = reinterpret_cast<Int8Row*>(memory + bytes);
  const Int8Kernels& kernels = int8_kernels();
  for_row_ranges(rows, ceil_div(problem->inputs, 4), [&](int64_t begin, int64_t end) {
    std::vector<float> floats(static_cast<size_t>(problem->inputs));
    for (int64_t row = begin; row < end; ++row)
      kernels.quantise({problem->x + row * problem->x_stride, problem->inputs, run}, floats.data(),
                       reinterpret_cast<int8_t*>(words + row * stride), found + row);
  });
  problem->x = words;
  problem->x_stride = stride;
  return found;
}

/// One worker's view of a launch.
class LinearWorker {
 public:
  LinearWorker(const LinearProblem& problem, const PackedWeight& weight, const LinearPlan& plan,
               const Int8Row* int8_rows, char* scratch)
      : problem_(problem),
        plan_(plan),
        weight_(weight),
        int8_rows_(int8_rows),
        sums_(reinterpret_cast<float*>(scratch)),
        codes_(scratch + sums_bytes(plan)),
        copy_(reinterpret_cast<bf16*>(codes_ + kScratchBytes)) {}

  static int64_t sums_bytes(const LinearPlan& plan) {
    return plan.block_rows * kPanelColumns * static_cast<int64_t>(sizeof(float));
  }
  static int64_t scratch_bytes(const LinearPlan& plan) {
    const int64_t copied = plan.block_elements * static_cast<int64_t>(sizeof(bf16));
    return ceil_div(sums_bytes(plan) + kScratchBytes + copied + 64, 4096) * 4096;
  }

  void run(int64_t task) {
    const int64_t block = task / plan_.num_chunks, chunk = task % plan_.num_chunks;
    const int64_t group = block / plan_.num_blocks;
    const int64_t first = block % plan_.num_blocks * plan_.block_rows;
    const int64_t rows = std::min(plan_.block_rows, problem_.num_rows - first);
    const bf16* a = problem_.x + group * problem_.x_group_stride + first * problem_.x_stride;
    if (plan_.copies_rows) {
      if (copied_block_ != block) copy_rows(problem_, a, rows, plan_.a_stride, copy_);
      copied_block_ = block;
      a = copy_;
    }
    const int64_t end = (chunk + 1) * plan_.num_panels / plan_.num_chunks;
    for (int64_t panel = chunk * plan_.num_panels / plan_.num_chunks; panel < end; ++panel)
      multiply(a, group, first, rows, panel);
  }

 private:
  void multiply(const bf16* a, int64_t group, int64_t first, int64_t rows, int64_t panel) {
    const int64_t index = group * plan_.num_panels + panel;
    const int64_t next = index + 1 == problem_.num_groups * plan_.num_panels ? 0 : index + 1;
    const PanelProduct product{a,
                               plan_.a_stride,
                               rows,
                               panel_of(weight_, index),
                               weight_.num_words(),
                               panel_of(weight_, next).begin(),
                               sums_,
                               codes_,
                               int8_rows_ == nullptr ? nullptr : int8_rows_ + first};
    const int64_t column = panel * kPanelColumns;
    multiply_panel(kernels_, product, [&](int64_t row, int64_t count, const float* sums) {
      StoreTile tile{sums, problem_.bias == nullptr ? nullptr : problem_.bias + column, nullptr,
                     problem_.out_stride, std::min(kPanelColumns, problem_.outputs - column)};
      const int64_t place =
          group * problem_.out_group_stride + (first + row) * problem_.out_stride + column;
      if (problem_.wide_out != nullptr)
        tile.wide = problem_.wide_out + place;
      else
        tile.out = problem_.out + place;
      kernels_.store(count, tile);
    });
  }

  const GemmKernels& kernels_ = gemm_kernels();
  const LinearProblem& problem_;
  const LinearPlan& plan_;
  const PackedWeight& weight_;
  const Int8Row* int8_rows_;  // null: rows are bfloat16
  float* sums_;
  char* codes_;  // scratch
  bf16* copy_;
  int64_t copied_block_ = -1;
};

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

bf16* packed_weights(const char* what, const TensorView& packed, int64_t num_bytes) {
  return reinterpret_cast<bf16*>(packed_data(what, packed, num_bytes));
}

WeightSource source_of(const char* what, const TensorView& weight) {
  if (weight.dtype() != DType::kBFloat16 || weight.rank() != 2)
    fail(std::string(what) + " must be a bfloat16 matrix, it is " + dtype_name(weight.dtype()) +
         " with " + std::to_string(weight.rank()) + " dimensions");
  if (weight.size(0) < 1 || weight.size(1) < 1)
    fail(std::string(what) + " is empty: [" + std::to_string(weight.size(0)) + ", " +
         std::to_string(weight.size(1)) + "]");
  return {weight.data<bf16>(), weight.size(0), weight.size(1), weight.stride(0), weight.stride(1)};
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

void packed_linear(const LinearProblem& given) {
  if (given.num_rows == 0 || given.outputs == 0) return;
  thread_local Scratch scratch, quantised;
  thread_local TaskRanges ranges;
  const auto pool = worker_pool();
  LinearProblem problem = given;
  const PackedWeight weight{problem.packed, problem.format, problem.outputs, problem.inputs};
  const Int8Row* rows =
      weight.is_int8() ? quantise_rows(&problem, weight.run(), &quantised) : nullptr;
  const int64_t cycles = problem.num_groups * num_panels(problem.outputs) * weight.num_words() *
                         (2 * problem.num_rows + 20);
  const int num_workers = cycles < kInlineCycles ? 1 : pool->num_threads();
  const LinearPlan plan = make_plan(problem, weight, num_workers);
  const int64_t slice = LinearWorker::scratch_bytes(plan);
  char* memory = static_cast<char*>(scratch.reserve(slice * num_workers));
  ranges.resize(num_workers);
  ranges.set_even(problem.num_groups * plan.num_blocks * plan.num_chunks);
  TaskRanges& tasks = ranges;
  const auto body = [&](int worker) {
    LinearWorker state(problem, weight, plan, rows, memory + worker * slice);
    for (int64_t task; (task = tasks.take(worker)) >= 0;) state.run(task);
  };
  if (num_workers == 1)
    body(0);
  else
    pool->run_awake(body);
}

int64_t packed_gate_up_bytes(int64_t expert_size, int64_t hidden_size) {
  constexpr int64_t kHalf = kPanelColumns / 2;
  return packed_bytes(ceil_div(expert_size, kHalf) * kPanelColumns, hidden_size);
}

void pack_linear_op(const TensorView& weight, const TensorView& packed) {
  const WeightSource source = source_of("pack_linear: weight", weight);
  const int64_t num_bytes = packed_bytes(source.outputs, source.inputs);
  pack_weight(source, packed_weights("pack_linear: packed", packed, num_bytes));
}

void pack_gate_up_op(const TensorView& gate, const TensorView& up, const TensorView& packed) {
  const WeightSource gate_source = source_of("pack_gate_up: gate", gate);
  const WeightSource up_source = source_of("pack_gate_up: up", up);
  up.expect_size("pack_gate_up: up", 0, gate.size(0));
  up.expect_size("pack_gate_up: up", 1, gate.size(1));
  const int64_t num_bytes = packed_gate_up_bytes(gate.size(0), gate.size(1));
  pack_gate_up(gate_source, up_source, packed_weights("pack_gate_up: packed", packed, num_bytes));
}

void packed_linear_op(const TensorView& x, const TensorView& packed, const CodeFormat* format,
                      const TensorView* bias, const TensorView& out) {
  x.expect("packed_linear: x", DType::kBFloat16, 2);
  const bool is_wide = out.dtype() == DType::kFloat32;
  out.expect("packed_linear: out", is_wide ? DType::kFloat32 : DType::kBFloat16, 2)
      .expect_size("packed_linear: out", 0, x.size(0));
  if (x.size(1) < 1 || out.size(1) < 1) fail("packed_linear: x and out must have columns");
  if (bias != nullptr)
    bias->expect("packed_linear: bias", DType::kBFloat16, 1)
        .expect_size("packed_linear: bias", 0, out.size(1));
  const PackedWeight weight{nullptr, format, out.size(1), x.size(1)};
  packed_linear({x.data<bf16>(), x.stride(0), x.size(0),
                 packed_data("packed_linear: packed", packed, weight.num_bytes()), format,
                 out.size(1), x.size(1), bias == nullptr ? nullptr : bias->data<bf16>(),
                 is_wide ? nullptr : out.data<bf16>(), out.stride(0),
                 is_wide ? out.data<float>() : nullptr});
}

void quantise_rows_op(const TensorView& x, int64_t run, const TensorView& codes,
                      const TensorView& scales) {
  x.expect("quantise_rows: x", DType::kBFloat16, 2);
  codes.expect("quantise_rows: codes", DType::kInt8, 2)
      .expect_size("quantise_rows: codes", 0, x.size(0))
      .expect_size("quantise_rows: codes", 1, x.size(1));
  scales.expect("quantise_rows: scales", DType::kFloat32, 1)
      .expect_size("quantise_rows: scales", 0, x.size(0))
      .expect_contiguous("quantise_rows: scales");
  const int64_t inputs = x.size(1);
  if (run < 1 || (run & (run - 1)) != 0 || inputs % run != 0)
    fail("quantise_rows: run is " + std::to_string(run) + ", no power of two that divides " +
         std::to_string(inputs));
  const Int8Kernels& kernels = int8_kernels();
  for_row_ranges(x.size(0), inputs, [&](int64_t begin, int64_t end) {
    std::vector<int8_t> row(static_cast<size_t>(ceil_div(inputs, 16) * 16));
    std::vector<float> floats(static_cast<size_t>(inputs));
    for (int64_t index = begin; index < end; ++index) {
      Int8Row found;
      kernels.quantise({x.data<bf16>() + index * x.stride(0), inputs, run}, floats.data(),
                       row.data(), &found);
      std::memcpy(codes.data<int8_t>() + index * codes.stride(0), row.data(),
                  static_cast<size_t>(inputs));
      scales.data<float>()[index] = found.scale;
    }
  });
}

void packed_grouped_linear_op(const TensorView& x, const TensorView& packed,
                              const TensorView& out) {
  constexpr const char* kOut = "packed_grouped_linear: out";
  x.expect("packed_grouped_linear: x", DType::kBFloat16, 3);
  out.expect(kOut, DType::kBFloat16, 3).expect_size(kOut, 0, x.size(0)).expect_size(kOut, 1,
                                                                                    x.size(1));
  if (x.size(1) < 1 || x.size(2) < 1 || out.size(2) < 1)
    fail("packed_grouped_linear: x and out must have groups and columns");
  const int64_t num_bytes = x.size(1) * packed_bytes(out.size(2), x.size(2));
  packed_linear({x.data<bf16>(), x.stride(0), x.size(0),
                 packed_data("packed_grouped_linear: packed", packed, num_bytes), nullptr,
                 out.size(2), x.size(2), nullptr, out.data<bf16>(), out.stride(0), nullptr,
                 x.size(1), x.stride(1), out.stride(1)});
}

}  // namespace raymoe
