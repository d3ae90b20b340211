#include "raymoe/worker_pool.h"

#include <pthread.h>

#include <algorithm>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace raymoe {
namespace {

// About 50 microseconds: longer than the gap between two kernels of a layer, far shorter than a
// scheduler tick, so spinning never takes a core from another process for long.
constexpr int kSpins = 2000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Done>
bool spin_until(Done done) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
    relax();
  }
  return done();
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

void WorkerPool::worker_loop(int worker) {
  uint64_t seen = 0;
  while (true) {
    const auto changed = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    if (!spin_until([&] { return changed() || stop_.load(std::memory_order_relaxed); })) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return changed() || stop_.load(); });
    }
    if (!changed()) return;  // stopped
    ++seen;
    call(worker);
    num_running_.fetch_sub(1, std::memory_order_release);
  }
}

void WorkerPool::run(const std::function<void(int)>& body) {
  std::lock_guard<std::mutex> launch(launch_mutex_);
  body_ = &body;
  error_ = nullptr;
  if (!threads_.empty()) {
    num_running_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  call(0);
  while (num_running_.load(std::memory_order_acquire) != 0)
    if (!spin_until([&] { return num_running_.load(std::memory_order_acquire) == 0; }))
      std::this_thread::yield();
  body_ = nullptr;
  if (error_) std::rethrow_exception(error_);
}

void WorkerPool::for_each(int64_t num_tasks, int64_t grain,
                          const std::function<void(int, int64_t)>& body) {
  if (num_tasks <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  std::atomic<int64_t> next{0};
  run([&](int worker) {
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
