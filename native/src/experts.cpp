// The experts of one layer. For each block of tokens, with barriers between:
//   sort     worker 0 groups the block's (token, slot) rows by expert, in a counting sort
//   gate     tasks of (rows of an expert, panels of gate and up): gather, multiply, gate * up
//   down     tasks of one panel of outputs over all experts in ascending order: multiply, add to
//            the accumulators of the tokens, round
// Down tasks own their columns, so the sums of a token need no locks and have one order. Where
// weights are int8, all workers quantise the block's tokens before gate tasks, and the gated
// products, in place, before down tasks.
#include "raymoe/experts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm.h"
#include "parallel.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

constexpr int64_t kGatePanelColumns = kPanelColumns / 2;
constexpr int64_t kGatherBytes = 512 << 10;     // rows of a gate task: half of a 1 MiB L2 cache
constexpr int64_t kActivationBytes = 48 << 20;  // gated products of a block of tokens
constexpr int64_t kRowsPerExpert = 128;         // at the peak rate, weights stream at 3 to 4 GB/s
constexpr int64_t kGateTasksPerWorker = 128;
constexpr int64_t kInlineCycles = 20'000;  // below about 5 microseconds waking workers costs more

struct Sizes {
  int num_workers;
  int64_t block_tokens, block_rows;
  int64_t gather_rows, gather_stride, activation_stride;
  int64_t gate_words, down_words;      // of a row (gemm.h)
  bool gate_is_int8, down_is_int8;
  int64_t gate_run, down_run;  // of rows that become int8 (gemm.h)
  int64_t floats;              // of such a row, 0 without
  int64_t gate_panels, gate_up_bytes;  // of one expert
  int64_t down_panels, down_bytes;
};

/// Tokens of a block: enough rows for each expert that reading its weights again for the next
/// block is cheap, few enough that the rows of a block stay in cache.
int64_t choose_block_tokens(const ExpertsProblem& problem) {
  const int64_t row_bytes = 2 * padded_stride(problem.weights.expert_size) * problem.top_k;
  int64_t limit =
      std::max<int64_t>(512, kRowsPerExpert * problem.weights.num_experts / problem.top_k);
  limit = std::clamp<int64_t>(kActivationBytes / row_bytes, kTileRows, limit);
  return ceil_div(problem.num_tokens, ceil_div(problem.num_tokens, limit));
}

PackedWeight gate_up_of(const ExpertWeights& weights, int64_t expert, int64_t expert_bytes) {
  return {weights.gate_up + expert * expert_bytes, weights.gate_up_format,
          ceil_div(weights.expert_size, kGatePanelColumns) * kPanelColumns, weights.hidden_size};
}

PackedWeight down_of(const ExpertWeights& weights, int64_t expert, int64_t expert_bytes) {
  return {weights.down + expert * expert_bytes, weights.down_format, weights.hidden_size,
          weights.expert_size};
}

Sizes make_sizes(const ExpertsProblem& problem, int num_threads) {
  const ExpertWeights& weights = problem.weights;
  Sizes sizes{};
  sizes.block_tokens = choose_block_tokens(problem);
  sizes.block_rows = sizes.block_tokens * problem.top_k;
  const PackedWeight gate_up = gate_up_of(weights, 0, 0), down = down_of(weights, 0, 0);
  sizes.gate_words = gate_up.num_words();
  sizes.down_words = down.num_words();
  sizes.gate_is_int8 = gate_up.is_int8();
  sizes.down_is_int8 = down.is_int8();
  if (sizes.gate_is_int8) sizes.gate_run = gate_up.run();
  if (sizes.down_is_int8) sizes.down_run = down.run();
  if (sizes.gate_is_int8 || sizes.down_is_int8)
    sizes.floats = std::max(weights.hidden_size, weights.expert_size);
  sizes.gather_rows =
      std::clamp<int64_t>(kGatherBytes / (4 * sizes.gate_words), 4 * kTileRows, 256);
  sizes.gather_rows = std::min(sizes.gather_rows, sizes.block_tokens);
  sizes.gather_stride = padded_stride(2 * sizes.gate_words);
  sizes.gate_panels = ceil_div(weights.expert_size, kGatePanelColumns);
  sizes.activation_stride = padded_stride(sizes.gate_panels * kGatePanelColumns);
  sizes.gate_up_bytes = gate_up.num_bytes();
  sizes.down_panels = num_panels(weights.hidden_size);
  sizes.down_bytes = down.num_bytes();
  const int64_t cycles = (2 * problem.num_tokens * problem.top_k + 20) * sizes.gate_panels *
                         sizes.gate_words * 3 / 2;
  sizes.num_workers = cycles < kInlineCycles ? 1 : num_threads;
  return sizes;
}

