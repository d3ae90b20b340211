// The Python module `_raymoe_native`, which `raymoe._native` re-exports.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "panels.h"
#include "raymoe/attention.h"
#include "raymoe/codes.h"
#include "raymoe/elementwise.h"
#include "raymoe/gates.h"
#include "raymoe/experts.h"
#include "raymoe/isa.h"
#include "raymoe/index_selection.h"
#include "raymoe/compressed_attention.h"
#include "raymoe/latent_attention.h"
#include "raymoe/linear.h"
#include "raymoe/mover.h"
#include "raymoe/probe.h"
#include "raymoe/row_experts.h"
#include "raymoe/sampling.h"
#include "raymoe/state.h"
#include "raymoe/streams.h"
#include "raymoe/worker_pool.h"
#include "rotation.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace raymoe {
namespace {

/// What raymoe.kernels declares too; tests/native/test_constants.py compares them.
void bind_constants(py::module_& m) {
  m.attr("BLOCK_TOKENS") = kBlockTokens;
  m.attr("VALUE_COLUMNS") = kValueColumns;
  m.attr("HEAD_DIM_MULTIPLE") = kHeadDimMultiple;
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.attr("MAX_EXPERTS") = kMaxExperts;
  m.attr("PANEL_COLUMNS") = kPanelColumns;
  m.attr("PACKED_ALIGNMENT") = kPackedAlignment;
  m.attr("INT4_ZERO") = kInt4Zero;
  m.attr("MAX_INPUT_RUN") = kMaxInputRun;
}

void bind_runtime(py::module_& m) {
  m.def("active_isa", [] { return std::string(isa_name(active_isa())); },
        "Name of the instruction set that the kernels use.");
  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
    return names;
  }, "Names of the instruction sets that this machine and this build can run.");
  m.def("set_isa", [](const std::string& name) { set_isa(isa_from_name(name)); }, py::arg("name"),
        "Choose the instruction set of all later calls; ValueError if the machine lacks it.");
  m.def("num_threads", [] { return worker_pool()->num_threads(); },
        "Number of threads of the worker pool, the caller included.");
  m.def("set_num_threads", &set_num_threads, py::arg("num_threads"),
        py::call_guard<py::gil_scoped_release>(), "Replace the worker pool.");
}

