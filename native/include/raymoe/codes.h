// Quantised weights in panels: codes and scales that matrix products read as they are stored.
//
// The functions on tensors are what module.cpp binds; their errors are std::invalid_argument and
// name the argument and the dimension.
#pragma once

#include <cstdint>
#include <string>

#include "raymoe/tensor_view.h"

namespace raymoe {

/// What number a code is, and the type of the scales.
enum class CodeKind {
  kInt4Float16,   // code - zero point, 0 to 15 each; float16 scales
  kInt4BFloat16,  // the same with bfloat16 scales
  kE2m1,          // FP4; scales are powers of two (E8M0)
  kE2m1E4m3,      // FP4; E4M3 scales times a multiplier of the matrix, over a divisor (NVFP4)
  kE4m3,          // FP8; float32 scales
  kE4m3E8m0,      // FP8; scales are powers of two (MXFP8)
  kInt8,          // float32 scales of outputs; multiplied as they are, by rows of int8 (int8.h)
};

/// How a matrix is stored; its elements are number * scale (see gemm.h for what products round).
struct CodeFormat {
  CodeKind kind;
  int64_t group_size;  // inputs that share a scale
  bool shares_scales;  // 16 neighbouring outputs of a panel have the same scales
  bool has_zeros;      // zero points for each group and output; without them 8 (int4) or 0
  bool has_order;      // each input names its group
  bool is_rotated = false;  // of int8: so are rows, before they become int8 (rotation.h)
};

/// A matrix that is read once, by packing. Strides are in elements.
struct CodeSource {
  const uint8_t* codes;  // one for each element
  int64_t outputs, inputs;
  int64_t output_stride, input_stride;
  const uint8_t* scales;  // of the type of the kind
  int64_t num_groups;
  int64_t scale_rows;  // outputs of a row of scales
  int64_t scale_output_stride, scale_group_stride;
  const uint8_t* zeros;  // or null
  int64_t zero_output_stride, zero_group_stride;
  const int32_t* order;  // [inputs], or null
  float multiplier = 1, divisor = 1;  // of all scales, for E4M3 ones; one of them is 1
};

/// Bytes of the packed form of a matrix [outputs, inputs]; the layout is in panels.h.
int64_t packed_codes_bytes(const CodeFormat& format, int64_t outputs, int64_t inputs);

/// Whether products on the active instruction set have the bits of those with the decoded weights,
/// rounded to bfloat16; else they scale sums of products with numbers (gemm.h).
bool is_decoded(const CodeFormat& format);

/// Packs a matrix on all threads; `packed` is 64-byte aligned and does not overlap the source.
void pack_codes(const CodeFormat& format, const CodeSource& weight, uint8_t* packed);

/// Packs gate and up [F, H] into panels of 16 gate and 16 up columns of the same index:
/// packed_codes_bytes(2 * 16 * ceil(F / 16), H) bytes. Both have the order of gate.
void pack_gate_up_codes(const CodeFormat& format, const CodeSource& gate, const CodeSource& up,
                        uint8_t* packed);

/// `kind` is one of int4_float16, int4_bfloat16, e2m1, e2m1_e4m3, e4m3, e4m3_e8m0, int8,
/// rotated_int8.
CodeFormat make_code_format(const std::string& kind, int64_t group_size, bool shares_scales,
                            bool has_zeros, bool has_order);

/// A matrix [O, I] of codes in any strides.
struct CodeTensors {
  TensorView codes;         // [O, I] uint8
  TensorView scales;        // [ceil(O / scale_rows), G] of the type of the kind
  int64_t scale_rows;       // outputs of a row of scales
  const TensorView* zeros;  // [O, G] uint8, or null
  const TensorView* order;  // [I] int32, or null
  float multiplier, divisor;
};

/// weight -> packed [packed_codes_bytes(O, I)] uint8, 64-byte aligned.
void pack_codes_op(const CodeFormat& format, const CodeTensors& weight, const TensorView& packed);

/// gate and up [F, H], of one order -> packed [packed_gate_up_codes_bytes(F, H)].
void pack_gate_up_codes_op(const CodeFormat& format, const CodeTensors& gate, const CodeTensors& up,
                           const TensorView& packed);

int64_t packed_gate_up_codes_bytes(const CodeFormat& format, int64_t expert_size,
                                   int64_t hidden_size);

}  // namespace raymoe