/// Rows of a block that one expert multiplies, in sorted order.
struct ExpertRows {
  int64_t expert, first, count;
};

struct GateTask {
  ExpertRows rows;  // all or some of an expert's
  int64_t first_panel, last_panel;
};

/// Cuts one allocation into aligned arrays; with a null base it only measures.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += ceil_div(count * static_cast<int64_t>(sizeof(T)), 4096) * 4096;
    return array;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

struct WorkerArrays {
  float* sums;         // [max(gather rows, rows of an expert)][kPanelColumns]
  bf16* gathered;      // [gather_rows][gather_stride]
  Int8Row* gathered_int8;  // [gather_rows], where the gathered rows are int8
  float* accumulator;  // [block_tokens][kPanelColumns]
  char* scratch;       // of kScratchBytes, for codes
  float* floats;       // of a row that becomes int8
};

/// What a calling thread keeps between launches.
struct ExpertsScratch {
  Scratch memory;
  TaskRanges gate_ranges, down_ranges;
  std::vector<ExpertRows> experts;
  std::vector<GateTask> gate_tasks;
  std::vector<int64_t> starts;
  std::vector<WorkerArrays> workers;
  int32_t* row_tokens = nullptr;  // [block_rows], token of the block of each sorted row
  float* row_weights = nullptr;
  bf16* activations = nullptr;  // [block_rows][activation_stride]
  bf16* int8_tokens = nullptr;  // [block_tokens][gather_stride], quantised
  Int8Row* token_rows = nullptr;
  Int8Row* activation_rows = nullptr;
};

int64_t carve(const Sizes& sizes, void* base, ExpertsScratch* scratch) {
  Carver carver(base);
  scratch->row_tokens = carver.take<int32_t>(sizes.block_rows);
  scratch->row_weights = carver.take<float>(sizes.block_rows);
  scratch->activations = carver.take<bf16>(sizes.block_rows * sizes.activation_stride);
  const int64_t int8_tokens = sizes.gate_is_int8 ? sizes.block_tokens : 0;
  scratch->int8_tokens = carver.take<bf16>(int8_tokens * sizes.gather_stride);
  scratch->token_rows = carver.take<Int8Row>(int8_tokens);
  scratch->activation_rows = carver.take<Int8Row>(sizes.down_is_int8 ? sizes.block_rows : 0);
  scratch->workers.resize(static_cast<size_t>(sizes.num_workers));
  for (WorkerArrays& worker : scratch->workers) {
    worker.sums = carver.take<float>(sizes.block_tokens * kPanelColumns);
    worker.gathered = carver.take<bf16>(sizes.gather_rows * sizes.gather_stride);
    worker.gathered_int8 = carver.take<Int8Row>(sizes.gate_is_int8 ? sizes.gather_rows : 0);
    worker.accumulator = carver.take<float>(sizes.block_tokens * kPanelColumns);
    worker.scratch = carver.take<char>(kScratchBytes);
    worker.floats = carver.take<float>(sizes.floats);
  }
  return carver.used();
}

class ExpertsLaunch {
 public:
  ExpertsLaunch(const ExpertsProblem& problem, const Sizes& sizes, ExpertsScratch* scratch)
      : problem_(problem), sizes_(sizes), scratch_(*scratch), barrier_(sizes.num_workers) {}

  void work(int worker) {
    for (int64_t token = 0; token < problem_.num_tokens; token += sizes_.block_tokens) {
      if (worker == 0) plan_block(token);
      if (sizes_.gate_is_int8) quantise_tokens(worker, token);
      barrier_.wait();
      run_gate_tasks(worker);
      barrier_.wait();
      if (sizes_.down_is_int8) {
        quantise_activations(worker);
        barrier_.wait();
      }
      for (int64_t panel; (panel = scratch_.down_ranges.take(worker)) >= 0;)
        run_down_task(worker, panel);
      barrier_.wait();
    }
  }

