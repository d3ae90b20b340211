// Checks of causal convolution and of gated recurrences, and their work for the worker pool.
#include "raymoe/state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"
#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Sequence {
  int64_t first_token, num_tokens, slot;
  bool is_fresh;  // begins at position 0
};

/// Sequences with tokens, each with a slot of its own; the longest first.
class Sequences {
 public:
  Sequences(const char* kernel, const StateStep& step, int64_t num_tokens, int64_t num_slots)
      : kernel_(kernel) {
    const std::string prefix = kernel_ + ": ";
    const int64_t count = step.context_tokens.size(0);
    step.context_tokens.expect((prefix + "context_tokens").c_str(), DType::kInt32, 1);
    step.query_start.expect((prefix + "query_start").c_str(), DType::kInt32, 1)
        .expect_size((prefix + "query_start").c_str(), 0, count + 1);
    step.slots.expect((prefix + "slots").c_str(), DType::kInt32, 1)
        .expect_size((prefix + "slots").c_str(), 0, count);
    const int32_t* starts = step.query_start.data<int32_t>();
    if (starts[0] != 0 || starts[count] != num_tokens)
      refuse("query_start runs from " + std::to_string(starts[0]) + " to " +
             std::to_string(starts[count]) + ", expected 0 to " + std::to_string(num_tokens));
    std::vector<bool> is_taken(static_cast<size_t>(num_slots), false);
    for (int64_t i = 0; i < count; ++i) add(step, i, is_taken);
    std::stable_sort(all_.begin(), all_.end(), [](const Sequence& a, const Sequence& b) {
      return a.num_tokens > b.num_tokens;
    });
  }

  [[noreturn]] void refuse(const std::string& message) const {
    throw std::invalid_argument(kernel_ + ": " + message);
  }

  const std::vector<Sequence>& all() const { return all_; }

 private:
  void add(const StateStep& step, int64_t i, std::vector<bool>& is_taken) {
    const int32_t* starts = step.query_start.data<int32_t>();
    const int64_t count = starts[i + 1] - starts[i], slot = step.slots.data<int32_t>()[i];
    const int64_t context = step.context_tokens.data<int32_t>()[i];
    const std::string name = "sequence " + std::to_string(i);
    if (count < 0) refuse("query_start falls after entry " + std::to_string(i));
    if (count == 0) return;
    if (count > context)
      refuse(name + " has " + std::to_string(count) + " tokens in the step but " +
             std::to_string(context) + " context_tokens");
    const auto num_slots = static_cast<int64_t>(is_taken.size());
    if (slot < 0 || slot >= num_slots)
      refuse("slots[" + std::to_string(i) + "] is " + std::to_string(slot) + ", there are " +
             std::to_string(num_slots) + " states");
    if (is_taken[static_cast<size_t>(slot)])
      refuse("slots[" + std::to_string(i) + "] is " + std::to_string(slot) +
             ", as that of an earlier sequence");
    is_taken[static_cast<size_t>(slot)] = true;
    all_.push_back({starts[i], count, slot, count == context});
  }

  const std::string kernel_;
  std::vector<Sequence> all_;
};

/// Runs body(worker, task) for all tasks, or on the calling thread if they are little work.
template <typename Body>
void run_tasks(int64_t num_tasks, double elements, const Body& body) {
  constexpr double kFewElements = 32768;
  if (num_tasks == 1 || elements < kFewElements) {
    for (int64_t task = 0; task < num_tasks; ++task) body(0, task);
    return;
  }
  worker_pool()->for_each(num_tasks, 1, body);
}

int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// A range of tokens and of channels of one sequence.
struct ConvTask {
  const Sequence* sequence;
  int64_t first_token, num_tokens, begin, end;
};

constexpr int64_t kConvTokens = 32;

class Convolution {
 public:
  Convolution(const TensorView& inputs, const TensorView& weight, const TensorView* bias,
              const TensorView& states, bool silu, const TensorView& out)
      : kernel_(state_kernels().convolve.of(inputs.dtype(), "causal_conv: inputs")),
        inputs_(inputs), states_(states), out_(out), bytes_(element_bytes(inputs.dtype())) {
    tile_.weight = weight.data<float>();
    tile_.bias = bias == nullptr ? nullptr : bias->data<float>();
    tile_.input_stride = inputs.stride(0);
    tile_.num_channels = inputs.size(1);
    tile_.taps = weight.size(0);
    tile_.silu = silu;
  }

