#include "raymoe/worker_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace raymoe {
namespace {

// Workers spin for longer than the gap between two kernels of a layer, because waking a core takes 50
// to 100 microseconds in a virtual machine. A caller soon makes way for a worker that it waits for,
// which may have lost its core. Both are far shorter than a scheduler tick, so that spinning never
// takes a core from another process for long.
constexpr std::chrono::microseconds kIdle{200}, kPatience{40};
constexpr int kSpinsPerLook = 16;  // at the clock

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Done>
bool spin_until(Done done, std::chrono::microseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

// The word of a launch: its number, whether workers may still join, and how many have.
constexpr uint64_t kOpen = uint64_t{1} << 31;

constexpr uint32_t number_of(uint64_t launch) { return static_cast<uint32_t>(launch >> 32); }
constexpr uint32_t joined_of(uint64_t launch) {
  return static_cast<uint32_t>(launch & (kOpen - 1));
}

}  // namespace

WorkerPool::WorkerPool(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("worker pool: num_threads must be at least 1");
  for (int worker = 1; worker < num_threads; ++worker)
    threads_.emplace_back([this, worker] { worker_loop(worker); });
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::call(int worker) {
  try {
    (*body_)(worker);
  } catch (...) {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

/// Joins the last launch, unless it is the one that was `seen` last or takes no more workers.
bool WorkerPool::join(uint32_t* seen) {
  uint64_t launch = launch_.load(std::memory_order_acquire);
  while (number_of(launch) != *seen && (launch & kOpen) != 0) {
    if (!launch_.compare_exchange_weak(launch, launch + 1, std::memory_order_acq_rel)) continue;
    *seen = number_of(launch);
    return true;
  }
  *seen = number_of(launch);
  return false;
}

void WorkerPool::worker_loop(int worker) {
  uint32_t seen = 0;
  while (true) {
    const auto changed = [&] { return number_of(launch_.load(std::memory_order_acquire)) != seen; };
    if (!spin_until([&] { return changed() || stop_.load(std::memory_order_relaxed); },
                    kIdle)) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return changed() || stop_.load(); });
    }
    if (!changed()) return;  // stopped
    if (!join(&seen)) continue;
    call(worker);
    num_done_.fetch_add(1, std::memory_order_release);
  }
}

void WorkerPool::launch(const std::function<void(int)>& body, Workers needed) {
  std::lock_guard<std::mutex> one_at_a_time(launch_mutex_);
  body_ = &body;
  error_ = nullptr;
  num_done_.store(0, std::memory_order_relaxed);
  if (!threads_.empty()) {
    const uint64_t number = number_of(launch_.load(std::memory_order_relaxed)) + uint64_t{1};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      launch_.store(number << 32 | kOpen, std::memory_order_release);
    }
    wake_.notify_all();
  }
  call(0);
  auto joined = static_cast<uint32_t>(threads_.size());
  if (needed == Workers::kAwake)
    joined = joined_of(launch_.fetch_and(~kOpen, std::memory_order_acq_rel));
  const auto are_done = [&] { return num_done_.load(std::memory_order_acquire) == joined; };
  while (!are_done())
    if (!spin_until(are_done, kPatience)) std::this_thread::yield();
  body_ = nullptr;
  if (error_) std::rethrow_exception(error_);
}

void WorkerPool::run(const std::function<void(int)>& body) { launch(body, Workers::kAll); }

void WorkerPool::run_awake(const std::function<void(int)>& body) { launch(body, Workers::kAwake); }

void WorkerPool::for_each(int64_t num_tasks, int64_t grain,
                          const std::function<void(int, int64_t)>& body) {
  if (num_tasks <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  std::atomic<int64_t> next{0};
  run_awake([&](int worker) {
    while (true) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= num_tasks) return;
      const int64_t end = std::min(begin + grain, num_tasks);
      for (int64_t task = begin; task < end; ++task) body(worker, task);
    }
  });
}

namespace {

struct PoolSlot {
  std::mutex mutex;
  std::shared_ptr<WorkerPool> pool;
};

std::atomic<PoolSlot*> slot_of_process{nullptr};
std::atomic<PoolSlot*> slot_of_parent{nullptr};  // kept, so that nothing counts as leaked

// A fork has none of the threads, and what they had locked stays locked: nothing is ended there.
void begin_fork() {
  if (PoolSlot* slot = slot_of_process.exchange(nullptr)) slot_of_parent = slot;
}

PoolSlot& pool_slot() {
  static const int at_fork = pthread_atfork(nullptr, nullptr, begin_fork);
  if (at_fork != 0) throw std::runtime_error("worker pool: no memory for a handler of forks");
  static const struct JoinAtExit {
    ~JoinAtExit() { delete slot_of_process.exchange(nullptr); }
  } join_at_exit;
  PoolSlot* slot = slot_of_process;
  if (slot == nullptr) {
    auto fresh = std::make_unique<PoolSlot>();
    if (slot_of_process.compare_exchange_strong(slot, fresh.get())) slot = fresh.release();
  }
  return *slot;
}

}  // namespace

std::shared_ptr<WorkerPool> worker_pool() {
  PoolSlot& slot = pool_slot();
  std::lock_guard<std::mutex> lock(slot.mutex);
  if (!slot.pool)
    slot.pool = std::make_shared<WorkerPool>(
        std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  return slot.pool;
}

void set_num_threads(int num_threads) {
  auto fresh = std::make_shared<WorkerPool>(num_threads);
  PoolSlot& slot = pool_slot();
  {
    std::lock_guard<std::mutex> lock(slot.mutex);
    slot.pool.swap(fresh);
  }  // the old pool, if unused, is joined here, outside the lock
}

}  // namespace raymoe