 private:
  void plan_block(int64_t first_token);
  void sort_rows();
  void make_gate_tasks();
  void split_gate_tasks();
  void run_gate_tasks(int worker);
  void quantise_tokens(int worker, int64_t first_token);
  void quantise_activations(int worker);
  void gather(const ExpertRows& rows, const WorkerArrays& arrays) const;
  void multiply_gate(const WorkerArrays& arrays, const GateTask& task, int64_t panel);
  void run_down_task(int worker, int64_t panel);
  void multiply_down(const WorkerArrays& arrays, size_t index, int64_t panel);
  PanelSource gate_panel(int64_t expert, int64_t panel) const {
    return panel_of(gate_up_of(problem_.weights, expert, sizes_.gate_up_bytes), panel);
  }
  PanelSource down_panel(int64_t expert, int64_t panel) const {
    return panel_of(down_of(problem_.weights, expert, sizes_.down_bytes), panel);
  }
  /// The biases of a panel; zeros where the experts have none.
  static const float* bias_of(const float* biases, int64_t expert, int64_t panels, int64_t panel) {
    return biases == nullptr ? kNoBias : biases + (expert * panels + panel) * kPanelColumns;
  }
  bool is_dense() const { return problem_.topk_ids == nullptr; }

  const GemmKernels& kernels_ = gemm_kernels();
  const Int8Kernels& int8_kernels_ = int8_kernels();
  const ExpertsProblem& problem_;
  const Sizes& sizes_;
  ExpertsScratch& scratch_;
  SpinBarrier barrier_;
  int64_t first_token_ = 0, num_tokens_ = 0;  // of the block
};

void ExpertsLaunch::plan_block(int64_t first_token) {
  first_token_ = first_token;
  num_tokens_ = std::min(sizes_.block_tokens, problem_.num_tokens - first_token);
  scratch_.experts.clear();
  if (is_dense())
    scratch_.experts.push_back({0, 0, num_tokens_});
  else
    sort_rows();
  make_gate_tasks();
  split_gate_tasks();
  scratch_.down_ranges.set_even(sizes_.down_panels);
}

void ExpertsLaunch::sort_rows() {
  const int64_t top_k = problem_.top_k, num_rows = num_tokens_ * top_k;
  const int32_t* ids = problem_.topk_ids + first_token_ * top_k;
  const float* weights = problem_.topk_weights + first_token_ * top_k;
  std::vector<int64_t>& starts = scratch_.starts;
  starts.assign(static_cast<size_t>(problem_.weights.num_experts) + 1, 0);
  for (int64_t row = 0; row < num_rows; ++row) ++starts[static_cast<size_t>(ids[row]) + 1];
  for (size_t expert = 0; expert + 1 < starts.size(); ++expert) {
    const int64_t count = starts[expert + 1];
    starts[expert + 1] += starts[expert];
    if (count > 0)
      scratch_.experts.push_back({static_cast<int64_t>(expert), starts[expert], count});
  }
  for (int64_t token = 0, row = 0; token < num_tokens_; ++token)
    for (int64_t slot = 0; slot < top_k; ++slot, ++row) {
      const int64_t position = starts[static_cast<size_t>(ids[row])]++;
      scratch_.row_tokens[position] = static_cast<int32_t>(token);
      scratch_.row_weights[position] = weights[row];
    }
}

/// Rows of an expert in blocks that fit in L2, panels in chunks small enough to balance.
void ExpertsLaunch::make_gate_tasks() {
  int64_t total_panels = 0;
  for (const ExpertRows& rows : scratch_.experts)
    total_panels += ceil_div(rows.count, sizes_.gather_rows) * sizes_.gate_panels;
  const int64_t wanted =
      std::max<int64_t>(1, total_panels / (kGateTasksPerWorker * sizes_.num_workers));
  const int64_t num_chunks = ceil_div(sizes_.gate_panels, wanted);
  scratch_.gate_tasks.clear();
  for (const ExpertRows& rows : scratch_.experts) {
    const int64_t num_blocks = ceil_div(rows.count, sizes_.gather_rows);
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t begin = block * rows.count / num_blocks;
      const int64_t end = (block + 1) * rows.count / num_blocks;
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
        scratch_.gate_tasks.push_back({{rows.expert, rows.first + begin, end - begin},
                                       chunk * sizes_.gate_panels / num_chunks,
                                       (chunk + 1) * sizes_.gate_panels / num_chunks});
    }
  }
}

