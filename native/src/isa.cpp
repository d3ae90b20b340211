// Which instruction set is used, and the kernels of each.
#include "raymoe/isa.h"

#include <atomic>
#include <stdexcept>

#include "gemm.h"
#include "int8.h"
#include "panels.h"
#include "raymoe/attention.h"
#include "raymoe/compressed_attention.h"
#include "raymoe/elementwise.h"
#include "raymoe/gates.h"
#include "raymoe/index_selection.h"
#include "raymoe/latent_attention.h"
#include "raymoe/probe.h"
#include "raymoe/row_experts.h"
#include "raymoe/sampling.h"
#include "raymoe/state.h"
#include "raymoe/streams.h"

namespace raymoe {
namespace {

bool machine_has(Isa isa) {
#if defined(__x86_64__) && defined(RAYMOE_X86_KERNELS)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return machine_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
    case Isa::kAvx512Bf16:
      return machine_has(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("avx512vnni");
  }
  return false;
#else
  return isa == Isa::kScalar;
#endif
}

Isa best_isa() { return supported_isas().back(); }

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

Isa isa_from_name(const std::string& name) {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16})
    if (name == isa_name(isa)) return isa;
  throw std::invalid_argument("unknown instruction set '" + name +
                              "'; known: scalar, avx2, avx512, avx512_bf16");
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> found;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16})
    if (machine_has(isa)) found.push_back(isa);
  return found;
}

Isa active_isa() { return current().load(std::memory_order_relaxed); }

bool has_vnni() {
#if defined(__x86_64__)
  static const bool found = __builtin_cpu_supports("avx512vnni");
  return found;
#else
  return false;
#endif
}

void set_isa(Isa isa) {
  if (!machine_has(isa))
    throw std::invalid_argument(std::string("this machine or build lacks instruction set '") +
                                isa_name(isa) + "'");
  current().store(isa, std::memory_order_relaxed);
}

#if defined(RAYMOE_X86_KERNELS)
#define RAYMOE_CHOOSE_KERNELS(Table, name) \
  const Table& name() {                    \
    switch (active_isa()) {                \
      case Isa::kAvx2:                     \
        return name##_avx2;                \
      case Isa::kAvx512:                   \
        return name##_avx512;              \
      case Isa::kAvx512Bf16:               \
        return name##_avx512_bf16;         \
      case Isa::kScalar:                   \
        break;                             \
    }                                      \
    return name##_scalar;                  \
  }
#else
#define RAYMOE_CHOOSE_KERNELS(Table, name) \
  const Table& name() { return name##_scalar; }
#endif

RAYMOE_CHOOSE_KERNELS(AttentionKernelOf, attention_kernel)
RAYMOE_CHOOSE_KERNELS(LatentKernelOf, latent_kernel)
RAYMOE_CHOOSE_KERNELS(GemmKernels, gemm_kernels)
RAYMOE_CHOOSE_KERNELS(CodeKernels, code_kernels)
RAYMOE_CHOOSE_KERNELS(GateKernels, gate_kernels)
RAYMOE_CHOOSE_KERNELS(CodeTileKernels, code_tile_kernels)
RAYMOE_CHOOSE_KERNELS(Int8Kernels, int8_kernels)
RAYMOE_CHOOSE_KERNELS(StreamKernels, stream_kernels)
RAYMOE_CHOOSE_KERNELS(ElementwiseKernels, elementwise_kernels)
RAYMOE_CHOOSE_KERNELS(SamplingKernels, sampling_kernels)
RAYMOE_CHOOSE_KERNELS(ProbeKernels, probe_kernels)
RAYMOE_CHOOSE_KERNELS(RowKernels, row_kernels)
RAYMOE_CHOOSE_KERNELS(StateKernels, state_kernels)
RAYMOE_CHOOSE_KERNELS(IndexKernels, index_kernels)
RAYMOE_CHOOSE_KERNELS(PoolKernels, pool_kernels)

}  // namespace raymoe
