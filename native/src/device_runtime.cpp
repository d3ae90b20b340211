#include "raymoe/device_runtime.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <stdexcept>

namespace raymoe {

double host_seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void sleep_until(double time_s) {
  constexpr double kSpinS = 100e-6;
  double rest_s;
  while ((rest_s = time_s - host_seconds()) > 0) {
    if (rest_s > kSpinS) {
      const double sleep_s = rest_s - kSpinS;
      timespec pause{static_cast<time_t>(sleep_s), 0};
      pause.tv_nsec = static_cast<long>(1e9 * (sleep_s - static_cast<double>(pause.tv_sec)));
      nanosleep(&pause, nullptr);
    } else {
      sched_yield();
    }
  }
}

EventRef DeviceRuntime::record(void* stream) {
  auto event = std::make_unique<Event>();
  {
    std::lock_guard<std::mutex> lock(pool_mutex_);
    if (!pool_.empty()) {
      event->handle = pool_.back();
      pool_.pop_back();
    }
  }
  if (event->handle == nullptr) event->handle = new_event();
  EventRef shared(event.release(), [runtime = shared_from_this()](Event* used) {
    runtime->give_back(used->handle);
    delete used;
  });
  record_event(*shared, stream);
  return shared;
}

void DeviceRuntime::give_back(void* handle) {
  std::lock_guard<std::mutex> lock(pool_mutex_);
  pool_.push_back(handle);
}

void DeviceRuntime::close() noexcept {
  std::vector<void*> unused;
  {
    std::lock_guard<std::mutex> lock(pool_mutex_);
    unused.swap(pool_);
  }
  for (void* handle : unused) destroy_event(handle);
}

namespace {

constexpr int kSuccess = 0, kNotReady = 600;
constexpr int kCallRequiresNewerDriver = 36, kNotSupported = 801;
constexpr unsigned kBlockingSync = 1;  // cudaEventBlockingSync: waiting for an event sleeps
constexpr int kMemcpyDefault = 4;      // the driver finds the direction from the addresses
constexpr int kFirstWithBatches = 12080, kFirstWithoutFailIndex = 13000;

struct MemcpyLocation {
  int type, id;
};
struct MemcpyAttributes {
  int source_access_order;
  MemcpyLocation source_hint, target_hint;
  unsigned flags;
};
constexpr int kInStreamOrder = 1;  // cudaMemcpySrcAccessOrderStream

class CudaRuntime final : public DeviceRuntime {
 public:
  CudaRuntime(const CudaFunctions& functions, int device, int version, void* clock_stream,
              double anchor_s)
      : device_(device), version_(version), clock_stream_(clock_stream), anchor_s_(anchor_s) {
    load(functions, "cudaSetDevice", set_device_);
    load(functions, "cudaMemcpyAsync", memcpy_);
    load(functions, "cudaEventCreateWithFlags", event_create_);
    load(functions, "cudaEventDestroy", event_destroy_);
    load(functions, "cudaEventRecord", event_record_);
    load(functions, "cudaEventSynchronize", event_synchronize_);
    load(functions, "cudaEventQuery", event_query_);
    load(functions, "cudaEventElapsedTime", event_elapsed_);
    load(functions, "cudaStreamWaitEvent", stream_wait_);
    load(functions, "cudaStreamSynchronize", stream_synchronize_);
    load(functions, "cudaGetErrorString", error_string_);
    if (version >= kFirstWithBatches && functions.count("cudaMemcpyBatchAsync") != 0)
      load(functions, "cudaMemcpyBatchAsync", memcpy_batch_);
  }

  void enter_thread() override { check(set_device_(device_), "cudaSetDevice"); }

  void copy(const std::vector<Piece>& pieces, bool can_batch, double, void* stream) override {
    if (can_batch && pieces.size() > 1 && memcpy_batch_ != nullptr && copy_batch(pieces, stream))
      return;
    for (const Piece& piece : pieces)
      check(memcpy_(piece.target, piece.source, piece.num_bytes, kMemcpyDefault, stream),
            "cudaMemcpyAsync");
  }

  void stream_wait(void* stream, const Event& event) override {
    check(stream_wait_(stream, event.handle, 0), "cudaStreamWaitEvent");
  }
  void synchronize(const Event& event) override {
    check(event_synchronize_(event.handle), "cudaEventSynchronize");
  }
  void synchronize_stream(void* stream) override {
    check(stream_synchronize_(stream), "cudaStreamSynchronize");
  }
  bool is_done(const Event& event) override {
    const int code = event_query_(event.handle);
    if (code == kNotReady) return false;
    check(code, "cudaEventQuery");
    return true;
  }

  double time_s(const Event& event) override {
    float milliseconds = 0.0f;
    check(event_elapsed_(&milliseconds, event.anchor->handle, event.handle),
          "cudaEventElapsedTime");
    return event.anchor->host_s + 1e-3 * static_cast<double>(milliseconds);
  }

