// Instruction sets: which one this machine has, which one the kernels use.
#pragma once

#include <string>
#include <vector>

namespace raymoe {

/// Ordered: every instruction set implies the ones before it on the machines we know.
enum class Isa { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

/// The name used in file names, in RAYMOE_ISA and in messages: scalar, avx2, avx512, avx512_bf16.
const char* isa_name(Isa isa);

/// Parses a name; throws std::invalid_argument that lists the known ones.
Isa isa_from_name(const std::string& name);

/// All instruction sets that this processor and this build can run, scalar first.
std::vector<Isa> supported_isas();

/// The instruction set in use: the best supported one unless `set_isa` chose another.
Isa active_isa();

/// Chooses the instruction set of all later calls (tests); throws if the machine lacks it.
void set_isa(Isa isa);

}  // namespace raymoe
