#include "raymoe/mover.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace raymoe {

bool Mark::wait_decided(double seconds) {
  if (is_decided()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return decided_.wait_for(lock, std::chrono::duration<double>(seconds),
                           [&] { return is_decided(); });
}

bool Mark::wait() {
  while (!wait_decided(3600.0)) continue;
  const State state = state_.load(std::memory_order_acquire);
  if (state == kIssued) runtime_->synchronize(*done_);
  return state != kCancelled;
}

bool Mark::precede(DeviceRuntime& runtime, void* stream) {
  while (!wait_decided(3600.0)) continue;
  if (state_.load(std::memory_order_acquire) != kIssued) return wait();
  if (runtime_.get() != &runtime) return wait();
  if (stream_ != stream) runtime.stream_wait(stream, *done_);
  return true;
}

bool Mark::is_done() {
  if (!is_decided()) return false;
  return state_.load(std::memory_order_acquire) != kIssued || runtime_->is_done(*done_);
}

double Mark::start_s() { return start_ != nullptr ? runtime_->time_s(*start_) : start_s_; }
double Mark::end_s() { return done_ != nullptr ? runtime_->time_s(*done_) : end_s_; }

void Mark::finish(double start_s, double end_s) {
  start_s_ = start_s;
  end_s_ = end_s;
  decide(kDone);
}

void Mark::issue(std::shared_ptr<DeviceRuntime> runtime, void* stream, EventRef start,
                 EventRef done) {
  runtime_ = std::move(runtime);
  stream_ = stream;
  start_ = std::move(start);
  done_ = std::move(done);
  decide(kIssued);
}

void Mark::cancel(const std::string& error) {
  error_ = error;
  decide(kCancelled);
}

void Mark::decide(State state) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_decided()) return;
    state_.store(state, std::memory_order_release);
  }
  decided_.notify_all();
}

void LinkMeter::add(size_t num_bytes, double start_s, double end_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_bytes_ += num_bytes;
  // Copies of two streams arrive about in order; their times may overlap.
  busy_s_ += std::max(0.0, end_s - std::max(start_s, last_end_s_));
  last_end_s_ = std::max(last_end_s_, end_s);
}

std::pair<uint64_t, double> LinkMeter::read() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {num_bytes_, busy_s_};
}

namespace {

constexpr size_t kMaxPackets = 64;  // in flight, where they are small

}  // namespace

Mover::Mover(std::string name, std::shared_ptr<DeviceRuntime> runtime, void* stream,
             Direction direction, MoverLimits limits, std::shared_ptr<LinkMeter> meter)
    : name_(std::move(name)),
      runtime_(std::move(runtime)),
      stream_(stream),
      direction_(direction),
      limits_(limits),
      meter_(std::move(meter)),
      process_(getpid()) {
  if (limits.packet_bytes == 0 || limits.chunk_bytes == 0)
    throw std::invalid_argument("packets of " + std::to_string(limits.packet_bytes) +
                                ", chunks of " + std::to_string(limits.chunk_bytes) +
                                " bytes: too small");
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());  // its longest
}

Mover::~Mover() {
  if (getpid() != process_) {  // a fork has none of the threads
    thread_.detach();
    return;
  }
  try {
    close();
  } catch (const std::exception&) {  // whoever wants the error calls close
  }
}

void Mover::submit(CopyJob job) {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    if (is_closed_) throw std::runtime_error(name_ + " is closed; submit before close()");
    queue_.push_back(std::move(job));
  }
  queued_.notify_one();
}

void Mover::close() {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    is_closed_ = true;
  }
  queued_.notify_one();
  bool is_first = false;
  std::call_once(joined_, [&] {
    thread_.join();
    is_first = true;
  });
  if (!is_first) return;
  runtime_->synchronize_stream(stream_);
  count_arrived();
}

void Mover::run() {
  std::string broken;
  try {
    runtime_->enter_thread();
  } catch (const std::exception& error) {
    broken = error.what();
  }
  while (true) {
    CopyJob job;
    {
      std::unique_lock<std::mutex> lock(queue_mutex_);
      queued_.wait(lock, [&] { return is_closed_ || !queue_.empty(); });
      if (queue_.empty()) return;
      job = std::move(queue_.front());
      queue_.pop_front();
    }
    if (broken.empty())
      perform(job);
    else
      job.mark->cancel(broken);
  }
}

