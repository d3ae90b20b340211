// Streams, events and copies of a device: those of libcudart, or of a simulated link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace raymoe {

/// Seconds of CLOCK_MONOTONIC, the clock of Python's time.perf_counter.
double host_seconds();

/// Sleeps, and spins for the last part, because Linux wakes a sleeper 50 to 100 microseconds late.
void sleep_until(double time_s);

struct Piece {
  char* target;
  const char* source;
  size_t num_bytes;
};

enum class Direction { kToDevice, kToHost };

class DeviceRuntime;

/// A timed event. `EventRef`s return it to the pool of its runtime.
struct Event {
  void* handle = nullptr;
  std::shared_ptr<const struct Anchor> anchor;
};
using EventRef = std::shared_ptr<Event>;

/// An event whose time on the host's clock is known.
struct Anchor {
  void* handle;
  double host_s;
};

/// Thread-safe. All functions throw std::runtime_error if the device refuses or has failed.
class DeviceRuntime : public std::enable_shared_from_this<DeviceRuntime> {
 public:
  virtual ~DeviceRuntime() = default;

  /// Called once by each thread before it uses the device.
  virtual void enter_thread() {}
  /// Enqueues copies. `seconds` is how long they occupy a simulated link; negative: by its rate.
  virtual void copy(const std::vector<Piece>& pieces, bool can_batch, double seconds,
                    void* stream) = 0;
  virtual void stream_wait(void* stream, const Event& event) = 0;
  /// Whether `stream_wait` blocks the calling thread.
  virtual bool waits_on_host() const { return false; }
  /// Blocks until a recorded event has completed.
  virtual void synchronize(const Event& event) = 0;
  virtual void synchronize_stream(void* stream) = 0;
  virtual bool is_done(const Event& event) = 0;
  /// When a completed event happened, in `host_seconds`.
  virtual double time_s(const Event& event) = 0;

  /// An event from the pool, recorded after all work in the stream so far.
  EventRef record(void* stream);
  /// Destroys what the pool holds; the device must have no work left.
  virtual void close() noexcept;
  void give_back(void* handle);

 protected:
  virtual void* new_event() = 0;
  virtual void destroy_event(void* handle) noexcept = 0;
  virtual void record_event(Event& event, void* stream) = 0;

 private:
  std::mutex pool_mutex_;  // never held during a call of the device
  std::vector<void*> pool_;
};

/// The functions of libcudart by name, as addresses: from dlopen, or of a stand-in in tests.
using CudaFunctions = std::map<std::string, uintptr_t>;

/// `version` is 12080 for CUDA 12.8; `clock_stream` is a stream without other work, on which a new
/// anchor is recorded after `anchor_s` seconds.
std::shared_ptr<DeviceRuntime> make_cuda_runtime(const CudaFunctions& functions, int device,
                                                 int version, void* clock_stream, double anchor_s);

/// A link to and from a device that is host memory. Copies in one direction share the link: it
/// serves streams in turn and interrupts no copy, as the copy engine of a GPU. A copy's bytes are
/// there when it is enqueued, and its event completes when the link would have moved them.
class SimulatedLink : public DeviceRuntime {
 public:
  virtual void* new_stream(Direction direction) = 0;
};

/// Without `copies`, the link only takes the time: its rate may exceed that of host memory.
std::shared_ptr<SimulatedLink> make_simulated_link(double bytes_per_s, bool copies);

}  // namespace raymoe
