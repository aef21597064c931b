// The norm's scalar steps and the clip factor, one formula each, shared by the CPU loops and the CUDA kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.h"

namespace gradacc {

enum class NormKind : int { kTwo, kInf };

inline NormKind kind_of(double norm_type) { return norm_type == 2.0 ? NormKind::kTwo : NormKind::kInf; }

GRADACC_HOST_DEVICE bool exponent_full(float value) { return (to_bits(value) & 0x7f800000u) == 0x7f800000u; }
GRADACC_HOST_DEVICE bool exponent_full(double value) {
  return (to_bits(value) & 0x7ff0000000000000u) == 0x7ff0000000000000u;
}

// A NaN on either side stays.
GRADACC_HOST_DEVICE double larger(double a, double b) { return a != a ? a : (b > a || b != b ? b : a); }

// One more element: its square, exact in fp64 for fp32 values, or its magnitude.
template <typename Math>
GRADACC_HOST_DEVICE double with_element(double folded, Math value, NormKind kind) {
  const double wide = static_cast<double>(value);
  return kind == NormKind::kTwo ? folded + wide * wide : larger(folded, wide < 0 ? -wide : wide);
}

// Two parts of a norm.
GRADACC_HOST_DEVICE double with_part(double folded, double part, NormKind kind) {
  return kind == NormKind::kTwo ? folded + part : larger(folded, part);
}

struct Clip {
  double norm;         // of the unscaled gradient
  double coefficient;  // 1 where nothing is clipped
  double multiplier;   // what the update multiplies the accumulated gradient by; NaN: nothing may be applied
};

// folded: all parts of the norm. denominator: the sum of the weights times the loss scale. As
// torch.nn.utils.clip_grad_norm_ has it: min(1, max_norm / (norm + 1e-6)); a norm of 0 gives 1.
GRADACC_HOST_DEVICE Clip clip_of(double folded, NormKind kind, double denominator, double max_norm) {
  Clip clip;
  const double size = denominator < 0.0 ? -denominator : denominator;
  clip.norm = denominator == 0.0 ? 0.0 : (kind == NormKind::kTwo ? sqrt(folded) : folded) / size;
  const double wanted = max_norm / (clip.norm + 1e-6);
  clip.coefficient = clip.norm > 0.0 && wanted < 1.0 ? wanted : 1.0;
  const double factor = clip.coefficient / denominator;
  const bool norm_usable = exponent_full(max_norm) || !exponent_full(clip.norm);
  // The update's math may be fp32: a factor beyond it would not be finite there.
  const bool usable = norm_usable && !exponent_full(denominator) && !exponent_full(static_cast<float>(factor));
  clip.multiplier = usable ? factor : static_cast<double>(NAN);
  return clip;
}

}  // namespace gradacc