  void close() noexcept override {
    {
      std::lock_guard<std::mutex> lock(anchor_mutex_);
      anchor_.reset();
    }
    DeviceRuntime::close();
  }

 protected:
  void* new_event() override {
    void* handle = nullptr;
    check(event_create_(&handle, kBlockingSync), "cudaEventCreateWithFlags");
    return handle;
  }
  void destroy_event(void* handle) noexcept override { event_destroy_(handle); }
  void record_event(Event& event, void* stream) override {
    event.anchor = anchor();
    check(event_record_(event.handle, stream), "cudaEventRecord");
  }

 private:
  template <typename Function>
  static void load(const CudaFunctions& functions, const char* name, Function*& function) {
    const auto found = functions.find(name);
    if (found == functions.end())
      throw std::invalid_argument(std::string("libcudart has no ") + name);
    function = reinterpret_cast<Function*>(found->second);
  }

  void check(int code, const char* call) const {
    if (code == kSuccess) return;
    const char* text = error_string_(code);
    throw std::runtime_error("CUDA error " + std::to_string(code) + " in " + call + ": " +
                             (text != nullptr ? text : "unknown"));
  }

  /// False, with nothing enqueued, if the driver has no batches.
  bool copy_batch(const std::vector<Piece>& pieces, void* stream) {
    std::vector<void*> targets;
    std::vector<const void*> sources;
    std::vector<size_t> sizes;
    for (const Piece& piece : pieces) {
      targets.push_back(piece.target);
      sources.push_back(piece.source);
      sizes.push_back(piece.num_bytes);
    }
    MemcpyAttributes attributes{kInStreamOrder, {0, 0}, {0, 0}, 0};
    size_t first = 0, failed = 0;
    int code;
    if (version_ < kFirstWithoutFailIndex) {
      using WithIndex = int(void**, const void**, size_t*, size_t, MemcpyAttributes*, size_t*,
                            size_t, size_t*, void*);
      code = reinterpret_cast<WithIndex*>(memcpy_batch_)(targets.data(), sources.data(),
                                                         sizes.data(), sizes.size(), &attributes,
                                                         &first, 1, &failed, stream);
    } else {
      using WithoutIndex = int(void**, const void**, size_t*, size_t, MemcpyAttributes*, size_t*,
                               size_t, void*);
      code = reinterpret_cast<WithoutIndex*>(memcpy_batch_)(targets.data(), sources.data(),
                                                            sizes.data(), sizes.size(),
                                                            &attributes, &first, 1, stream);
    }
    if (code == kCallRequiresNewerDriver || code == kNotSupported) {
      memcpy_batch_ = nullptr;
      return false;
    }
    check(code, "cudaMemcpyBatchAsync");
    return true;
  }

  std::shared_ptr<const Anchor> anchor() {
    {
      std::lock_guard<std::mutex> lock(anchor_mutex_);
      const bool is_recent =
          anchor_ != nullptr && host_seconds() - anchor_->host_s < anchor_s_;
      if (is_recent || (anchor_ != nullptr && is_renewing_)) return anchor_;
      is_renewing_ = true;
    }
    void* handle = new_event();  // without the mutex, which others want
    check(event_record_(handle, clock_stream_), "cudaEventRecord");
    check(event_synchronize_(handle), "cudaEventSynchronize");
    std::shared_ptr<const Anchor> fresh(
        new Anchor{handle, host_seconds()}, [runtime = weak_from_this()](const Anchor* unused) {
          if (const auto owner = runtime.lock()) owner->give_back(unused->handle);
          delete unused;
        });
    std::lock_guard<std::mutex> lock(anchor_mutex_);
    is_renewing_ = false;
    anchor_ = fresh;
    return fresh;
  }

  const int device_, version_;
  void* const clock_stream_;
  const double anchor_s_;
  int (*set_device_)(int) = nullptr;
  int (*memcpy_)(void*, const void*, size_t, int, void*) = nullptr;
  int (*event_create_)(void**, unsigned) = nullptr;
  int (*event_destroy_)(void*) = nullptr;
  int (*event_record_)(void*, void*) = nullptr;
  int (*event_synchronize_)(void*) = nullptr;
  int (*event_query_)(void*) = nullptr;
  int (*event_elapsed_)(float*, void*, void*) = nullptr;
  int (*stream_wait_)(void*, void*, unsigned) = nullptr;
  int (*stream_synchronize_)(void*) = nullptr;
  const char* (*error_string_)(int) = nullptr;
  void (*memcpy_batch_)() = nullptr;  // its arguments depend on the version

  std::mutex anchor_mutex_;
  std::shared_ptr<const Anchor> anchor_;
  bool is_renewing_ = false;
};

struct Transfer {
  void* stream;
  double seconds, not_before_s;
  double start_s = 0.0, end_s = 0.0;
};

struct SimulatedStream {
  Direction direction;
  std::shared_ptr<Transfer> last;
};

struct SimulatedEvent {
  std::shared_ptr<Transfer> after;
  double recorded_s = 0.0;
};

class Simulated final : public SimulatedLink {
 public:
  Simulated(double bytes_per_s, bool copies) : bytes_per_s_(bytes_per_s), copies_(copies) {}
  ~Simulated() override { DeviceRuntime::close(); }

