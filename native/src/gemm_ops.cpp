// Checks and pointers of the matrix products on tensors.
#include "raymoe/gemm_ops.h"

#include <string>

#include "gemm.h"
#include "raymoe/experts.h"
#include "raymoe/linear.h"

namespace raymoe {
namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

WeightSource source_of(const char* what, const TensorView& weight) {
  if (weight.dtype() != DType::kBFloat16 || weight.rank() != 2)
    fail(std::string(what) + " must be a bfloat16 matrix, it is " + dtype_name(weight.dtype()) +
         " with " + std::to_string(weight.rank()) + " dimensions");
  if (weight.size(0) < 1 || weight.size(1) < 1)
    fail(std::string(what) + " is empty: [" + std::to_string(weight.size(0)) + ", " +
         std::to_string(weight.size(1)) + "]");
  return {weight.data<bf16>(), weight.size(0), weight.size(1), weight.stride(0), weight.stride(1)};
}

bf16* packed_data(const char* what, const TensorView& packed, int64_t num_bytes) {
  packed.expect(what, DType::kUInt8, 1).expect_size(what, 0, num_bytes).expect_contiguous(what);
  if (reinterpret_cast<uintptr_t>(packed.raw()) % 64 != 0)
    fail(std::string(what) + " must be aligned to 64 bytes");
  return packed.data<bf16>();
}

void check_rows(const char* what, const TensorView& view, int64_t num_rows, int64_t columns) {
  view.expect(what, DType::kBFloat16, 2).expect_size(what, 0, num_rows);
  view.expect_size(what, 1, columns);
}

uint8_t* packed_bytes_of(const char* what, const TensorView& packed, int64_t num_bytes) {
  return reinterpret_cast<uint8_t*>(packed_data(what, packed, num_bytes));
}

const float* bias_data(const char* what, const TensorView* bias, int64_t num_experts,
                       int64_t outputs) {
  if (bias == nullptr) return nullptr;
  bias->expect(what, DType::kFloat32, 2).expect_size(what, 0, num_experts);
  bias->expect_size(what, 1, num_panels(outputs) * kPanelColumns).expect_contiguous(what);
  return bias->data<float>();
}

ExpertWeights expert_weights(const PackedExperts& experts, int64_t hidden_size) {
  const int64_t expert_size = experts.expert_size;
  if (hidden_size < 1 || expert_size < 1)
    fail("fused_experts: hidden size " + std::to_string(hidden_size) + " and expert size " +
         std::to_string(expert_size) + " must be at least 1");
  const int64_t panels = ceil_div(expert_size, kHalfPanel);
  const PackedWeight gate_up{nullptr, experts.gate_up_format, panels * kPanelColumns, hidden_size};
  const PackedWeight down{nullptr, experts.down_format, hidden_size, expert_size};
  const int64_t expert_bytes = down.num_bytes();
  experts.down.expect("fused_experts: down", DType::kUInt8, 1);
  const int64_t num_experts = experts.down.size(0) / expert_bytes;
  if (num_experts < 1 || num_experts * expert_bytes != experts.down.size(0))
    fail("fused_experts: down has " + std::to_string(experts.down.size(0)) +
         " bytes, an expert has " + std::to_string(expert_bytes));
  return {
      packed_bytes_of("fused_experts: gate_up", experts.gate_up, num_experts * gate_up.num_bytes()),
      packed_bytes_of("fused_experts: down", experts.down, experts.down.size(0)),
      experts.gate_up_format,
      experts.down_format,
      num_experts,
      hidden_size,
      expert_size,
      bias_data("fused_experts: gate_up_bias", experts.gate_up_bias, num_experts, 2 * expert_size),
      bias_data("fused_experts: down_bias", experts.down_bias, num_experts, hidden_size)};
}

}  // namespace

int64_t packed_gate_up_bytes(int64_t expert_size, int64_t hidden_size) {
  constexpr int64_t kHalf = kPanelColumns / 2;
  return packed_bytes(ceil_div(expert_size, kHalf) * kPanelColumns, hidden_size);
}

