// codes.h on tensors: what module.cpp binds. Errors are std::invalid_argument and name the argument
// and the dimension.
#pragma once

#include <cstdint>
#include <string>

#include "raymoe/codes.h"
#include "raymoe/tensor_view.h"

namespace raymoe {

/// `kind` is one of int4_float16, int4_bfloat16, e2m1, e4m3.
CodeFormat make_code_format(const std::string& kind, int64_t group_size, bool shares_scales,
                            bool has_zeros, bool has_order);

/// A matrix [O, I] of codes in any strides.
struct CodeTensors {
  TensorView codes;         // [O, I] uint8
  TensorView scales;        // [ceil(O / scale_rows), G] of the type of the kind
  int64_t scale_rows;       // outputs of a row of scales
  const TensorView* zeros;  // [O, G] uint8, or null
  const TensorView* order;  // [I] int32, or null
};

/// weight -> packed [packed_codes_bytes(O, I)] uint8, 64-byte aligned.
void pack_codes_op(const CodeFormat& format, const CodeTensors& weight, const TensorView& packed);

/// gate and up [F, H], of one order -> packed [packed_gate_up_codes_bytes(F, H)].
void pack_gate_up_codes_op(const CodeFormat& format, const CodeTensors& gate, const CodeTensors& up,
                           const TensorView& packed);

int64_t packed_gate_up_codes_bytes(const CodeFormat& format, int64_t expert_size,
                                   int64_t hidden_size);

}  // namespace raymoe