void Mover::perform(CopyJob& job) {
  try {
    for (const MarkRef& before : job.after)
      if (!before->precede(*runtime_, stream_)) return job.mark->cancel("");
    if (job.token != nullptr && job.token->is_cancelled) return job.mark->cancel("");
    issue(job);
  } catch (const std::exception& error) {
    if (job.token != nullptr) job.token->is_cancelled = true;
    try {
      // What was enqueued before the error still uses its memory. If the device itself has failed,
      // nothing runs any more, and the error at hand explains it.
      runtime_->synchronize_stream(stream_);
    } catch (const std::exception&) {
    }
    job.mark->cancel(error.what());
  }
}

void Mover::issue(CopyJob& job) {
  size_t total = 0;
  for (const Piece& piece : job.pieces) total += piece.num_bytes;
  const EventRef start = runtime_->record(stream_);
  EventRef first = start;
  if (job.stall_s > 0) sleep_until(host_seconds() + job.stall_s);
  const double rest_s = std::max(0.0, job.seconds - job.stall_s);
  std::vector<Piece> packet;
  size_t filled = 0;
  EventRef done;
  const auto flush = [&] {
    const double share = total > 0 ? static_cast<double>(filled) / static_cast<double>(total) : 1.0;
    const double seconds = job.seconds < 0 ? -1.0 : share * rest_s;
    done = send(packet, filled, seconds, job.can_batch, std::move(first));
    packet.clear();
    filled = 0;
  };
  for (Piece piece : job.pieces) {
    while (piece.num_bytes > 0) {
      const char* host = direction_ == Direction::kToDevice ? piece.source : piece.target;
      const size_t to_chunk =
          limits_.chunk_bytes - reinterpret_cast<uintptr_t>(host) % limits_.chunk_bytes;
      const size_t now = std::min({piece.num_bytes, to_chunk, limits_.packet_bytes - filled});
      packet.push_back({piece.target, piece.source, now});
      piece = {piece.target + now, piece.source + now, piece.num_bytes - now};
      if ((filled += now) == limits_.packet_bytes) flush();
    }
  }
  if (filled > 0 || (total == 0 && job.seconds > 0)) flush();
  if (done == nullptr) done = runtime_->record(stream_);
  if (job.on_done) {
    runtime_->synchronize(*done);
    job.on_done();
  }
  job.mark->issue(runtime_, stream_, start, std::move(done));
}

EventRef Mover::send(const std::vector<Piece>& packet, size_t num_bytes, double seconds,
                     bool can_batch, EventRef start) {
  make_room(num_bytes);
  if (start == nullptr) start = runtime_->record(stream_);
  runtime_->copy(packet, can_batch, seconds, stream_);
  EventRef done = runtime_->record(stream_);
  std::lock_guard<std::mutex> lock(flight_mutex_);
  in_flight_.push_back({std::move(start), done, num_bytes});
  bytes_in_flight_ += num_bytes;
  return done;
}

void Mover::make_room(size_t num_bytes) {
  while (true) {
    Packet oldest;
    {
      std::lock_guard<std::mutex> lock(flight_mutex_);
      if (in_flight_.empty()) return;
      if (bytes_in_flight_ + num_bytes <= 2 * limits_.packet_bytes &&
          in_flight_.size() < kMaxPackets)
        return;
      oldest = in_flight_.front();
    }
    runtime_->synchronize(*oldest.done);
    count(oldest);
  }
}

void Mover::count_arrived() {
  while (true) {
    Packet oldest;
    {
      std::lock_guard<std::mutex> lock(flight_mutex_);
      if (in_flight_.empty()) return;
      oldest = in_flight_.front();
    }
    if (!runtime_->is_done(*oldest.done)) return;
    count(oldest);
  }
}

void Mover::count(const Packet& packet) {
  {
    std::lock_guard<std::mutex> lock(flight_mutex_);
    if (in_flight_.empty() || in_flight_.front().done != packet.done) return;  // another thread did
    in_flight_.pop_front();
    bytes_in_flight_ -= packet.num_bytes;
  }
  meter_->add(packet.num_bytes, runtime_->time_s(*packet.start), runtime_->time_s(*packet.done));
}

}  // namespace raymoe
