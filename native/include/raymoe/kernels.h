// Tables of kernels: one for each instruction set, and entries for the storage types.
//
// CMake compiles each NAME_kernel.cpp once per instruction set, with RAYMOE_ISA set to its name;
// the macros of the compiler (__AVX2__, __AVX512F__, __AVX512BF16__) tell what the file may use.
// Nothing in it but its table has external linkage: the linker could keep a shared function of
// AVX512 for machines that lack it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "raymoe/isa.h"
#include "raymoe/tensor_view.h"

/// Declares the tables NAME_scalar, NAME_avx2, ... and NAME(), the one of the active instruction
/// set; isa.cpp defines the function.
#define RAYMOE_DECLARE_KERNELS(Table, name)                                         \
  extern const Table name##_scalar, name##_avx2, name##_avx512, name##_avx512_bf16; \
  const Table& name()

/// Begins the definition of the table of RAYMOE_ISA.
#define RAYMOE_DEFINE_KERNELS(Table, name) const Table RAYMOE_JOIN(name, RAYMOE_ISA)
#define RAYMOE_JOIN(name, isa) RAYMOE_JOIN_NAMES(name, isa)
#define RAYMOE_JOIN_NAMES(name, isa) name##_##isa

/// A FloatKernels of a function template.
#define RAYMOE_FLOAT_KERNELS(kernel) {kernel<float>, kernel<fp16>, kernel<bf16>}

namespace raymoe {

/// The same kernel over rows [begin, end) for float32, float16 and bfloat16 tensors.
template <typename Args>
struct FloatKernels {
  using Kernel = void (*)(const Args&, int64_t begin, int64_t end);
  Kernel f32, f16, bf16;

  Kernel of(DType dtype, const char* what) const {
    if (dtype == DType::kFloat32) return f32;
    if (dtype == DType::kFloat16) return f16;
    if (dtype == DType::kBFloat16) return bf16;
    throw std::invalid_argument(std::string(what) + " has dtype " + dtype_name(dtype) +
                                ", expected float32, float16 or bfloat16");
  }
};

}  // namespace raymoe
