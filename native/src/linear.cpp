// Dense projections: blocks of rows times ranges of panels, shared among the workers.
#include "raymoe/linear.h"

#include <algorithm>
#include <cstring>

#include "gemm.h"
#include "gemm_work.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

constexpr int64_t kBlockBytes = 512 << 10;  // of the rows of a task: half of a 1 MiB L2 cache
constexpr int64_t kTasksPerWorker = 32;
constexpr int64_t kInlineCycles = 20'000;  // below about 5 microseconds waking workers costs more

struct LinearPlan {
  int64_t num_blocks, block_rows;  // rows of a block
  int64_t num_chunks, num_panels;  // panels are split into chunks
  bool copies_rows;
  int64_t a_stride;
  int64_t block_elements;  // of the copy of a worker
};

LinearPlan make_plan(const LinearProblem& problem, int num_workers) {
  LinearPlan plan{};
  const int64_t row_bytes = 2 * problem.inputs;
  const int64_t most = std::clamp<int64_t>(kBlockBytes / row_bytes, 4 * kTileRows, 256);
  plan.num_blocks = ceil_div(problem.num_rows, most);
  plan.block_rows = ceil_div(problem.num_rows, plan.num_blocks);
  plan.num_panels = num_panels(problem.outputs);
  const int64_t wanted = ceil_div(kTasksPerWorker * num_workers, plan.num_blocks);
  plan.num_chunks = std::min(wanted, plan.num_panels);
  // An odd row has no zero after its last input; rows 4 KiB apart evict each other from L1.
  plan.copies_rows =
      problem.inputs % 2 != 0 || (problem.num_rows > kTileRows && problem.x_stride * 2 % 4096 == 0);
  plan.a_stride = plan.copies_rows ? padded_stride(problem.inputs) : problem.x_stride;
  plan.block_elements = plan.copies_rows ? plan.block_rows * plan.a_stride : 0;
  return plan;
}

void copy_rows(const LinearProblem& problem, int64_t first, int64_t rows, int64_t stride,
               bf16* out) {
  const size_t row_bytes = static_cast<size_t>(problem.inputs) * sizeof(bf16);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out + row * stride, problem.x + (first + row) * problem.x_stride, row_bytes);
    if (problem.inputs % 2 != 0) out[row * stride + problem.inputs] = bf16{0};
  }
}

/// One worker's view of a launch.
class LinearWorker {
 public:
  LinearWorker(const LinearProblem& problem, const LinearPlan& plan, char* scratch)
      : problem_(problem),
        plan_(plan),
        weight_{problem.packed, problem.format, problem.outputs, problem.inputs},
        sums_(reinterpret_cast<float*>(scratch)),
        decoded_(reinterpret_cast<bf16*>(scratch + sums_bytes(plan))),
        copy_(decoded_ + kDecodedElements) {}

  static int64_t sums_bytes(const LinearPlan& plan) {
    return plan.block_rows * kPanelColumns * static_cast<int64_t>(sizeof(float));
  }
  static int64_t scratch_bytes(const LinearPlan& plan) {
    const int64_t elements = kDecodedElements + plan.block_elements;
    return ceil_div(sums_bytes(plan) + elements * 2 + 64, 4096) * 4096;
  }

  void run(int64_t task) {
    const int64_t block = task / plan_.num_chunks, chunk = task % plan_.num_chunks;
    const int64_t first = block * plan_.block_rows;
    const int64_t rows = std::min(plan_.block_rows, problem_.num_rows - first);
    const bf16* a = problem_.x + first * plan_.a_stride;
    if (plan_.copies_rows) {
      if (copied_block_ != block) copy_rows(problem_, first, rows, plan_.a_stride, copy_);
      copied_block_ = block;
      a = copy_;
    }
    const int64_t end = (chunk + 1) * plan_.num_panels / plan_.num_chunks;
    for (int64_t panel = chunk * plan_.num_panels / plan_.num_chunks; panel < end; ++panel)
      multiply(a, first, rows, panel);
  }

 private:
  void multiply(const bf16* a, int64_t first, int64_t rows, int64_t panel) {
    const int64_t next = panel + 1 == plan_.num_panels ? 0 : panel + 1;
    const PanelProduct product{a,
                               plan_.a_stride,
                               rows,
                               panel_of(weight_, panel),
                               num_pairs(problem_.inputs),
                               panel_of(weight_, next).weights,
                               sums_,
                               decoded_};
    const int64_t column = panel * kPanelColumns;
    multiply_panel(kernels_, product, [&](int64_t row, int64_t count, const float* sums) {
      StoreTile tile{sums, problem_.bias == nullptr ? nullptr : problem_.bias + column, nullptr,
                     problem_.out_stride, std::min(kPanelColumns, problem_.outputs - column)};
      const int64_t place = (first + row) * problem_.out_stride + column;
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
  const PackedWeight weight_;
  float* sums_;
  bf16* decoded_;
  bf16* copy_;
  int64_t copied_block_ = -1;
};

}  // namespace

void packed_linear(const LinearProblem& problem) {
  if (problem.num_rows == 0 || problem.outputs == 0) return;
  thread_local Scratch scratch;
  thread_local TaskRanges ranges;
  const auto pool = worker_pool();
  const int64_t cycles =
      num_panels(problem.outputs) * num_pairs(problem.inputs) * (2 * problem.num_rows + 20);
  const int num_workers = cycles < kInlineCycles ? 1 : pool->num_threads();
  const LinearPlan plan = make_plan(problem, num_workers);
  const int64_t slice = LinearWorker::scratch_bytes(plan);
  char* memory = static_cast<char*>(scratch.reserve(slice * num_workers));
  ranges.resize(num_workers);
  ranges.set_even(plan.num_blocks * plan.num_chunks);
  TaskRanges& tasks = ranges;
  const auto body = [&](int worker) {
    LinearWorker state(problem, plan, memory + worker * slice);
    for (int64_t task; (task = tasks.take(worker)) >= 0;) state.run(task);
  };
  if (num_workers == 1)
    body(0);
  else
    pool->run(body);
}

}  // namespace raymoe
