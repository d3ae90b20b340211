// A persistent pool of threads; the caller is worker 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace raymoe {

/// Runs one function on all workers at once. Workers spin briefly between launches, then sleep,
/// so that a sequence of kernels costs few wake-ups and an idle engine costs no CPU.
class WorkerPool {
 public:
  explicit WorkerPool(int num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  /// Calls body(worker) once for each worker in [0, num_threads) and returns when all are done.
  /// Launches from several caller threads are run one after another. The first exception thrown
  /// by a worker is rethrown here. Not reentrant: body must not call run.
  void run(const std::function<void(int)>& body);

  /// As `run`, but without workers that are still asleep, or whose core belongs to another process,
  /// when the others are done: body must take its tasks from what all workers share.
  void run_awake(const std::function<void(int)>& body);

  /// Calls body(worker, task) for every task in [0, num_tasks); workers take `grain` tasks at a
  /// time from a shared counter, so uneven tasks balance. Waits for no worker that has none.
  void for_each(int64_t num_tasks, int64_t grain,
                const std::function<void(int, int64_t)>& body);

 private:
  enum class Workers { kAll, kAwake };

  void launch(const std::function<void(int)>& body, Workers needed);
  void worker_loop(int worker);
  bool join(uint32_t* seen);
  void call(int worker);

  std::mutex launch_mutex_;  // one launch at a time
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> launch_{0};  // worker_pool.cpp says what it holds
  std::atomic<uint32_t> num_done_{0};
  std::atomic<bool> stop_{false};
  const std::function<void(int)>* body_ = nullptr;
  std::exception_ptr error_;
  std::mutex error_mutex_;
  std::vector<std::thread> threads_;
};

/// The pool of this process; created on first use with one thread per core. Callers hold the
/// pointer for the length of their launch, so a replaced pool ends after its last launch.
/// A process forked from this one begins with no pool and makes its own.
std::shared_ptr<WorkerPool> worker_pool();

/// Replaces the pool of this process. Throws std::invalid_argument if num_threads < 1.
void set_num_threads(int num_threads);

}  // namespace raymoe
