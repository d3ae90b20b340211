// Experts on row-major weights. For each block of tokens, with barriers between:
//   sort   the calling thread groups the block's (token, slot) rows by expert
//   gate   tasks of (rows of an expert, outputs of gate and up): gather, multiply, gate * up
//   down   tasks of a few columns over all experts in ascending order: multiply, add to the sums
// Down tasks own their columns, so the sums of a token need no locks and have one order.
#include "raymoe/row_experts.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

constexpr int64_t kGatherBytes = 384 << 10;     // rows that are multiplied at once stay in L2
constexpr int64_t kActivationBytes = 64 << 20;  // gated products of a block of tokens
constexpr int64_t kRowsPerExpert = 128;         // beyond these, reading weights again costs little

struct Rows {
  int64_t expert, first, count;  // in sorted order
};

struct Matrix {
  const char* gate;
  const char* up;
  const char* down;
};

class Launch {
 public:
  Launch(const TensorView& hidden, const TensorView& ids, const TensorView& weights,
         const RowExperts& experts, const TensorView& sum)
      : hidden_(hidden), experts_(experts), sum_(sum), dtype_(hidden.dtype()),
        ids_(ids.data<int32_t>()), weights_(weights.data<float>()), top_k_(ids.size(1)),
        hidden_size_(hidden.size(1)), expert_size_(experts.expert_size), pool_(worker_pool()) {
    element_bytes_ = dtype_ == DType::kFloat32 ? 4 : 2;
    input_bytes_ = dtype_ == DType::kBFloat16 ? kernels_.input_bytes_of_bf16 : 4;
    hidden_stride_ = padded(hidden_size_), stride_ = padded(expert_size_);
    gather_rows_ = std::max<int64_t>(6, kGatherBytes / (input_bytes_ * hidden_size_) / 6 * 6);
  }

  void run() {
    const int64_t num_tokens = hidden_.size(0), row_bytes = input_bytes_ * stride_ * top_k_;
    int64_t block = std::max<int64_t>(512, kRowsPerExpert * experts_.matrices.size(0) / top_k_);
    block = std::clamp<int64_t>(kActivationBytes / row_bytes, 1, block);
    for (int64_t token = 0; token < num_tokens; token += block)
      run_block(token, std::min(block, num_tokens - token));
  }

 private:
  void run_block(int64_t first_token, int64_t num_tokens) {
    sort(first_token, num_tokens);
    if (tokens_.empty()) return;
    activations_.resize(tokens_.size() * static_cast<size_t>(input_bytes_ * stride_));
    const int64_t chunks = ceil(expert_size_), num_pieces = static_cast<int64_t>(pieces_.size());
    workers_.resize(static_cast<size_t>(pool_->num_threads()));
    for (Worker& worker : workers_) worker.gathered_piece = -1;
    each(num_pieces * chunks, [&](Worker& worker, int64_t task) {
      run_gate(worker, task / chunks, task % chunks * kRowOutputs);
    });
    each(ceil(hidden_size_),
         [&](Worker& worker, int64_t task) { run_down(worker, task * kRowOutputs); });
  }

  struct Worker {
    std::vector<char> gathered;
    std::vector<float> gate, up;
    int64_t gathered_piece;
  };

  /// An odd number of cache lines: rows a power of two apart would share few sets of the cache.
  static int64_t padded(int64_t size) { return (size + 31) / 64 * 64 + 32; }
  static int64_t ceil(int64_t size) { return (size + kRowOutputs - 1) / kRowOutputs; }

  /// Consecutive tasks for each worker, which takes others when its own are done.
  template <typename Body>
  void each(int64_t num_tasks, const Body& body) {
    if (num_tasks < 2 || pool_->num_threads() == 1) {
      for (int64_t task = 0; task < num_tasks; ++task) body(workers_[0], task);
      return;
    }
    ranges_.resize(pool_->num_threads());
    ranges_.set_even(num_tasks);
    pool_->run([&](int worker) {
      for (int64_t task; (task = ranges_.take(worker)) >= 0;)
        body(workers_[static_cast<size_t>(worker)], task);
    });
  }

