// Threads that copy between host and device without the interpreter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "raymoe/device_runtime.h"

namespace raymoe {

/// The end of one task. A host task is *done* when its thread says so; a task of a stream is
/// *issued* by its thread and done when the stream has come to its last event.
class Mark {
 public:
  /// Blocks until the task is issued, done or cancelled; false after `seconds`.
  bool wait_decided(double seconds);
  /// Blocks until the task is done; false if it was cancelled.
  bool wait();
  /// Orders later work of a stream after the task, by an event if it is one of the same device, else
  /// by blocking; false if the task was cancelled.
  bool precede(DeviceRuntime& runtime, void* stream);
  bool is_decided() const { return state_.load(std::memory_order_acquire) != kPending; }
  bool is_done();
  /// 0 for a cancelled task.
  double start_s();
  double end_s();
  std::string error() const { return error_; }

  void finish(double start_s, double end_s);
  void issue(std::shared_ptr<DeviceRuntime> runtime, void* stream, EventRef start, EventRef done);
  void cancel(const std::string& error);

  EventRef start_event;  // between `begin` and `end` of a task that a Python thread issues

 private:
  enum State { kPending, kIssued, kDone, kCancelled };
  void decide(State state);

  std::atomic<State> state_{kPending};
  std::mutex mutex_;
  std::condition_variable decided_;
  std::shared_ptr<DeviceRuntime> runtime_;
  void* stream_ = nullptr;
  EventRef start_, done_;
  double start_s_ = 0.0, end_s_ = 0.0;
  std::string error_;
};
using MarkRef = std::shared_ptr<Mark>;

/// Shared by the tasks of a run: those that have not started are cancelled.
struct CancelToken {
  std::atomic<bool> is_cancelled{false};
};

/// Bytes of one direction of the link, and the time in which at least one copy was in progress.
class LinkMeter {
 public:
  void add(size_t num_bytes, double start_s, double end_s);
  std::pair<uint64_t, double> read();

 private:
  std::mutex mutex_;
  uint64_t num_bytes_ = 0;
  double busy_s_ = 0.0, last_end_s_ = 0.0;
};

struct CopyJob {
  std::vector<Piece> pieces;
  bool can_batch = false;  // all host memory is pinned
  std::vector<MarkRef> after;
  MarkRef mark;
  double seconds = -1.0;  // on a simulated link; negative: by its rate
  double stall_s = 0.0;   // by which the copy begins late, within its time
  std::function<void()> on_done;  // called when the bytes are there, before the mark says so
  std::shared_ptr<CancelToken> token;
};

struct MoverLimits {
  size_t packet_bytes;
  size_t chunk_bytes;  // no copy crosses a host address that is a multiple of it
};

/// Runs copy jobs in order on one stream, from its own thread. Copies are cut into packets, of which
/// two are in flight: the link never waits for the host, and a copy of another mover waits for one
/// packet and not for a page.
class Mover {
 public:
  Mover(std::string name, std::shared_ptr<DeviceRuntime> runtime, void* stream,
        Direction direction, MoverLimits limits, std::shared_ptr<LinkMeter> meter);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  void submit(CopyJob job);
  /// Runs the queued jobs, ends the thread and waits for the stream; idempotent.
  void close();
  /// Counts the packets that have arrived since the last one was sent.
  void count_arrived();

 private:
  struct Packet {
    EventRef start, done;
    size_t num_bytes;
  };

  void run();
  void perform(CopyJob& job);
  void issue(CopyJob& job);
  EventRef send(const std::vector<Piece>& packet, size_t num_bytes, double seconds, bool can_batch,
                EventRef start);
  void make_room(size_t num_bytes);
  void count(const Packet& packet);

  const std::string name_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  void* const stream_;
  const Direction direction_;
  const MoverLimits limits_;
  const std::shared_ptr<LinkMeter> meter_;
  const int process_;

  std::mutex queue_mutex_;
  std::condition_variable queued_;
  std::deque<CopyJob> queue_;
  bool is_closed_ = false;

  std::mutex flight_mutex_;  // never held during a call of the device
  std::deque<Packet> in_flight_;
  size_t bytes_in_flight_ = 0;
  std::once_flag joined_;
  std::thread thread_;
};

}  // namespace raymoe