/// Consecutive tasks of about equal cost for each worker; the few rows that a panel costs even
/// when it multiplies one row stand for reading it.
void ExpertsLaunch::split_gate_tasks() {
  const auto cost = [](const GateTask& task) {
    return (task.last_panel - task.first_panel) * std::max<int64_t>(task.rows.count, 12);
  };
  int64_t total = 0, done = 0, begin = 0;
  for (const GateTask& task : scratch_.gate_tasks) total += cost(task);
  const auto num_tasks = static_cast<int64_t>(scratch_.gate_tasks.size());
  for (int worker = 0; worker < sizes_.num_workers; ++worker) {
    int64_t end = begin;
    while (end < num_tasks && done * sizes_.num_workers < total * (worker + 1))
      done += cost(scratch_.gate_tasks[static_cast<size_t>(end++)]);
    scratch_.gate_ranges.set(worker, begin, end);
    begin = end;
  }
}

/// A worker's share of the tokens of the block, which is not planned yet.
void ExpertsLaunch::quantise_tokens(int worker, int64_t first_token) {
  const int64_t count = std::min(sizes_.block_tokens, problem_.num_tokens - first_token);
  const int64_t end = (worker + 1) * count / sizes_.num_workers;
  for (int64_t token = worker * count / sizes_.num_workers; token < end; ++token)
    int8_kernels_.quantise(
        {problem_.hidden + (first_token + token) * problem_.hidden_stride,
         problem_.weights.hidden_size, sizes_.gate_run},
        scratch_.workers[static_cast<size_t>(worker)].floats,
        reinterpret_cast<int8_t*>(scratch_.int8_tokens + token * sizes_.gather_stride),
        scratch_.token_rows + token);
}

void ExpertsLaunch::quantise_activations(int worker) {
  const int64_t count = num_tokens_ * problem_.top_k;
  const int64_t end = (worker + 1) * count / sizes_.num_workers;
  for (int64_t row = worker * count / sizes_.num_workers; row < end; ++row) {
    bf16* activations = scratch_.activations + row * sizes_.activation_stride;
    int8_kernels_.quantise({activations, problem_.weights.expert_size, sizes_.down_run},
                           scratch_.workers[static_cast<size_t>(worker)].floats,
                           reinterpret_cast<int8_t*>(activations),
                           scratch_.activation_rows + row);
  }
}

void ExpertsLaunch::gather(const ExpertRows& rows, const WorkerArrays& arrays) const {
  const int64_t hidden_size = problem_.weights.hidden_size;
  const size_t row_bytes = static_cast<size_t>(hidden_size) * sizeof(bf16);
  const size_t int8_bytes = static_cast<size_t>(sizes_.gate_words) * 4;
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t position = rows.first + row;
    const int64_t token = is_dense() ? position : scratch_.row_tokens[position];
    bf16* copy = arrays.gathered + row * sizes_.gather_stride;
    if (sizes_.gate_is_int8) {
      std::memcpy(copy, scratch_.int8_tokens + token * sizes_.gather_stride, int8_bytes);
      arrays.gathered_int8[row] = scratch_.token_rows[token];
      continue;
    }
    std::memcpy(copy, problem_.hidden + (first_token_ + token) * problem_.hidden_stride, row_bytes);
    if (hidden_size % 2 != 0) copy[hidden_size] = bf16{0};
  }
}

void ExpertsLaunch::run_gate_tasks(int worker) {
  const WorkerArrays& arrays = scratch_.workers[static_cast<size_t>(worker)];
  int64_t gathered_first = -1;  // of the rows that `arrays.gathered` holds
  for (int64_t index; (index = scratch_.gate_ranges.take(worker)) >= 0;) {
    const GateTask& task = scratch_.gate_tasks[static_cast<size_t>(index)];
    if (gathered_first != task.rows.first) gather(task.rows, arrays);
    gathered_first = task.rows.first;
    for (int64_t panel = task.first_panel; panel < task.last_panel; ++panel)
      multiply_gate(arrays, task, panel);
  }
}

