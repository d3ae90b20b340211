#include "raymoe/probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "raymoe/worker_pool.h"

namespace raymoe {
namespace {

/// Anonymous memory on huge pages where the system grants them.
class Buffer {
 public:
  explicit Buffer(int64_t num_bytes) : size_(static_cast<size_t>(num_bytes)) {
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, size_, MADV_HUGEPAGE);
  }
  ~Buffer() { munmap(data_, size_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_;
  size_t size_;
};

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void check(int num_threads, double seconds) {
  if (num_threads < 1 || !(seconds > 0))
    throw std::invalid_argument("probe: num_threads is " + std::to_string(num_threads) +
                                " and seconds " + std::to_string(seconds) +
                                "; both must be positive");
}

/// Best work per second of `body`, which returns its work, repeated for about `seconds`.
template <typename Body>
double best_rate(double seconds, const Body& body) {
  double best = 0;
  const double end = now_s() + seconds;
  do {
    const double begin = now_s();
    const double work = body();
    best = std::max(best, work / (now_s() - begin));
  } while (now_s() < end);
  return best;
}

/// Floats for each thread of a buffer of `num_bytes`.
int64_t share_floats(int num_threads, int64_t num_bytes) {
  constexpr int64_t kUnit = 16 * 64;
  const int64_t share = num_bytes / 4 / num_threads / kUnit * kUnit;
  if (share < kUnit)
    throw std::invalid_argument("probe: " + std::to_string(num_bytes) +
                                " bytes are too few to read");
  return share;
}

void fill_shares(WorkerPool& pool, const Buffer& buffer, int64_t share) {
  pool.run([&](int worker) {
    float* mine = buffer.floats() + worker * share;
    std::fill(mine, mine + share, 1.0f);
  });
}

}  // namespace

double read_bandwidth_bytes_per_s(int num_threads, double seconds, int64_t num_bytes) {
  // Streams and prefetch distances that were best on one of the machines tried.
  constexpr ReadShare kVariants[] = {
      {nullptr, 0, 1, 0}, {nullptr, 0, 1, 1024}, {nullptr, 0, 4, 0}, {nullptr, 0, 16, 0}};
  check(num_threads, seconds);
  const int64_t share = share_floats(num_threads, num_bytes);
  WorkerPool pool(num_threads);
  const Buffer buffer(share * num_threads * 4);
  fill_shares(pool, buffer, share);
  std::vector<float> sums(static_cast<size_t>(num_threads));
  const auto read = probe_kernels().read;
  double best = 0;
  for (ReadShare variant : kVariants) {
    variant.size = share;
    const double rate = best_rate(seconds / 4, [&] {
      pool.run([&](int worker) {
        ReadShare mine = variant;
        mine.data = buffer.floats() + worker * share;
        sums[static_cast<size_t>(worker)] = read(mine);
      });
      return 4.0 * static_cast<double>(share) * num_threads;
    });
    best = std::max(best, rate);
  }
  return best;
}

double update_bandwidth_bytes_per_s(int num_threads, double seconds, int64_t num_bytes) {
  check(num_threads, seconds);
  const int64_t share = share_floats(num_threads, num_bytes);
  WorkerPool pool(num_threads);
  const Buffer buffer(share * num_threads * 4);
  fill_shares(pool, buffer, share);
  const auto update = probe_kernels().update;
  double best = 0;
  for (int64_t ahead : {0, 1024}) {
    const double rate = best_rate(seconds / 2, [&] {
      pool.run([&](int worker) { update({buffer.floats() + worker * share, share, ahead}); });
      return 8.0 * static_cast<double>(share) * num_threads;
    });
    best = std::max(best, rate);
  }
  return best;
}

double peak_flop_per_s(int num_threads, double seconds, Number number) {
  constexpr int64_t kIterations = 400000;  // about a millisecond
  check(num_threads, seconds);
  const ProbeKernels& table = probe_kernels();
  Arithmetic loop = table.float32;
  if (number == Number::kBFloat16 && table.bfloat16 != nullptr) loop = table.bfloat16;
  if (number == Number::kInt8 && table.int8 != nullptr) loop = table.int8;
  WorkerPool pool(num_threads);
  std::vector<double> work(static_cast<size_t>(num_threads));
  return best_rate(seconds, [&] {
    pool.run([&](int worker) { work[static_cast<size_t>(worker)] = loop(kIterations); });
    double total = 0;
    for (double share : work) total += share;
    return total;
  });
}

}  // namespace raymoe