  void run(const std::vector<Sequence>& sequences) {
    std::vector<ConvTask> tasks;
    const int64_t channels = tile_.num_channels;
    const int64_t width =
        ceil_div(ceil_div(channels, ceil_div(channels, kConvChannels)), 16) * 16;
    for (const Sequence& sequence : sequences)
      for (int64_t first = 0; first < sequence.num_tokens; first += kConvTokens)
        for (int64_t begin = 0; begin < channels; begin += width)
          tasks.push_back({&sequence, first, std::min(kConvTokens, sequence.num_tokens - first),
                           begin, std::min(begin + width, channels)});
    const double elements = static_cast<double>(inputs_.size(0)) * static_cast<double>(channels);
    run_tasks(static_cast<int64_t>(tasks.size()), elements,
              [&](int, int64_t task) { run_task(tasks[static_cast<size_t>(task)]); });
  }

 private:
  char* state_row(const Sequence& sequence, int64_t row, int64_t channel) const {
    return static_cast<char*>(states_.raw()) +
           (sequence.slot * states_.stride(0) + row * tile_.num_channels + channel) * bytes_;
  }

  const char* input_row(int64_t token, int64_t channel) const {
    return static_cast<const char*>(inputs_.raw()) +
           (token * inputs_.stride(0) + channel) * bytes_;
  }

  void run_task(const ConvTask& task) const {
    const Sequence& sequence = *task.sequence;
    const int64_t token = sequence.first_token + task.first_token;
    ConvTile tile = tile_;
    tile.inputs = input_row(token, 0);
    tile.out = static_cast<char*>(out_.raw()) + token * tile.num_channels * bytes_;
    tile.past = sequence.is_fresh ? nullptr : state_row(sequence, 0, 0);
    tile.num_tokens = task.num_tokens;
    tile.num_before = task.first_token;
    kernel_(tile, task.begin, task.end);
    // The tile of the first tokens alone has read the state.
    if (task.first_token == 0) keep_inputs(sequence, task.begin, task.end);
  }

  void keep_inputs(const Sequence& sequence, int64_t begin, int64_t end) const {
    const int64_t past = tile_.taps - 1, count = sequence.num_tokens;
    const auto num_bytes = static_cast<size_t>((end - begin) * bytes_);
    for (int64_t row = 0; row < past; ++row) {
      char* to = state_row(sequence, row, begin);
      const int64_t token = row + count - past;  // of this step
      if (token >= 0)
        std::memcpy(to, input_row(sequence.first_token + token, begin), num_bytes);
      else if (sequence.is_fresh)
        std::memset(to, 0, num_bytes);
      else
        std::memcpy(to, state_row(sequence, row + count, begin), num_bytes);
    }
  }

  const FloatKernels<ConvTile>::Kernel kernel_;
  const TensorView &inputs_, &states_, &out_;
  const int64_t bytes_;
  ConvTile tile_{};
};

/// Heads [first, last) of one sequence, or columns of one head.
struct ScanTask {
  const Sequence* sequence;
  int64_t first_head, last_head, first_column, last_column;
};

class Scan {
 public:
  Scan(const ScanViews& views, const ScanOptions& options, const TensorView& out)
      : kernel_(kernels_of(views.states.dtype()).of(views.query.dtype(), "scan: query")),
        views_(views), out_(out), pool_(worker_pool()),
        bytes_(element_bytes(views.query.dtype())),
        state_bytes_(element_bytes(views.states.dtype())) {
    all_.query_stride = views.query.stride(0);
    all_.key_stride = views.key.stride(0);
    all_.value_stride = views.value.stride(0);
    all_.decay_stride = views.log_decay.stride(0);
    all_.gain_stride = views.gain.stride(0);
    all_.num_heads = views.value.size(1);
    all_.heads_per_group = all_.num_heads / views.key.size(1);
    all_.key_dim = views.key.size(2);
    all_.value_dim = views.value.size(2);
    all_.scale = static_cast<float>(options.scale);
    all_.per_channel = views.log_decay.rank() == 3;
    all_.delta = options.delta;
    all_.normalize = options.normalize;
    state_floats_ = all_.key_dim * all_.value_dim;
  }

  void run(const std::vector<Sequence>& sequences) {
    plan(sequences);
    const int64_t floats = scan_scratch_floats(all_.key_dim, all_.value_dim);
    std::vector<Scratch> scratch(static_cast<size_t>(pool_->num_threads()));
    const double elements = static_cast<double>(views_.query.size(0) * all_.num_heads) *
                            static_cast<double>(state_floats_);
    run_tasks(static_cast<int64_t>(tasks_.size()), elements, [&](int worker, int64_t task) {
      void* memory = scratch[static_cast<size_t>(worker)].reserve(floats * 4);
      run_task(tasks_[static_cast<size_t>(task)], static_cast<float*>(memory));
    });
  }

