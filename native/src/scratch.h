// Scratch memory of a thread, kept from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

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

}  // namespace raymoe