  /// Counting sort of the block's rows by expert, and the pieces that fit in cache.
  void sort(int64_t first_token, int64_t num_tokens) {
    const int64_t first = experts_.first, count = experts_.last - first;
    const int64_t begin = first_token * top_k_, end = begin + num_tokens * top_k_;
    std::vector<int64_t> starts(static_cast<size_t>(count) + 1, 0);
    for (int64_t row = begin; row < end; ++row)
      if (is_ours(ids_[row])) ++starts[static_cast<size_t>(ids_[row] - first) + 1];
    rows_.clear();
    pieces_.clear();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t size = starts[static_cast<size_t>(i) + 1];
      const int64_t start = starts[static_cast<size_t>(i)];
      starts[static_cast<size_t>(i) + 1] += start;
      if (size == 0) continue;
      rows_.push_back({first + i, start, size});
      for (int64_t row = 0; row < size; row += gather_rows_)
        pieces_.push_back({first + i, start + row, std::min(gather_rows_, size - row)});
    }
    tokens_.resize(static_cast<size_t>(starts.back()));
    shares_.resize(tokens_.size());
    for (int64_t row = begin; row < end; ++row) {
      if (!is_ours(ids_[row])) continue;
      const auto place = static_cast<size_t>(starts[static_cast<size_t>(ids_[row] - first)]++);
      tokens_[place] = static_cast<int32_t>(row / top_k_);
      shares_[place] = weights_[row];
    }
  }

  bool is_ours(int32_t expert) const { return expert >= experts_.first && expert < experts_.last; }

  Matrix matrix(int64_t expert) const {
    const int64_t* row = experts_.matrices.data<int64_t>() + 3 * expert;
    return {reinterpret_cast<const char*>(row[0]), reinterpret_cast<const char*>(row[1]),
            reinterpret_cast<const char*>(row[2])};
  }

  static const float* bias(const TensorView* view, int64_t expert, int64_t begin) {
    return view == nullptr ? nullptr : view->data<float>() + expert * view->size(1) + begin;
  }

  void run_gate(Worker& worker, int64_t number, int64_t begin) {
    const Rows& piece = pieces_[static_cast<size_t>(number)];
    if (worker.gathered_piece != number) {
      worker.gathered.resize(static_cast<size_t>(piece.count * hidden_stride_ * input_bytes_));
      kernels_.gather.of(dtype_, "hidden")(
          {hidden_.raw(), hidden_.stride(0), tokens_.data() + piece.first, hidden_size_,
           worker.gathered.data(), hidden_stride_},
          0, piece.count);
      worker.gathered_piece = number;
    }
    const int64_t count = std::min(kRowOutputs, expert_size_ - begin);
    const Matrix weights = matrix(piece.expert);
    const int64_t offset = begin * hidden_size_ * element_bytes_;
    worker.gate.resize(static_cast<size_t>(piece.count * kRowOutputs));
    const auto dots = kernels_.dots.of(dtype_, "hidden");
    const int64_t after = offset + count * hidden_size_ * element_bytes_;
    const char* next = next_gate(number, begin + count, weights.gate + after);
    const bool is_square = weights.up == weights.gate;
    dots({worker.gathered.data(), hidden_stride_, weights.gate + offset, hidden_size_, count,
          worker.gate.data(), is_square ? next : weights.up + offset},
         0, piece.count);
    if (!is_square) {
      worker.up.resize(worker.gate.size());
      dots({worker.gathered.data(), hidden_stride_, weights.up + offset, hidden_size_, count,
            worker.up.data(), next},
           0, piece.count);
    }
    const float* up = is_square ? worker.gate.data() : worker.up.data();
    char* out = activations_.data() + (piece.first * stride_ + begin) * input_bytes_;
    kernels_.gate.of(dtype_, "hidden")(
        {worker.gate.data(), up, bias(experts_.gate_bias, piece.expert, begin),
         bias(experts_.up_bias, piece.expert, begin), experts_.gating, count, out, stride_},
        0, piece.count);
  }

  /// The weights of the next task: those that follow, or the first ones of the next rows' expert.
  const char* next_gate(int64_t number, int64_t begin, const char* following) const {
    if (begin < expert_size_) return following;
    const auto next = static_cast<size_t>(number) + 1;
    return next < pieces_.size() ? matrix(pieces_[next].expert).gate : nullptr;
  }

  void run_down(Worker& worker, int64_t begin) {
    const int64_t count = std::min(kRowOutputs, hidden_size_ - begin);
    const auto dots = kernels_.dots.of(dtype_, "hidden");
    const int64_t offset = begin * expert_size_ * element_bytes_;
    for (size_t number = 0; number < rows_.size(); ++number) {
      const Rows& rows = rows_[number];
      const bool is_last = number + 1 == rows_.size();
      const char* next = is_last ? nullptr : matrix(rows_[number + 1].expert).down + offset;
      worker.gate.resize(static_cast<size_t>(rows.count * kRowOutputs));
      const char* inputs = activations_.data() + rows.first * stride_ * input_bytes_;
      const char* weights = matrix(rows.expert).down + offset;
      dots({inputs, stride_, weights, expert_size_, count, worker.gate.data(), next}, 0,
           rows.count);
      const float* bias_of = bias(experts_.down_bias, rows.expert, begin);
      for (int64_t row = 0; row < rows.count; ++row) {
        const auto place = static_cast<size_t>(rows.first + row);
        float* sums = sum_.data<float>() + tokens_[place] * sum_.stride(0) + begin;
        const float* values = worker.gate.data() + row * kRowOutputs;
        for (int64_t i = 0; i < count; ++i)
          sums[i] += shares_[place] * (bias_of == nullptr ? values[i] : values[i] + bias_of[i]);
      }
    }
  }

  const RowKernels& kernels_ = row_kernels();
  const TensorView& hidden_;
  const RowExperts& experts_;
  const TensorView& sum_;
  const DType dtype_;
  const int32_t* ids_;
  const float* weights_;
  const int64_t top_k_, hidden_size_, expert_size_;
  int64_t element_bytes_, input_bytes_, hidden_stride_, stride_, gather_rows_;
  std::shared_ptr<WorkerPool> pool_;
  TaskRanges ranges_;
  std::vector<Worker> workers_;
  std::vector<Rows> rows_, pieces_;
  std::vector<int32_t> tokens_;  // of each sorted row
  std::vector<float> shares_;
  std::vector<char> activations_;  // [rows][stride]
};

