// 16-bit floats as storage types with exact conversions to and from float.
#pragma once

#include <cstdint>
#include <cstring>

namespace raymoe {

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

// Internal linkage: these are compiled once for each instruction set, and a shared inline function
// would let the linker keep the AVX512 copy for machines that lack it.
namespace {

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

/// IEEE half to single, subnormals, infinities and NaN included.
inline float to_float(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  } else if (magnitude >= 0x0400u) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

/// Round to nearest even; NaN stays NaN.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// Round to nearest even; overflow becomes infinity, NaN stays NaN.
template <>
inline fp16 from_float<fp16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return fp16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return fp16{static_cast<uint16_t>(sign | 0x7c00u)};
  if (bits < 0x38800000u) {  // subnormal result: let the float adder round
    float value;
    std::memcpy(&value, &bits, sizeof value);
    value += 0.5f;
    std::memcpy(&bits, &value, sizeof bits);
    return fp16{static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);
  return fp16{static_cast<uint16_t>(sign | (bits >> 13))};
}

}  // namespace
}  // namespace raymoe