 private:
  static const FloatKernels<ScanSequence>& kernels_of(DType states) {
    const StateKernels& kernels = state_kernels();
    return states == DType::kBFloat16 ? kernels.scan_bf16_states : kernels.scan;
  }

  /// Tasks of similar length: heads of a sequence together while there are tasks enough, else
  /// columns of a head, which prepare its keys again.
  void plan(const std::vector<Sequence>& sequences) {
    constexpr int64_t kTasksPerThread = 8, kMaxHeads = 32;
    const int64_t heads = all_.num_heads, width = all_.value_dim;
    const int64_t wanted = kTasksPerThread * pool_->num_threads();
    const auto total = heads * static_cast<int64_t>(views_.query.size(0));
    for (const Sequence& sequence : sequences) {
      const int64_t share = std::max<int64_t>(total / wanted, 1);  // of tokens and heads
      const int64_t together = std::clamp<int64_t>(share / sequence.num_tokens, 1, kMaxHeads);
      const int64_t parts =
          pool_->num_threads() == 1 ? 1 : ceil_div(sequence.num_tokens, 2 * share);
      const int64_t columns = ceil_div(ceil_div(width, parts), kScanColumns) * kScanColumns;
      for (int64_t head = 0; head < heads; head += together)
        for (int64_t column = 0; column < width; column += columns)
          tasks_.push_back({&sequence, head, std::min(head + together, heads), column,
                            std::min(column + columns, width)});
    }
  }

  void run_task(const ScanTask& task, float* scratch) const {
    const Sequence& sequence = *task.sequence;
    ScanSequence scanned = all_;
    const int64_t token = sequence.first_token;
    scanned.query = at(views_.query, token);
    scanned.key = at(views_.key, token);
    scanned.value = at(views_.value, token);
    scanned.out = static_cast<char*>(out_.raw()) + token * out_.stride(0) * bytes_;
    scanned.log_decay = views_.log_decay.data<float>() + token * all_.decay_stride;
    scanned.gain = views_.gain.data<float>() + token * all_.gain_stride;
    scanned.state = static_cast<char*>(views_.states.raw()) +
                    sequence.slot * views_.states.stride(0) * state_bytes_;
    scanned.num_tokens = sequence.num_tokens;
    scanned.is_fresh = sequence.is_fresh;
    scanned.first_column = task.first_column;
    scanned.last_column = task.last_column;
    scanned.scratch = scratch;
    kernel_(scanned, task.first_head, task.last_head);
  }

  const char* at(const TensorView& view, int64_t token) const {
    return static_cast<const char*>(view.raw()) + token * view.stride(0) * bytes_;
  }

  const FloatKernels<ScanSequence>::Kernel kernel_;
  const ScanViews& views_;
  const TensorView& out_;
  const std::shared_ptr<WorkerPool> pool_;
  const int64_t bytes_, state_bytes_;
  ScanSequence all_{};
  int64_t state_floats_ = 0;
  std::vector<ScanTask> tasks_;
};

/// [tokens, rows, dim], contiguous within a token.
void check_rows(const TensorView& tensor, const char* what, DType dtype, int64_t num_tokens,
                int64_t rows, int64_t dim) {
  tensor.expect(what, dtype, 3).expect_size(what, 0, num_tokens).expect_size(what, 1, rows);
  tensor.expect_size(what, 2, dim);
  if (tensor.num_elements() > 0 && rows > 1 && tensor.stride(1) != dim)
    throw std::invalid_argument(std::string(what) +
                                " must be contiguous in its last two dimensions");
}

void check_dim(const char* what, int64_t dim, int64_t max) {
  if (dim < 8 || dim % 8 != 0 || dim > max)
    throw std::invalid_argument(std::string(what) + " has dimension " + std::to_string(dim) +
                                ", expected a multiple of 8 up to " + std::to_string(max));
}

