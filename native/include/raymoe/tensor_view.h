// A non-owning typed view of a tensor that another library owns.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "raymoe/bf16.h"

namespace raymoe {

enum class DType { kFloat32, kFloat16, kBFloat16, kInt8, kUInt8, kInt32, kInt64, kFloat64, kBool };

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt8:
      return "int8";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<fp16> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kUInt8;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kInt32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kInt64;
};

/// Shapes and strides in elements; checks throw std::invalid_argument naming the argument, e.g.
/// "decode_attention: keys has head_dim 64, query has 128".
class TensorView {
 public:
  TensorView() = default;
  TensorView(void* data, DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides)
      : data_(data), dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {}

  DType dtype() const { return dtype_; }
  int64_t rank() const { return static_cast<int64_t>(shape_.size()); }
  int64_t size(int64_t axis) const { return shape_.at(static_cast<size_t>(axis)); }
  int64_t stride(int64_t axis) const { return strides_.at(static_cast<size_t>(axis)); }
  int64_t num_elements() const {
    int64_t count = 1;
    for (int64_t extent : shape_) count *= extent;
    return count;
  }

  /// The data as T*; the caller has checked the dtype with `expect`.
  template <typename T>
  T* data() const {
    return static_cast<T*>(data_);
  }
  void* raw() const { return data_; }

  /// Throws unless dtype and rank are as given and the last axis is contiguous.
  const TensorView& expect(const char* what, DType dtype, int64_t rank) const {
    if (dtype_ != dtype)
      throw std::invalid_argument(std::string(what) + " has dtype " + dtype_name(dtype_) +
                                  ", expected " + dtype_name(dtype));
    return expect_rank(what, rank);
  }
  const TensorView& expect_rank(const char* what, int64_t rank) const {
    if (this->rank() != rank)
      throw std::invalid_argument(std::string(what) + " has " + std::to_string(this->rank()) +
                                  " dimensions, expected " + std::to_string(rank));
    if (rank > 0 && num_elements() > 0 && shape_.back() > 1 && strides_.back() != 1)
      throw std::invalid_argument(std::string(what) + " must be contiguous in its last dimension");
    return *this;
  }
  const TensorView& expect_size(const char* what, int64_t axis, int64_t extent) const {
    if (size(axis) != extent)
      throw std::invalid_argument(std::string(what) + " has size " + std::to_string(size(axis)) +
                                  " in dimension " + std::to_string(axis) + ", expected " +
                                  std::to_string(extent));
    return *this;
  }
  const TensorView& expect_contiguous(const char* what) const {
    int64_t expected = 1;
    for (int64_t axis = rank() - 1; axis >= 0; --axis) {
      if (num_elements() > 0 && size(axis) > 1 && stride(axis) != expected)
        throw std::invalid_argument(std::string(what) + " must be contiguous");
      expected *= size(axis);
    }
    return *this;
  }

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
};

}  // namespace raymoe
