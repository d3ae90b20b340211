// The limits of this machine as kernels meet them: memory rates, arithmetic from registers.
#pragma once

#include <cstdint>

#include "raymoe/kernels.h"

namespace raymoe {

/// One way to read a share of memory: `num_streams` places at once, prefetching `ahead` bytes.
struct ReadShare {
  const float* data;
  int64_t size;  // floats, a multiple of num_streams * 64
  int64_t num_streams;
  int64_t ahead;
};

/// The same of memory that is written, too: every float is scaled in place.
struct UpdateShare {
  float* data;
  int64_t size;  // floats, a multiple of 64
  int64_t ahead;
};

/// Operations (two for each multiply-add) done by `iterations` of a loop over registers.
using Arithmetic = double (*)(int64_t iterations);

struct ProbeKernels {
  float (*read)(const ReadShare& share);
  void (*update)(const UpdateShare& share);
  Arithmetic float32;
  Arithmetic bfloat16;  // null without dot products of bfloat16
  Arithmetic int8;      // null without dot products of int8
};

RAYMOE_DECLARE_KERNELS(ProbeKernels, probe_kernels);

enum class Number { kFloat32, kBFloat16, kInt8 };

/// Best read rate seen in about `seconds`, over `num_bytes` of memory on huge pages if possible.
/// Throws std::invalid_argument for sizes that are not positive, std::bad_alloc without memory.
double read_bandwidth_bytes_per_s(int num_threads, double seconds, int64_t num_bytes);

/// The same for memory that is updated in place; bytes read and bytes written both count.
double update_bandwidth_bytes_per_s(int num_threads, double seconds, int64_t num_bytes);

/// Best arithmetic rate seen in about `seconds`, with the active instruction set; that of float32
/// if it has no dot products for the type.
double peak_flop_per_s(int num_threads, double seconds, Number number);

}  // namespace raymoe