void pack_linear_op(const TensorView& weight, const TensorView& packed) {
  const WeightSource source = source_of("pack_linear: weight", weight);
  pack_weight(source, packed_data("pack_linear: packed", packed,
                                  packed_bytes(source.outputs, source.inputs)));
}

void pack_gate_up_op(const TensorView& gate, const TensorView& up, const TensorView& packed) {
  const WeightSource gate_source = source_of("pack_gate_up: gate", gate);
  const WeightSource up_source = source_of("pack_gate_up: up", up);
  up.expect_size("pack_gate_up: up", 0, gate.size(0));
  up.expect_size("pack_gate_up: up", 1, gate.size(1));
  pack_gate_up(gate_source, up_source,
               packed_data("pack_gate_up: packed", packed,
                           packed_gate_up_bytes(gate.size(0), gate.size(1))));
}

void packed_linear_op(const TensorView& x, const TensorView& packed, const CodeFormat* format,
                      const TensorView* bias, const TensorView& out) {
  x.expect("packed_linear: x", DType::kBFloat16, 2);
  const bool is_wide = out.dtype() == DType::kFloat32;
  out.expect("packed_linear: out", is_wide ? DType::kFloat32 : DType::kBFloat16, 2)
      .expect_size("packed_linear: out", 0, x.size(0));
  if (x.size(1) < 1 || out.size(1) < 1) fail("packed_linear: x and out must have columns");
  if (bias != nullptr)
    bias->expect("packed_linear: bias", DType::kBFloat16, 1)
        .expect_size("packed_linear: bias", 0, out.size(1));
  const PackedWeight weight{nullptr, format, out.size(1), x.size(1)};
  packed_linear({x.data<bf16>(), x.stride(0), x.size(0),
                 packed_bytes_of("packed_linear: packed", packed, weight.num_bytes()), format,
                 out.size(1), x.size(1), bias == nullptr ? nullptr : bias->data<bf16>(),
                 is_wide ? nullptr : out.data<bf16>(), out.stride(0),
                 is_wide ? out.data<float>() : nullptr});
}

void fused_experts_op(const TensorView& hidden, const TensorView& topk_ids,
                      const TensorView& topk_weights, const PackedExperts& experts,
                      const TensorView& out) {
  hidden.expect("fused_experts: hidden", DType::kBFloat16, 2);
  const int64_t num_tokens = hidden.size(0), hidden_size = hidden.size(1);
  check_rows("fused_experts: out", out, num_tokens, hidden_size);
  topk_ids.expect("fused_experts: topk_ids", DType::kInt32, 2)
      .expect_size("fused_experts: topk_ids", 0, num_tokens)
      .expect_contiguous("fused_experts: topk_ids");
  const int64_t top_k = topk_ids.size(1);
  if (top_k < 1) fail("fused_experts: topk_ids has no columns");
  topk_weights.expect("fused_experts: topk_weights", DType::kFloat32, 2)
      .expect_size("fused_experts: topk_weights", 0, num_tokens)
      .expect_size("fused_experts: topk_weights", 1, top_k)
      .expect_contiguous("fused_experts: topk_weights");
  fused_experts({expert_weights(experts, hidden_size), hidden.data<bf16>(), hidden.stride(0),
                 topk_ids.data<int32_t>(), topk_weights.data<float>(), num_tokens, top_k,
                 out.data<bf16>(), out.stride(0), experts.gating});
}

void gated_ffn_op(const TensorView& hidden, const PackedExperts& expert, const TensorView& out) {
  hidden.expect("gated_ffn: hidden", DType::kBFloat16, 2);
  check_rows("gated_ffn: out", out, hidden.size(0), hidden.size(1));
  const ExpertWeights weights = expert_weights(expert, hidden.size(1));
  if (weights.num_experts != 1) fail("gated_ffn: the weights hold more than one expert");
  fused_experts({weights, hidden.data<bf16>(), hidden.stride(0), nullptr, nullptr, hidden.size(0),
                 1, out.data<bf16>(), out.stride(0)});
}

}  // namespace raymoe
