// Element types as they lie in memory, and their exact conversions to and from the math dtype.
// Branch-free, so that the loops around them become vector code on any instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host_device.h"

namespace gradacc {

enum class Dtype : int8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

GRADACC_HOST_DEVICE constexpr int64_t element_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : (dtype == Dtype::kFloat32 ? 4 : 2);
}

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename Element>
GRADACC_HOST_DEVICE constexpr Dtype dtype_of() {
  if (std::is_same_v<Element, BFloat16>) return Dtype::kBFloat16;
  if (std::is_same_v<Element, Float16>) return Dtype::kFloat16;
  return std::is_same_v<Element, double> ? Dtype::kFloat64 : Dtype::kFloat32;
}

GRADACC_HOST_DEVICE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
GRADACC_HOST_DEVICE uint64_t to_bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
GRADACC_HOST_DEVICE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

GRADACC_HOST_DEVICE float widen(float value) { return value; }
GRADACC_HOST_DEVICE double widen(double value) { return value; }
GRADACC_HOST_DEVICE float widen(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }
GRADACC_HOST_DEVICE float widen(Float16 value) {
  // Normal numbers: the exponent's bias is added. Subnormal ones: the mantissa is put behind a 2^-14 that is then taken
  // away, so that no fp32 subnormal comes up (torch.set_flush_denormal would flush it). Infinities and NaN: full
  // exponent.
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t subnormal = to_bits(from_bits(magnitude + 0x38800000u) - from_bits(0x38800000u));
  uint32_t bits = magnitude < 0x00800000u ? subnormal : normal;
  bits |= magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0u;
  return from_bits(bits | (static_cast<uint32_t>(value.bits & 0x8000u) << 16));
}

GRADACC_HOST_DEVICE void narrow(float value, float& out) { out = value; }
GRADACC_HOST_DEVICE void narrow(double value, double& out) { out = value; }
GRADACC_HOST_DEVICE void narrow(float value, double& out) { out = value; }
GRADACC_HOST_DEVICE void narrow(double value, float& out) { out = static_cast<float>(value); }
GRADACC_HOST_DEVICE void narrow(float value, BFloat16& out) {
  // Round to nearest, ties to even.
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
GRADACC_HOST_DEVICE void narrow(float value, Float16& out) {
  // Round to nearest, ties to even. Subnormal results: adding 0.5 aligns the mantissa and lets the adder round.
  const uint32_t bits = to_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? special : half;
  out.bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// Never taken: a float64 parameter has no low-precision copy, but the dtype switch spells every pair.
GRADACC_HOST_DEVICE void narrow(double value, BFloat16& out) { narrow(static_cast<float>(value), out); }
GRADACC_HOST_DEVICE void narrow(double value, Float16& out) { narrow(static_cast<float>(value), out); }

// Calls OPERATION with Element the type of DTYPE.
#define GRADACC_BY_DTYPE(DTYPE, OPERATION) \
  switch (DTYPE) {                         \
    case Dtype::kFloat32: {                \
      using Element = float;               \
      OPERATION;                           \
    } break;                               \
    case Dtype::kFloat64: {                \
      using Element = double;              \
      OPERATION;                           \
    } break;                               \
    case Dtype::kFloat16: {                \
      using Element = Float16;             \
      OPERATION;                           \
    } break;                               \
    case Dtype::kBFloat16: {               \
      using Element = BFloat16;            \
      OPERATION;                           \
    } break;                               \
  }

}  // namespace gradacc
