// How the attention kernels prefetch what they will read.
#pragma once

#include <immintrin.h>

#include <cstdint>

// Of the body of a loop, whose sums are in registers.
#define RAYMOE_INLINE __attribute__((always_inline))

namespace raymoe {
namespace {

// A chunk reads its cache in a fixed order, the path, kept in pages of this size.
constexpr int64_t kPageBytes = 4096;

constexpr int64_t pages_of(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes; }

// How many pages ahead of the current line lines are prefetched. Several, because processors drop
// prefetches while their queue is full: a line lost at one distance has another chance at the next.
// On a Zen 4 core one distance reads 20 GB/s of 32 possible, two 23, three 25, four 27.
constexpr int64_t kPagesAhead[] = {12, 6, 3, 1};
constexpr int64_t kMaxPagesAhead = kPagesAhead[0];

/// Calls `step` for each of `depth` rows of kRowBytes, a divisor of a page, that begin `offset`
/// bytes behind the first page of `path`; prefetches what lies ahead, to the second-level cache: it is as
/// large as the first. Addresses are looked up once a page.
template <bool kPrefetch, int64_t kRowBytes, typename Step>
inline __attribute__((always_inline)) void for_each_row(const char* const* path, int64_t offset,
                                                        int64_t depth, const Step& step) {
  if constexpr (!kPrefetch) {
    for (int64_t k = 0; k < depth; ++k) step();
    return;
  }
  path += offset / kPageBytes;
  for (offset %= kPageBytes; depth > 0; ++path, offset = 0) {
    const int64_t rest = (kPageBytes - offset) / kRowBytes;
    const int64_t end = offset + (depth < rest ? depth : rest) * kRowBytes;
    for (depth -= rest; offset < end; offset += kRowBytes) {
      for (int64_t pages : kPagesAhead)
        for (int64_t i = 0; i < kRowBytes; i += 64)
          _mm_prefetch(path[pages] + offset + i, _MM_HINT_T1);
      step();
    }
  }
}

}  // namespace
}  // namespace raymoe