  void* new_stream(Direction direction) override {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(std::make_unique<SimulatedStream>(SimulatedStream{direction, nullptr}));
    return streams_.back().get();
  }

  void copy(const std::vector<Piece>& pieces, bool, double seconds, void* stream) override {
    if (seconds < 0) {
      size_t num_bytes = 0;
      for (const Piece& piece : pieces) num_bytes += piece.num_bytes;
      seconds = bytes_per_s_ > 0 ? static_cast<double>(num_bytes) / bytes_per_s_ : 0.0;
    }
    auto transfer = std::make_shared<Transfer>(Transfer{stream, seconds, host_seconds()});
    enqueue(transfer);
    if (!copies_) return;
    for (const Piece& piece : pieces) std::memcpy(piece.target, piece.source, piece.num_bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    // Where memory is slower than the link, the copy takes until now.
    transfer->seconds = std::max(transfer->seconds, host_seconds() - transfer->start_s);
    transfer->end_s = transfer->start_s + transfer->seconds;
    set_times(queue_of(stream));
  }

  void stream_wait(void*, const Event& event) override { synchronize(event); }
  bool waits_on_host() const override { return true; }

  void synchronize(const Event& event) override {
    double end_s;
    while ((end_s = time_s(event)) > host_seconds()) sleep_until(end_s);
  }

  void synchronize_stream(void* stream) override {
    std::shared_ptr<Transfer> last;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      last = static_cast<SimulatedStream*>(stream)->last;
    }
    if (last == nullptr) return;
    SimulatedEvent end{last, 0.0};
    synchronize(Event{&end, nullptr});
  }

  bool is_done(const Event& event) override { return time_s(event) <= host_seconds(); }

  double time_s(const Event& event) override {
    const auto* simulated = static_cast<const SimulatedEvent*>(event.handle);
    std::lock_guard<std::mutex> lock(mutex_);
    const double end_s = simulated->after != nullptr ? simulated->after->end_s : 0.0;
    return std::max(end_s, simulated->recorded_s);
  }

 protected:
  void* new_event() override { return new SimulatedEvent; }
  void destroy_event(void* handle) noexcept override {
    delete static_cast<SimulatedEvent*>(handle);
  }
  void record_event(Event& event, void* stream) override {
    auto* simulated = static_cast<SimulatedEvent*>(event.handle);
    std::lock_guard<std::mutex> lock(mutex_);
    simulated->after = static_cast<SimulatedStream*>(stream)->last;
    simulated->recorded_s = host_seconds();
  }

 private:
  using Queue = std::deque<std::shared_ptr<Transfer>>;

  Queue& queue_of(void* stream) {
    return queues_[static_cast<int>(static_cast<SimulatedStream*>(stream)->direction)];
  }

  void enqueue(const std::shared_ptr<Transfer>& transfer) {
    std::lock_guard<std::mutex> lock(mutex_);
    Queue& queue = queue_of(transfer->stream);
    while (!queue.empty() && queue.front()->end_s <= transfer->not_before_s) queue.pop_front();
    // In turn: after the copy in progress, or after its stream's last one and one of another stream.
    size_t place = queue.empty() ? 0 : 1;
    for (size_t i = 0; i < queue.size(); ++i)
      if (queue[i]->stream == transfer->stream) place = i + 1;
    const bool has_own = place > 0 && queue[place - 1]->stream == transfer->stream;
    if (has_own && place < queue.size()) ++place;
    queue.insert(queue.begin() + static_cast<ptrdiff_t>(place), transfer);
    set_times(queue);
    static_cast<SimulatedStream*>(transfer->stream)->last = transfer;
  }

  static void set_times(Queue& queue) {
    for (size_t i = 0; i < queue.size(); ++i) {
      Transfer& transfer = *queue[i];
      if (i > 0 || transfer.start_s == 0.0)
        transfer.start_s = std::max(transfer.not_before_s, i > 0 ? queue[i - 1]->end_s : 0.0);
      transfer.end_s = transfer.start_s + transfer.seconds;
    }
  }

  const double bytes_per_s_;
  const bool copies_;
  std::mutex mutex_;
  Queue queues_[2];
  std::vector<std::unique_ptr<SimulatedStream>> streams_;
};

}  // namespace

std::shared_ptr<DeviceRuntime> make_cuda_runtime(const CudaFunctions& functions, int device,
                                                 int version, void* clock_stream,
                                                 double anchor_s) {
  return std::make_shared<CudaRuntime>(functions, device, version, clock_stream, anchor_s);
}

std::shared_ptr<SimulatedLink> make_simulated_link(double bytes_per_s, bool copies) {
  return std::make_shared<Simulated>(bytes_per_s, copies);
}

}  // namespace raymoe