template <typename T>
const T* pointer_to(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

/// Without an offset, the normed value is rounded before it is weighted.
NormWeighting norm_weighting(std::optional<float> offset) {
  return {offset.has_value(), offset.value_or(0.0f)};
}

void bind_elementwise(py::module_& m) {
  using Optional = std::optional<TensorView>;
  m.def("rms_norm",
        [](const TensorView& hidden, const Optional& delta, const Optional& weight, float eps,
           std::optional<float> offset, const TensorView& out) {
          rms_norm(hidden, pointer_to(delta), pointer_to(weight), eps, norm_weighting(offset), out);
        },
        py::arg("hidden"), py::arg("delta"), py::arg("weight"), py::arg("eps"), py::arg("offset"),
        py::arg("out"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_norm.py.");
  m.def("qkv_rope",
        [](const TensorView& qkv, const TensorView& positions, const TensorView& cosine,
           const TensorView& sine, const Optional& query_norm, const Optional& key_norm,
           const TensorView& query, const TensorView& key, const TensorView& value, float eps,
           float clip, bool norm_follows, bool interleaved, bool norms_values,
           bool values_are_keys, std::optional<float> offset) {
          qkv_rope({qkv, positions, cosine, sine, query_norm, key_norm, query, key, value},
                   {eps, clip, norm_follows, interleaved, norms_values, values_are_keys,
                    norm_weighting(offset)});
        },
        py::arg("qkv"), py::arg("positions"), py::arg("cosine"), py::arg("sine"),
        py::arg("query_norm"), py::arg("key_norm"), py::arg("query"), py::arg("key"),
        py::arg("value"), py::arg("eps"), py::arg("clip"), py::arg("norm_follows"),
        py::arg("interleaved"), py::arg("norms_values"), py::arg("values_are_keys"),
        py::arg("offset"), py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_rope.py.");
  m.def("rotate_ends", &rotate_ends, py::arg("rows"), py::arg("positions"), py::arg("cosine"),
        py::arg("sine"), py::arg("backwards"), py::arg("out"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/compressed.py.");
  m.def("route", &route, py::arg("logits"), py::arg("renormalize"), py::arg("ids"),
        py::arg("weights"), py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_router.py.");
  m.def("add_gated", &add_gated, py::arg("out"), py::arg("shared"), py::arg("gate"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_router.py.");
}

GateActivation gate_activation(const std::string& name) {
  if (name == "sigmoid") return GateActivation::kSigmoid;
  if (name == "silu") return GateActivation::kSilu;
  throw std::invalid_argument("activation of a gate is '" + name + "', expected sigmoid or silu");
}

void bind_gates(py::module_& m) {
  using Guard = py::call_guard<py::gil_scoped_release>;
  constexpr const char* kSee = "See kernels/gates.py.";
  m.attr("MAX_GROUP_WIDTH") = kMaxGroupWidth;
  m.def("gate_values",
        [](const TensorView& values, const TensorView& gates, const std::string& activation,
           const TensorView& out) {
          gate_values(values, gates, gate_activation(activation), out);
        },
        py::arg("values"), py::arg("gates"), py::arg("activation"), py::arg("out"), Guard(), kSee);
  m.def("norm_and_gate",
        [](const TensorView& values, const TensorView& weight, const TensorView& gates, float eps,
           bool rounds_norm, const std::string& activation, const TensorView& out) {
          norm_and_gate(values, weight, gates, eps, rounds_norm, gate_activation(activation), out);
        },
        py::arg("values"), py::arg("weight"), py::arg("gates"), py::arg("eps"),
        py::arg("rounds_norm"), py::arg("activation"), py::arg("out"), Guard(), kSee);
  m.def("gate_and_norm", &gate_and_norm, py::arg("values"), py::arg("weight"), py::arg("gates"),
        py::arg("num_groups"), py::arg("eps"), py::arg("out"), Guard(), kSee);
}

void bind_streams(py::module_& m) {
  using Guard = py::call_guard<py::gil_scoped_release>;
  constexpr const char* kSee = "See kernels/streams.py.";
  m.attr("MAX_STREAMS") = kMaxStreams;
  m.def("stream_logits", &stream_logits, py::arg("hidden"), py::arg("logits"), py::arg("scale"),
        py::arg("base"), py::arg("eps"), Guard(), kSee);
  m.def("read_streams", &read_streams, py::arg("hidden"), py::arg("logits"), py::arg("eps"),
        py::arg("out"), Guard(), kSee);
  m.def("read_gated_streams", &read_gated_streams, py::arg("normed"), py::arg("gates"),
        py::arg("out"), Guard(), kSee);
  m.def("mixing_matrices", &mixing_matrices, py::arg("logits"), py::arg("iterations"),
        py::arg("eps"), py::arg("out"), Guard(), kSee);
  m.def("add_to_streams",
        [](const TensorView& hidden, const TensorView& delta, const TensorView& logits,
           const std::optional<TensorView>& matrices, float magnitude, float eps) {
          add_to_streams(hidden, delta, logits, pointer_to(matrices), magnitude, eps);
        },
        py::arg("hidden"), py::arg("delta"), py::arg("logits"), py::arg("matrices"),
        py::arg("magnitude"), py::arg("eps"), Guard(), kSee);
}

void bind_gemm(py::module_& m) {
  using Guard = py::call_guard<py::gil_scoped_release>;
  using Format = std::optional<CodeFormat>;
  using Optional = std::optional<TensorView>;
  m.def("packed_bytes", &packed_bytes, py::arg("out_features"), py::arg("in_features"),
        "Bytes of a packed weight [out_features, in_features].");
  m.def("packed_gate_up_bytes", &packed_gate_up_bytes, py::arg("expert_size"),
        py::arg("hidden_size"), "Bytes of the packed gate and up weights of one expert.");
  m.def("pack_linear", &pack_linear_op, py::arg("weight"), py::arg("packed"), Guard(),
        "See kernels/cpu_linear.py.");
  m.def("pack_gate_up", &pack_gate_up_op, py::arg("gate"), py::arg("up"), py::arg("packed"),
        Guard(), "See kernels/cpu_experts.py.");
  m.def("packed_linear",
        [](const TensorView& x, const TensorView& packed, const std::optional<TensorView>& bias,
           const TensorView& out, const Format& format) {
          packed_linear_op(x, packed, pointer_to(format), pointer_to(bias), out);
        },
        py::arg("x"), py::arg("packed"), py::arg("bias"), py::arg("out"),
        py::arg("code_format") = py::none(), Guard(), "See kernels/cpu_linear.py.");
  m.def("quantise_rows", &quantise_rows_op, py::arg("x"), py::arg("run"), py::arg("codes"),
        py::arg("scales"), Guard(), "See kernels/cpu_linear.py.");
  m.def("packed_grouped_linear", &packed_grouped_linear_op, py::arg("x"), py::arg("packed"),
        py::arg("out"), Guard(), "See kernels/cpu_linear.py.");
  m.def("fused_experts",
        [](const TensorView& hidden, const TensorView& topk_ids, const TensorView& topk_weights,
           const TensorView& gate_up, const TensorView& down, const Optional& gate_up_bias,
           const Optional& down_bias, int64_t expert_size, float gain, float cubic, float limit,
           float offset, float gate_limit, const TensorView& out, const Format& gate_up_format,
           const Format& down_format) {
          fused_experts_op(hidden, topk_ids, topk_weights,
                           {gate_up, down, expert_size, pointer_to(gate_up_format),
                            pointer_to(down_format), pointer_to(gate_up_bias),
                            pointer_to(down_bias), {gain, cubic, limit, offset, gate_limit}},
                           out);
        },
        py::arg("hidden"), py::arg("topk_ids"), py::arg("topk_weights"), py::arg("gate_up"),
        py::arg("down"), py::arg("gate_up_bias"), py::arg("down_bias"), py::arg("expert_size"),
        py::arg("gain"), py::arg("cubic"), py::arg("limit"), py::arg("offset"),
        py::arg("gate_limit"), py::arg("out"),
        py::arg("gate_up_format") = py::none(), py::arg("down_format") = py::none(), Guard(),
        "See kernels/cpu_experts.py.");
  m.def("add_row_experts",
        [](const TensorView& hidden, const TensorView& topk_ids, const TensorView& topk_weights,
           const TensorView& matrices, int64_t expert_size, int64_t first, int64_t last,
           const Optional& gate_bias, const Optional& up_bias, const Optional& down_bias,
           float gain, float cubic, float limit, float offset, float gate_limit,
           const TensorView& sum) {
          add_row_experts_op(hidden, topk_ids, topk_weights,
                             {matrices, expert_size, first, last, pointer_to(gate_bias),
                              pointer_to(up_bias), pointer_to(down_bias),
                              {gain, cubic, limit, offset, gate_limit}},
                             sum);
        },
        py::arg("hidden"), py::arg("topk_ids"), py::arg("topk_weights"), py::arg("matrices"),
        py::arg("expert_size"), py::arg("first"), py::arg("last"), py::arg("gate_bias"),
        py::arg("up_bias"), py::arg("down_bias"), py::arg("gain"), py::arg("cubic"),
        py::arg("limit"), py::arg("offset"), py::arg("gate_limit"), py::arg("sums"), Guard(),
        "See kernels/cpu_experts.py.");
  m.def("gated_ffn",
        [](const TensorView& hidden, const TensorView& gate_up, const TensorView& down,
           int64_t expert_size, float gain, float cubic, const TensorView& out,
           const Format& gate_up_format, const Format& down_format) {
          gated_ffn_op(hidden, {gate_up, down, expert_size, pointer_to(gate_up_format),
                                pointer_to(down_format), nullptr, nullptr, {gain, cubic}},
                       out);
        },
        py::arg("hidden"), py::arg("gate_up"), py::arg("down"), py::arg("expert_size"),
        py::arg("gain"), py::arg("cubic"), py::arg("out"), py::arg("gate_up_format") = py::none(),
        py::arg("down_format") = py::none(), Guard(), "See kernels/cpu_experts.py.");
}

using CodeTuple = std::tuple<TensorView, TensorView, int64_t, std::optional<TensorView>,
                             std::optional<TensorView>, float, float>;

CodeTensors code_tensors(const CodeTuple& weight) {
  const auto& [codes, scales, scale_rows, zeros, order, multiplier, divisor] = weight;
  return {codes, scales, scale_rows, pointer_to(zeros), pointer_to(order), multiplier, divisor};
}

void bind_codes(py::module_& m) {
  using Guard = py::call_guard<py::gil_scoped_release>;
  py::class_<CodeFormat>(m, "CodeFormat",
                         "How a matrix of codes is packed; see kernels/packing.py.")
      .def(py::init(&make_code_format), py::arg("kind"), py::arg("group_size"),
           py::arg("shares_scales"), py::arg("has_zeros"), py::arg("has_order"))
      .def_property_readonly("is_decoded", &is_decoded,
                             "Whether products are those with weights that are rounded to bfloat16.")
      .def("packed_bytes", &packed_codes_bytes, py::arg("out_features"), py::arg("in_features"),
           "Bytes of a packed matrix [out_features, in_features].")
      .def("packed_gate_up_bytes", &packed_gate_up_codes_bytes, py::arg("expert_size"),
           py::arg("hidden_size"), "Bytes of the packed gate and up matrices of one expert.");
  m.def("pack_codes",
        [](const CodeFormat& format, const CodeTuple& weight, const TensorView& packed) {
          pack_codes_op(format, code_tensors(weight), packed);
        },
        py::arg("code_format"), py::arg("weight"), py::arg("packed"), Guard(),
        "See kernels/packing.py.");
  m.def("pack_gate_up_codes",
        [](const CodeFormat& format, const CodeTuple& gate, const CodeTuple& up,
           const TensorView& packed) {
          pack_gate_up_codes_op(format, code_tensors(gate), code_tensors(up), packed);
        },
        py::arg("code_format"), py::arg("gate"), py::arg("up"), py::arg("packed"), Guard(),
        "See kernels/packing.py.");
}

void bind_attention(py::module_& m) {
  m.def("append_and_attend",
        [](const TensorView& query, const TensorView& key, const TensorView& value,
           const TensorView& cache, const TensorView& query_start,
           const TensorView& context_tokens, const TensorView& block_table,
           const TensorView& out, double scale, int64_t sliding_window,
           const std::optional<TensorView>& sinks) {
          append_and_attend(query, key, value, cache, query_start, context_tokens, block_table, out,
                            scale, sliding_window, pointer_to(sinks));
        },
        py::arg("query"), py::arg("key"), py::arg("value"), py::arg("cache"),
        py::arg("query_start"), py::arg("context_tokens"), py::arg("block_table"), py::arg("out"),
        py::arg("scale"), py::arg("sliding_window"), py::arg("sinks"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_attention.py.");
  m.def("append", &append, py::arg("key"), py::arg("value"), py::arg("cache"),
        py::arg("query_start"), py::arg("context_tokens"), py::arg("block_table"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_attention.py.");
  m.def("append_and_attend_latent",
        [](const TensorView& query, const TensorView& latent, const TensorView& cache,
           const TensorView& query_start, const TensorView& context_tokens,
           const TensorView& block_table, const TensorView& out, double scale,
           const std::optional<TensorView>& sinks) {
          append_and_attend_latent(query, latent, cache, query_start, context_tokens, block_table,
                                   out, scale, pointer_to(sinks));
        },
        py::arg("query"), py::arg("latent"), py::arg("cache"), py::arg("query_start"),
        py::arg("context_tokens"), py::arg("block_table"), py::arg("out"), py::arg("scale"),
        py::arg("sinks"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_latent_attention.py.");
  m.def("append_latent", &append_latent, py::arg("latent"), py::arg("cache"),
        py::arg("query_start"), py::arg("context_tokens"), py::arg("block_table"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_latent_attention.py.");
}

void bind_selection(py::module_& m) {
  m.def("choose_positions", &choose_positions, py::arg("query"), py::arg("weights"),
        py::arg("keys"), py::arg("query_start"), py::arg("context_tokens"),
        py::arg("block_table"), py::arg("entry_tokens"), py::arg("out"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/selection.py.");
  m.def("choose_blocks", &choose_blocks, py::arg("query"), py::arg("keys"),
        py::arg("query_start"), py::arg("context_tokens"), py::arg("block_table"),
        py::arg("block_tokens"), py::arg("num_local"), py::arg("out"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/selection.py.");
}

void bind_compressed(py::module_& m) {
  m.def("pool_entries",
        [](const TensorView& pooled, const TensorView& bias, const TensorView& norm, double eps,
           const TensorView& sums, const TensorView& entries, const TensorView& query_start,
           const TensorView& context_tokens, const TensorView& block_table,
           const TensorView& slots, const TensorView& cosine, const TensorView& sine,
           int64_t ratio) {
          pool_entries({pooled, bias, norm, eps}, sums, entries,
                       {query_start, context_tokens, block_table, slots}, {cosine, sine}, ratio);
        },
        py::arg("pooled"), py::arg("bias"), py::arg("norm"), py::arg("eps"), py::arg("sums"),
        py::arg("entries"), py::arg("query_start"), py::arg("context_tokens"),
        py::arg("block_table"), py::arg("slots"), py::arg("cosine"), py::arg("sine"),
        py::arg("ratio"), py::call_guard<py::gil_scoped_release>(),
        "See kernels/cpu_compressed.py.");
  m.def("append_and_attend_compressed",
        [](const TensorView& query, const TensorView& new_rows, const TensorView& sinks,
           const std::optional<TensorView>& chosen, double scale, const TensorView& rows,
           const TensorView& entries, const TensorView& query_start,
           const TensorView& context_tokens, const TensorView& block_table,
           const TensorView& slots, const TensorView& cosine, const TensorView& sine,
           int64_t ratio, const TensorView& out) {
          append_and_attend_compressed({query, new_rows, sinks, pointer_to(chosen), scale}, rows,
                                       entries, {query_start, context_tokens, block_table, slots},
                                       {cosine, sine}, ratio, out);
        },
        py::arg("query"), py::arg("new_rows"), py::arg("sinks"), py::arg("chosen"),
        py::arg("scale"), py::arg("rows"), py::arg("entries"), py::arg("query_start"),
        py::arg("context_tokens"), py::arg("block_table"), py::arg("slots"), py::arg("cosine"),
        py::arg("sine"), py::arg("ratio"), py::arg("out"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_compressed.py.");
}

void bind_state(py::module_& m) {
  m.def("causal_conv",
        [](const TensorView& inputs, const TensorView& weight,
           const std::optional<TensorView>& bias, const TensorView& states,
           const TensorView& query_start, const TensorView& context_tokens,
           const TensorView& slots, bool silu, const TensorView& out) {
          causal_conv(inputs, weight, pointer_to(bias), states,
                      {query_start, context_tokens, slots}, silu, out);
        },
        py::arg("inputs"), py::arg("weight"), py::arg("bias"), py::arg("states"),
        py::arg("query_start"), py::arg("context_tokens"), py::arg("slots"), py::arg("silu"),
        py::arg("out"), py::call_guard<py::gil_scoped_release>(), "See kernels/state.py.");
  m.def("scan",
        [](const TensorView& query, const TensorView& key, const TensorView& value,
           const TensorView& log_decay, const TensorView& gain, const TensorView& states,
           const TensorView& query_start, const TensorView& context_tokens,
           const TensorView& slots, double scale, bool delta, bool normalize,
           const TensorView& out) {
          scan({query, key, value, log_decay, gain, states},
               {query_start, context_tokens, slots}, {scale, delta, normalize}, out);
        },
        py::arg("query"), py::arg("key"), py::arg("value"), py::arg("log_decay"),
        py::arg("gain"), py::arg("states"), py::arg("query_start"), py::arg("context_tokens"),
        py::arg("slots"), py::arg("scale"), py::arg("delta"), py::arg("normalize"),
        py::arg("out"), py::call_guard<py::gil_scoped_release>(), "See kernels/state.py.");
}

void bind_sampling(py::module_& m) {
  m.def("argmax", &argmax, py::arg("logits"), py::arg("ids"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_sampling.py.");
  m.def("gumbel_argmax",
        [](const TensorView& logits, const std::optional<TensorView>& scale,
           const TensorView& seed, const TensorView& row_key, const TensorView& sample,
           const TensorView& position, const TensorView& ids) {
          gumbel_argmax({logits, scale, seed, row_key, sample, position, ids});
        },
        py::arg("logits"), py::arg("scale"), py::arg("seed"), py::arg("row_key"),
        py::arg("sample"), py::arg("position"), py::arg("ids"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_sampling.py.");
  m.def("log_sum_exp", &log_sum_exp, py::arg("logits"), py::arg("out"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_sampling.py.");
  m.def("top_k", &top_k, py::arg("logits"), py::arg("ids"), py::arg("values"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_sampling.py.");
}

void bind_probe(py::module_& m) {
  m.def("read_bandwidth_bytes_per_s", &read_bandwidth_bytes_per_s, py::arg("num_threads"),
        py::arg("seconds"), py::arg("num_bytes"), py::call_guard<py::gil_scoped_release>(),
        "See kernels/cpu_probe.py.");
  m.def("update_bandwidth_bytes_per_s", &update_bandwidth_bytes_per_s, py::arg("num_threads"),
        py::arg("seconds"), py::arg("num_bytes"), py::call_guard<py::gil_scoped_release>(),
        "See device/threads.py.");
  m.def("peak_flop_per_s",
        [](int num_threads, double seconds, const std::string& dtype) {
          const Number number = dtype == "bfloat16" ? Number::kBFloat16
                                : dtype == "int8"   ? Number::kInt8
                                                    : Number::kFloat32;
          return peak_flop_per_s(num_threads, seconds, number);
        },
        py::arg("num_threads"), py::arg("seconds"), py::arg("dtype"),
        py::call_guard<py::gil_scoped_release>(), "See kernels/cpu_probe.py.");
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

/// Runs and drops a Python function in a thread that has no part in the interpreter.
std::function<void()> without_lock(py::object function) {
  if (function.is_none()) return nullptr;
  std::shared_ptr<py::object> shared(new py::object(std::move(function)), [](py::object* dropped) {
    py::gil_scoped_acquire lock;
    delete dropped;
  });
  return [shared = std::move(shared)] {
    py::gil_scoped_acquire lock;
    try {
      (*shared)();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  };
}

/// Waits without the interpreter's lock, but handles signals meanwhile.
bool wait_for(Mark& mark) {
  constexpr double kSignalsS = 0.05;
  while (!mark.is_decided()) {
    {
      py::gil_scoped_release unlocked;
      if (mark.wait_decided(kSignalsS)) break;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  if (mark.is_done()) return mark.wait();
  py::gil_scoped_release unlocked;
  return mark.wait();
}

struct UnlockedDelete {
  void operator()(Mover* mover) const {
    py::gil_scoped_release unlocked;  // its thread may need the lock before it ends
    delete mover;
  }
};
using MoverRef = std::unique_ptr<Mover, UnlockedDelete>;

/// Rows of target address, source address and bytes: an int64 array, or a list of tuples.
std::vector<Piece> pieces_of(const py::object& rows) {
  const auto piece = [](uintptr_t target, uintptr_t source, size_t num_bytes) {
    return Piece{static_cast<char*>(pointer(target)), static_cast<char*>(pointer(source)),
                 num_bytes};
  };
  std::vector<Piece> pieces;
  if (!py::isinstance<py::array>(rows)) {
    for (const auto& [target, source, num_bytes] :
         rows.cast<std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>>())
      pieces.push_back(piece(target, source, num_bytes));
    return pieces;
  }
  const auto array = rows.cast<py::array_t<int64_t, py::array::c_style | py::array::forcecast>>();
  const auto row = array.unchecked<2>();
  for (py::ssize_t i = 0; i < row.shape(0); ++i)
    pieces.push_back(piece(static_cast<uintptr_t>(row(i, 0)), static_cast<uintptr_t>(row(i, 1)),
                           static_cast<size_t>(row(i, 2))));
  return pieces;
}

// What does not block keeps the interpreter's lock: beside a thread of pure Python, each release
// costs the 5 milliseconds until that thread gives it back.
void bind_marks(py::module_& m) {
  py::class_<CancelToken, std::shared_ptr<CancelToken>>(m, "CancelToken")
      .def(py::init<>())
      .def("cancel", [](CancelToken& token) { token.is_cancelled = true; })
      .def_property_readonly("is_cancelled",
                             [](const CancelToken& token) { return token.is_cancelled.load(); });
  py::class_<Mark, MarkRef>(m, "Mark", "See device/lane.py.")
      .def(py::init<>())
      .def("wait_done", &wait_for, "Block until the task is done; False if it was cancelled.")
      .def_property_readonly("is_done", &Mark::is_done)
      .def_property_readonly("start_s", &Mark::start_s)
      .def_property_readonly("end_s", &Mark::end_s)
      .def_property_readonly("native_error", &Mark::error)
      .def("finish", &Mark::finish, py::arg("start_s"), py::arg("end_s"))
      .def("cancel_native", &Mark::cancel, py::arg("error"));
}

void bind_device(py::module_& m) {
  using Guard = py::call_guard<py::gil_scoped_release>;
  py::class_<DeviceRuntime, std::shared_ptr<DeviceRuntime>>(m, "DeviceRuntime")
      .def("begin",
           [](DeviceRuntime& runtime, uintptr_t stream, const std::vector<MarkRef>& after,
              Mark& mark) {
             std::optional<py::gil_scoped_release> unlocked;
             if (runtime.waits_on_host()) unlocked.emplace();
             for (const MarkRef& before : after) {
               if (!before->is_decided() && !unlocked) unlocked.emplace();
               if (!before->precede(runtime, pointer(stream))) return false;
             }
             mark.start_event = runtime.record(pointer(stream));
             return true;
           },
           py::arg("stream"), py::arg("after"), py::arg("mark"),
           "Let the stream wait for tasks and record the start of one; False: one was cancelled.")
      .def("end",
           [](DeviceRuntime& runtime, uintptr_t stream, Mark& mark) {
             EventRef done = runtime.record(pointer(stream));
             mark.issue(runtime.shared_from_this(), pointer(stream), std::move(mark.start_event),
                        std::move(done));
           },
           py::arg("stream"), py::arg("mark"), "Record the end of a task.")
      .def("close", &DeviceRuntime::close, Guard());
  py::class_<SimulatedLink, DeviceRuntime, std::shared_ptr<SimulatedLink>>(m, "SimulatedLink")
      .def(py::init(&make_simulated_link), py::arg("bytes_per_s"), py::arg("copies"))
      .def("new_stream",
           [](SimulatedLink& link, bool to_device) {
             return reinterpret_cast<uintptr_t>(
                 link.new_stream(to_device ? Direction::kToDevice : Direction::kToHost));
           },
           py::arg("to_device"));
  m.def("cuda_runtime",
        [](const CudaFunctions& functions, int device, int version, uintptr_t clock_stream,
           double anchor_s) {
          return make_cuda_runtime(functions, device, version, pointer(clock_stream), anchor_s);
        },
        py::arg("functions"), py::arg("device"), py::arg("version"), py::arg("clock_stream"),
        py::arg("anchor_s"));
  py::class_<LinkMeter, std::shared_ptr<LinkMeter>>(m, "LinkMeter")
      .def(py::init<>())
      .def("read", &LinkMeter::read, "Bytes so far, and busy seconds.");
  py::class_<Mover, MoverRef>(m, "Mover")
      .def(py::init([](std::string name, std::shared_ptr<DeviceRuntime> runtime, uintptr_t stream,
                       bool to_device, size_t packet_bytes, size_t chunk_bytes,
                       std::shared_ptr<LinkMeter> meter) {
             return MoverRef(new Mover(std::move(name), std::move(runtime), pointer(stream),
                                       to_device ? Direction::kToDevice : Direction::kToHost,
                                       MoverLimits{packet_bytes, chunk_bytes}, std::move(meter)));
           }),
           py::arg("name"), py::arg("runtime"), py::arg("stream"), py::kw_only(),
           py::arg("to_device"), py::arg("packet_bytes"), py::arg("chunk_bytes"),
           py::arg("meter"))
      .def("submit",
           [](Mover& mover, const py::object& rows, bool can_batch,
              std::vector<MarkRef> after, MarkRef mark, double seconds, double stall_s,
              py::object on_done, std::shared_ptr<CancelToken> token) {
             CopyJob job{pieces_of(rows), can_batch, std::move(after), std::move(mark),
                         seconds, stall_s, without_lock(std::move(on_done)), std::move(token)};
             mover.submit(std::move(job));
           },
           py::arg("rows"), py::arg("can_batch"), py::arg("after"), py::arg("mark"),
           py::arg("seconds"), py::arg("stall_s"), py::arg("on_done"), py::arg("token"))
      .def("count_arrived", &Mover::count_arrived)
      .def("close", &Mover::close, Guard());
}

}  // namespace
}  // namespace raymoe

PYBIND11_MODULE(_raymoe_native, m) {
  m.attr("__version__") = RAYMOE_VERSION;
  m.doc() = "CPU kernels of raymoe; wrapped, checked and documented in raymoe.kernels.";
  raymoe::bind_constants(m);
  raymoe::bind_runtime(m);
  raymoe::bind_probe(m);
  raymoe::bind_marks(m);
  raymoe::bind_device(m);
  raymoe::bind_sampling(m);
  raymoe::bind_elementwise(m);
  raymoe::bind_gates(m);
  raymoe::bind_streams(m);
  raymoe::bind_codes(m);
  raymoe::bind_gemm(m);
  raymoe::bind_attention(m);
  raymoe::bind_selection(m);
  raymoe::bind_compressed(m);
  raymoe::bind_state(m);
}
