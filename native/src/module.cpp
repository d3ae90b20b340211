// The compiled module `raymoe._native`: the only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "raymoe/isa.h"
#include "raymoe/worker_pool.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace raymoe {
namespace {

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

}  // namespace
}  // namespace raymoe

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of raymoe; wrapped, checked and documented in raymoe.kernels.";
  raymoe::bind_runtime(m);
}