void check_scan(const ScanViews& views, const ScanOptions& options, const TensorView& out) {
  const TensorView &query = views.query, &key = views.key, &value = views.value;
  query.expect_rank("scan: query", 3);
  state_kernels().scan.of(query.dtype(), "scan: query");
  key.expect_rank("scan: key", 3);
  value.expect_rank("scan: value", 3);
  const int64_t num_tokens = query.size(0), groups = key.size(1), heads = value.size(1);
  check_dim("scan: key", key.size(2), kMaxKeyDim);
  check_dim("scan: value", value.size(2), kMaxValueDim);
  check_rows(query, "scan: query", query.dtype(), num_tokens, groups, key.size(2));
  check_rows(key, "scan: key", query.dtype(), num_tokens, groups, key.size(2));
  check_rows(value, "scan: value", query.dtype(), num_tokens, heads, value.size(2));
  if (groups < 1 || heads < 1 || heads % groups != 0)
    throw std::invalid_argument("scan: value has " + std::to_string(heads) +
                                " heads, not a multiple of key's " + std::to_string(groups));
  if (views.log_decay.rank() == 3)
    check_rows(views.log_decay, "scan: log_decay", DType::kFloat32, num_tokens, heads,
               key.size(2));
  else
    views.log_decay.expect("scan: log_decay", DType::kFloat32, 2)
        .expect_size("scan: log_decay", 0, num_tokens)
        .expect_size("scan: log_decay", 1, heads);
  views.gain.expect("scan: gain", DType::kFloat32, 2)
      .expect_size("scan: gain", 0, num_tokens)
      .expect_size("scan: gain", 1, heads);
  const DType states = views.states.dtype();
  if (states != DType::kFloat32 && states != DType::kBFloat16)
    throw std::invalid_argument(std::string("scan: states has dtype ") + dtype_name(states) +
                                ", expected float32 or bfloat16");
  views.states.expect_rank("scan: states", 4)
      .expect_size("scan: states", 1, heads)
      .expect_size("scan: states", 2, key.size(2))
      .expect_size("scan: states", 3, value.size(2));
  if (views.states.num_elements() > 0 &&
      ((heads > 1 && views.states.stride(1) != key.size(2) * value.size(2)) ||
       views.states.stride(2) != value.size(2)))
    throw std::invalid_argument("scan: states must be contiguous within a slot");
  if (!std::isfinite(options.scale))
    throw std::invalid_argument("scan: scale is " + std::to_string(options.scale) +
                                ", expected a finite number");
  check_rows(out, "scan: out", query.dtype(), num_tokens, heads, value.size(2));
  out.expect_contiguous("scan: out");
}

void check_conv(const TensorView& inputs, const TensorView& weight, const TensorView* bias,
                const TensorView& states, const TensorView& out) {
  inputs.expect_rank("causal_conv: inputs", 2);
  state_kernels().convolve.of(inputs.dtype(), "causal_conv: inputs");
  const int64_t channels = inputs.size(1), taps = weight.rank() == 2 ? weight.size(0) : 0;
  weight.expect("causal_conv: weight", DType::kFloat32, 2)
      .expect_size("causal_conv: weight", 1, channels)
      .expect_contiguous("causal_conv: weight");
  if (taps < 1 || taps > kMaxTaps)
    throw std::invalid_argument("causal_conv: weight has " + std::to_string(taps) +
                                " taps, expected 1 to " + std::to_string(kMaxTaps));
  if (bias != nullptr)
    bias->expect("causal_conv: bias", DType::kFloat32, 1)
        .expect_size("causal_conv: bias", 0, channels);
  states.expect("causal_conv: states", inputs.dtype(), 3)
      .expect_size("causal_conv: states", 1, taps - 1)
      .expect_size("causal_conv: states", 2, channels);
  if (states.num_elements() > 0 && taps > 2 && states.stride(1) != channels)
    throw std::invalid_argument("causal_conv: states must be contiguous within a slot");
  out.expect("causal_conv: out", inputs.dtype(), 2)
      .expect_size("causal_conv: out", 0, inputs.size(0))
      .expect_size("causal_conv: out", 1, channels)
      .expect_contiguous("causal_conv: out");
}

}  // namespace

void causal_conv(const TensorView& inputs, const TensorView& weight, const TensorView* bias,
                 const TensorView& states, const StateStep& step, bool silu,
                 const TensorView& out) {
  check_conv(inputs, weight, bias, states, out);
  const Sequences sequences("causal_conv", step, inputs.size(0), states.size(0));
  Convolution(inputs, weight, bias, states, silu, out).run(sequences.all());
}

void scan(const ScanViews& views, const StateStep& step, const ScanOptions& options,
          const TensorView& out) {
  check_scan(views, options, out);
  const Sequences sequences("scan", step, views.query.size(0), views.states.size(0));
  Scan(views, options, out).run(sequences.all());
}

}  // namespace raymoe