void ExpertsLaunch::multiply_gate(const WorkerArrays& arrays, const GateTask& task, int64_t panel) {
  const PanelProduct product{
      arrays.gathered, sizes_.gather_stride, task.rows.count, gate_panel(task.rows.expert, panel),
      sizes_.gate_words,
      // Panels and experts follow each other, so this is almost always next.
      gate_panel(task.rows.expert, panel + 1).begin(), arrays.sums, arrays.scratch,
      sizes_.gate_is_int8 ? arrays.gathered_int8 : nullptr};
  bf16* out =
      scratch_.activations + task.rows.first * sizes_.activation_stride + panel * kGatePanelColumns;
  const float* bias =
      bias_of(problem_.weights.gate_up_bias, task.rows.expert, sizes_.gate_panels, panel);
  multiply_panel(kernels_, product, [&](int64_t row, int64_t count, const float* sums) {
    kernels_.gate(count, {sums, bias, problem_.gating, out + row * sizes_.activation_stride,
                          sizes_.activation_stride});
  });
}

void ExpertsLaunch::run_down_task(int worker, int64_t panel) {
  const WorkerArrays& arrays = scratch_.workers[static_cast<size_t>(worker)];
  if (!is_dense()) std::fill_n(arrays.accumulator, num_tokens_ * kPanelColumns, 0.0f);
  for (size_t index = 0; index < scratch_.experts.size(); ++index)
    multiply_down(arrays, index, panel);
  if (is_dense()) return;
  const int64_t column = panel * kPanelColumns;
  kernels_.store(
      num_tokens_,
      {arrays.accumulator, nullptr, problem_.out + first_token_ * problem_.out_stride + column,
       problem_.out_stride, std::min(kPanelColumns, problem_.weights.hidden_size - column)});
}

void ExpertsLaunch::multiply_down(const WorkerArrays& arrays, size_t index, int64_t panel) {
  const ExpertRows& rows = scratch_.experts[index];
  const bool is_last = index + 1 == scratch_.experts.size();
  const int64_t next_expert = scratch_.experts[is_last ? 0 : index + 1].expert;
  const PanelProduct product{scratch_.activations + rows.first * sizes_.activation_stride,
                             sizes_.activation_stride,
                             rows.count,
                             down_panel(rows.expert, panel),
                             sizes_.down_words,
                             down_panel(next_expert, is_last ? panel + 1 : panel).begin(),
                             arrays.sums,
                             arrays.scratch,
                             sizes_.down_is_int8 ? scratch_.activation_rows + rows.first : nullptr};
  const int64_t column = panel * kPanelColumns;
  const float* bias = bias_of(problem_.weights.down_bias, rows.expert, sizes_.down_panels, panel);
  multiply_panel(kernels_, product, [&](int64_t row, int64_t count, const float* sums) {
    const int64_t first = rows.first + row;
    if (is_dense())
      kernels_.store(
          count,
          {sums, nullptr, problem_.out + (first_token_ + first) * problem_.out_stride + column,
           problem_.out_stride, std::min(kPanelColumns, problem_.weights.hidden_size - column)});
    else
      kernels_.scatter(count, {sums, bias, scratch_.row_tokens + first,
                               scratch_.row_weights + first, arrays.accumulator});
  });
}

void check_ids(const ExpertsProblem& problem) {
  for (int64_t row = 0; row < problem.num_tokens * problem.top_k; ++row)
    if (problem.topk_ids[row] < 0 || problem.topk_ids[row] >= problem.weights.num_experts)
      throw std::invalid_argument("fused_experts: topk_ids has expert " +
                                  std::to_string(problem.topk_ids[row]) + " for token " +
                                  std::to_string(row / problem.top_k) + ", there are " +
                                  std::to_string(problem.weights.num_experts) + " experts");
}

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void check_rows(const char* what, const TensorView& view, int64_t num_rows, int64_t columns) {
  view.expect(what, DType::kBFloat16, 2).expect_size(what, 0, num_rows);
  view.expect_size(what, 1, columns);
}

const float* bias_data(const char* what, const TensorView* bias, int64_t num_experts,
                       int64_t outputs) {
  if (bias == nullptr) return nullptr;
  bias->expect(what, DType::kFloat32, 2).expect_size(what, 0, num_experts);
  bias->expect_size(what, 1, num_panels(outputs) * kPanelColumns).expect_contiguous(what);
  return bias->data<float>();
}

