// What launches share: scratch memory, rows in ranges, ranges of tasks with stealing, a barrier.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "raymoe/worker_pool.h"

namespace raymoe {

/// Memory that grows and is kept: huge pages where it is large, contents undefined.
class Scratch {
 public:
  void* reserve(int64_t num_bytes) {
    if (num_bytes <= capacity_) return data_.get();
    constexpr int64_t kHuge = int64_t{2} << 20;
    const int64_t alignment = num_bytes >= kHuge ? kHuge : 4096;
    const int64_t capacity = (num_bytes + alignment - 1) / alignment * alignment;
    data_.reset();
    capacity_ = 0;
    data_.reset(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(capacity)));
    if (data_ == nullptr) throw std::bad_alloc();
    capacity_ = capacity;
#if defined(__linux__)
    if (alignment == kHuge) madvise(data_.get(), static_cast<size_t>(capacity), MADV_HUGEPAGE);
#endif
    return data_.get();
  }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
  int64_t capacity_ = 0;
};

/// Calls body(begin, end) for ranges of rows that cover [0, num_rows) once. `row_cost` is the work
/// of a row in elements; less than about ten microseconds of work stays on the calling thread.
template <typename Body>
void for_row_ranges(int64_t num_rows, int64_t row_cost, const Body& body) {
  constexpr int64_t kChunkCost = 16384;
  if (num_rows <= 0) return;
  const int64_t rows = std::max<int64_t>(1, kChunkCost / std::max<int64_t>(row_cost, 1));
  const int64_t chunks = (num_rows + rows - 1) / rows;
  if (chunks == 1 || num_rows * row_cost <= 2 * kChunkCost) return body(int64_t{0}, num_rows);
  worker_pool()->for_each(chunks, 1, [&](int, int64_t chunk) {
    body(chunk * rows, std::min((chunk + 1) * rows, num_rows));
  });
}

/// Each worker owns a range of consecutive tasks and takes them from its front, so that weights
/// stream and gathered rows are reused; a worker without tasks takes one from the back of the
/// longest range.
class TaskRanges {
 public:
  void resize(int num_workers) {
    if (num_workers == num_workers_) return;
    ranges_ = std::make_unique<Range[]>(static_cast<size_t>(num_workers));
    num_workers_ = num_workers;
  }

  void set(int worker, int64_t begin, int64_t end) {
    ranges_[static_cast<size_t>(worker)].bounds.store(pack(begin, end), std::memory_order_relaxed);
  }

  /// Splits [0, num_tasks) evenly.
  void set_even(int64_t num_tasks) {
    for (int worker = 0; worker < num_workers_; ++worker)
      set(worker, worker * num_tasks / num_workers_, (worker + 1) * num_tasks / num_workers_);
  }

  /// The next task of a worker; -1 when all are taken.
  int64_t take(int worker) {
    const int64_t own = take_from(worker, true);
    if (own >= 0) return own;
    while (true) {
      int victim = -1;
      int64_t longest = 0;
      for (int other = 0; other < num_workers_; ++other) {
        const uint64_t bounds = load(other);
        if (end_of(bounds) - begin_of(bounds) > longest) {
          longest = end_of(bounds) - begin_of(bounds);
          victim = other;
        }
      }
      if (victim < 0) return -1;
      const int64_t task = take_from(victim, false);
      if (task >= 0) return task;
    }
  }

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> bounds{0};  // begin in the upper half, end in the lower
  };

  static uint64_t pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }
  static int64_t begin_of(uint64_t bounds) { return static_cast<int64_t>(bounds >> 32); }
  static int64_t end_of(uint64_t bounds) { return static_cast<int64_t>(bounds & 0xffffffffu); }
  uint64_t load(int worker) const {
    return ranges_[static_cast<size_t>(worker)].bounds.load(std::memory_order_relaxed);
  }

  int64_t take_from(int worker, bool front) {
    std::atomic<uint64_t>& bounds = ranges_[static_cast<size_t>(worker)].bounds;
    uint64_t seen = bounds.load(std::memory_order_relaxed);
    while (begin_of(seen) < end_of(seen)) {
      const int64_t begin = begin_of(seen), end = end_of(seen);
      const uint64_t rest = front ? pack(begin + 1, end) : pack(begin, end - 1);
      if (bounds.compare_exchange_weak(seen, rest, std::memory_order_relaxed))
        return front ? begin : end - 1;
    }
    return -1;
  }

  std::unique_ptr<Range[]> ranges_;
  int num_workers_ = 0;
};

/// All workers of a launch meet here; what they wrote before is visible to all after.
class SpinBarrier {
 public:
  explicit SpinBarrier(int num_workers) : num_workers_(num_workers) {}

  void wait() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (num_waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_workers_) {
      num_waiting_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spin = 0; round_.load(std::memory_order_acquire) == round; ++spin) {
      // A worker that lost its core needs ours: spin for about 0.2 ms, then make way.
      if (spin > 8000) std::this_thread::yield();
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }

 private:
  const int num_workers_;
  std::atomic<int> num_waiting_{0};
  std::atomic<uint32_t> round_{0};
};

}  // namespace raymoe
