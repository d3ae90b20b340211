// pybind11 caster: any host tensor that speaks DLPack -> TensorView. Included by module.cpp only.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "raymoe/tensor_view.h"

// The C structures of DLPack (version 0), by which tensors cross from Python to here.
extern "C" {

typedef struct {
  int32_t device_type;  // 1 is host memory
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat, 6 bool
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // may be null: compact row-major
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor* self);
} DLManagedTensor;
}

namespace raymoe {

inline DType dtype_of(const DLDataType& type) {
  const int key = type.code * 1000 + type.bits;
  if (type.lanes == 1) switch (key) {
      case 2032:
        return DType::kFloat32;
      case 2016:
        return DType::kFloat16;
      case 4016:
        return DType::kBFloat16;
      case 2064:
        return DType::kFloat64;
      case 8:
        return DType::kInt8;
      case 1008:
        return DType::kUInt8;
      case 32:
        return DType::kInt32;
      case 64:
        return DType::kInt64;
      case 6008:
        return DType::kBool;
      default:
        break;
    }
  throw std::invalid_argument("tensor dtype (DLPack code " + std::to_string(type.code) + ", " +
                              std::to_string(type.bits) + " bits) is not supported");
}

inline TensorView view_of(const DLTensor& tensor) {
  if (tensor.device.device_type != 1)
    throw std::invalid_argument("tensor is not in host memory");
  std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
  std::vector<int64_t> strides(shape.size());
  if (tensor.strides != nullptr) {
    strides.assign(tensor.strides, tensor.strides + tensor.ndim);
  } else {
    int64_t step = 1;
    for (size_t axis = shape.size(); axis-- > 0;) {
      strides[axis] = step;
      step *= shape[axis];
    }
  }
  return TensorView(static_cast<char*>(tensor.data) + tensor.byte_offset, dtype_of(tensor.dtype),
                    std::move(shape), std::move(strides));
}

/// The capsule of any DLPack exporter. `torch.utils.dlpack.to_dlpack` is tried first: it is
/// several microseconds cheaper than `Tensor.__dlpack__`, which is Python.
inline pybind11::object dlpack_capsule(pybind11::handle src) {
  namespace py = pybind11;
  static const py::object* to_dlpack = nullptr;
  static PyTypeObject* tensor_type = nullptr;
  if (to_dlpack == nullptr && py::module_::import("sys").attr("modules").contains("torch")) {
    const py::module_ torch = py::module_::import("torch");
    tensor_type = reinterpret_cast<PyTypeObject*>(py::object(torch.attr("Tensor")).release().ptr());
    to_dlpack = new py::object(py::module_::import("torch.utils.dlpack").attr("to_dlpack"));
  }
  if (to_dlpack != nullptr && PyObject_TypeCheck(src.ptr(), tensor_type)) return (*to_dlpack)(src);
  return src.attr("__dlpack__")();
}

}  // namespace raymoe

namespace pybind11::detail {

template <>
struct type_caster<raymoe::TensorView> {
  PYBIND11_TYPE_CASTER(raymoe::TensorView, const_name("Tensor"));

  bool load(handle src, bool) {
    if (src.is_none()) return false;
    if (!hasattr(src, "__dlpack__")) return false;
    capsule_ = raymoe::dlpack_capsule(src);
    auto* managed =
        static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
    if (managed == nullptr) throw error_already_set();
    value = raymoe::view_of(managed->dl_tensor);
    return true;  // the unused capsule frees its tensor when the caster goes, after the call
  }

 private:
  object capsule_;
};

}  // namespace pybind11::detail