ExpertWeights expert_weights(const PackedExperts& experts, int64_t hidden_size) {
  const int64_t expert_size = experts.expert_size;
  if (hidden_size < 1 || expert_size < 1)
    fail("fused_experts: hidden size " + std::to_string(hidden_size) + " and expert size " +
         std::to_string(expert_size) + " must be at least 1");
  const int64_t panels = ceil_div(expert_size, kHalfPanel);
  const PackedWeight gate_up{nullptr, experts.gate_up_format, panels * kPanelColumns, hidden_size};
  const PackedWeight down{nullptr, experts.down_format, hidden_size, expert_size};
  const int64_t expert_bytes = down.num_bytes();
  experts.down.expect("fused_experts: down", DType::kUInt8, 1);
  const int64_t num_experts = experts.down.size(0) / expert_bytes;
  if (num_experts < 1 || num_experts * expert_bytes != experts.down.size(0))
    fail("fused_experts: down has " + std::to_string(experts.down.size(0)) +
         " bytes, an expert has " + std::to_string(expert_bytes));
  return {
      packed_data("fused_experts: gate_up", experts.gate_up, num_experts * gate_up.num_bytes()),
      packed_data("fused_experts: down", experts.down, experts.down.size(0)),
      experts.gate_up_format,
      experts.down_format,
      num_experts,
      hidden_size,
      expert_size,
      bias_data("fused_experts: gate_up_bias", experts.gate_up_bias, num_experts, 2 * expert_size),
      bias_data("fused_experts: down_bias", experts.down_bias, num_experts, hidden_size)};
}

}  // namespace

void fused_experts(const ExpertsProblem& problem) {
  if (problem.num_tokens == 0) return;
  if (problem.topk_ids != nullptr) check_ids(problem);
  thread_local ExpertsScratch scratch;
  const auto pool = worker_pool();
  const Sizes sizes = make_sizes(problem, pool->num_threads());
  const int64_t num_bytes = carve(sizes, nullptr, &scratch);
  carve(sizes, scratch.memory.reserve(num_bytes), &scratch);
  scratch.gate_ranges.resize(sizes.num_workers);
  scratch.down_ranges.resize(sizes.num_workers);
  ExpertsLaunch launch(problem, sizes, &scratch);
  if (sizes.num_workers == 1)
    launch.work(0);
  else
    pool->run([&](int worker) { launch.work(worker); });
}

void fused_experts_op(const TensorView& hidden, const TensorView& topk_ids,
                      const TensorView& topk_weights, const PackedExperts& experts,
                      const TensorView& out) {
  hidden.expect("fused_experts: hidden", DType::kBFloat16, 2);
  const int64_t num_tokens = hidden.size(0), hidden_size = hidden.size(1);
  check_rows("fused_experts: out", out, num_tokens, hidden_size);
  topk_ids.expect("fused_experts: topk_ids", DType::kInt32, 2)
      .expect_size("fused_experts: topk_ids", 0, num_tokens)
      .expect_contiguous("fused_experts: topk_ids");
  const int64_t top_k = topk_ids.size(1);
  if (top_k < 1) fail("fused_experts: topk_ids has no columns");
  topk_weights.expect("fused_experts: topk_weights", DType::kFloat32, 2)
      .expect_size("fused_experts: topk_weights", 0, num_tokens)
      .expect_size("fused_experts: topk_weights", 1, top_k)
      .expect_contiguous("fused_experts: topk_weights");
  fused_experts({expert_weights(experts, hidden_size), hidden.data<bf16>(), hidden.stride(0),
                 topk_ids.data<int32_t>(), topk_weights.data<float>(), num_tokens, top_k,
                 out.data<bf16>(), out.stride(0), experts.gating});
}

void gated_ffn_op(const TensorView& hidden, const PackedExperts& expert, const TensorView& out) {
  hidden.expect("gated_ffn: hidden", DType::kBFloat16, 2);
  check_rows("gated_ffn: out", out, hidden.size(0), hidden.size(1));
  const ExpertWeights weights = expert_weights(expert, hidden.size(1));
  if (weights.num_experts != 1) fail("gated_ffn: the weights hold more than one expert");
  fused_experts({weights, hidden.data<bf16>(), hidden.stride(0), nullptr, nullptr, hidden.size(0),
                 1, out.data<bf16>(), out.stride(0), expert.gating});
}

}  // namespace raymoe