constexpr const char* kName = "add_row_experts";

[[noreturn]] void fail(const std::string& message) {
  throw std::invalid_argument(std::string(kName) + ": " + message);
}

void check_bias(const TensorView* bias, int64_t num_experts, int64_t size) {
  if (bias == nullptr) return;
  bias->expect("add_row_experts: bias", DType::kFloat32, 2)
      .expect_size("add_row_experts: bias", 0, num_experts)
      .expect_size("add_row_experts: bias", 1, size)
      .expect_contiguous("add_row_experts: bias");
}

void check_experts(const RowExperts& experts, int64_t hidden_size) {
  const TensorView& matrices = experts.matrices;
  matrices.expect("add_row_experts: matrices", DType::kInt64, 2)
      .expect_size("add_row_experts: matrices", 1, 3)
      .expect_contiguous("add_row_experts: matrices");
  const int64_t num_experts = matrices.size(0);
  if (experts.first < 0 || experts.first > experts.last || experts.last > num_experts)
    fail("experts " + std::to_string(experts.first) + " to " + std::to_string(experts.last) +
         " of " + std::to_string(num_experts));
  if (hidden_size < 1 || experts.expert_size < 1)
    fail("hidden size " + std::to_string(hidden_size) + " and expert size " +
         std::to_string(experts.expert_size) + " must be at least 1");
  for (int64_t expert = experts.first; expert < experts.last; ++expert)
    for (int64_t part = 0; part < 3; ++part)
      if (matrices.data<int64_t>()[3 * expert + part] == 0)
        fail("expert " + std::to_string(expert) + " has no weights here");
  if ((experts.gate_bias == nullptr) != (experts.up_bias == nullptr))
    fail("gate and up have biases together or not at all");
  check_bias(experts.gate_bias, num_experts, experts.expert_size);
  check_bias(experts.up_bias, num_experts, experts.expert_size);
  check_bias(experts.down_bias, num_experts, hidden_size);
}

}  // namespace

void add_row_experts_op(const TensorView& hidden, const TensorView& topk_ids,
                        const TensorView& topk_weights, const RowExperts& experts,
                        const TensorView& sum) {
  hidden.expect_rank("add_row_experts: hidden", 2);
  row_kernels().gather.of(hidden.dtype(), "add_row_experts: hidden");
  const int64_t num_tokens = hidden.size(0);
  sum.expect("add_row_experts: sum", DType::kFloat32, 2)
      .expect_size("add_row_experts: sum", 0, num_tokens)
      .expect_size("add_row_experts: sum", 1, hidden.size(1));
  topk_ids.expect("add_row_experts: topk_ids", DType::kInt32, 2)
      .expect_size("add_row_experts: topk_ids", 0, num_tokens)
      .expect_contiguous("add_row_experts: topk_ids");
  if (topk_ids.size(1) < 1) fail("topk_ids has no columns");
  topk_weights.expect("add_row_experts: topk_weights", DType::kFloat32, 2)
      .expect_size("add_row_experts: topk_weights", 0, num_tokens)
      .expect_size("add_row_experts: topk_weights", 1, topk_ids.size(1))
      .expect_contiguous("add_row_experts: topk_weights");
  check_experts(experts, hidden.size(1));
  if (num_tokens > 0) Launch(hidden, topk_ids, topk_weights, experts, sum).run();
}

}  // namespace raymoe
