// The update rules, one formula each, shared by the CPU and the CUDA kernels.
//
// Formulas: torch.optim.Adam, AdamW and SGD (documentation of torch.optim; Loshchilov and Hutter 2019 for the decoupled
// decay), Lion (Chen et al. 2023, algorithm 2). Scalars that depend on the step count are taken in double once per
// tensor; elements are updated in Math (float, or double for float64 parameters). Every fused multiply-add is spelled
// out: builds switch contraction off.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace gradacc {

// Columns of a hyper-parameter row (float64), one row per parameter group; HYPER_COLUMNS in gradacc_fused/checks.py
// names them alike.
enum Hyper : int {
  kLr = 0,
  kWeightDecay = 1,
  kMaximize = 2,
  kBeta1 = 3,
  kBeta2 = 4,
  kEps = 5,
  kMomentum = 6,
  kDampening = 7,
  kNesterov = 8,
  kHyperColumns = 9,
};

enum class Rule : int { kAdamW = 0, kAdam = 1, kSgd = 2, kLion = 3 };

// What is compiled apart: Adam and AdamW differ in their scalars alone.
enum class Formula { kAdam, kSgd, kLion };

constexpr Formula formula_of(Rule rule) {
  return rule == Rule::kSgd ? Formula::kSgd : rule == Rule::kLion ? Formula::kLion : Formula::kAdam;
}

GRADACC_HOST_DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
GRADACC_HOST_DEVICE double fused_multiply_add(double a, double b, double c) { return fma(a, b, c); }
GRADACC_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
GRADACC_HOST_DEVICE double square_root(double x) { return sqrt(x); }

// What one tensor's elements need of its row and of its step count.
template <typename Math>
struct RuleScalars {
  Math lr = 0;
  Math weight_decay = 0;  // L2: added to the gradient
  Math decay = 1;         // decoupled: 1 - lr * weight_decay, on the parameter
  Math sign = 1;          // -1 when maximizing: the gradient comes multiplied by it
  Math one_minus_beta1 = 0;
  Math beta2 = 0;
  Math one_minus_beta2 = 0;
  Math eps = 0;        // times sqrt(bias_correction2)
  Math step_size = 0;  // lr * sqrt(bias_correction2) / bias_correction1
  Math momentum = 0;
  Math one_minus_dampening = 1;  // 1 on the first update of a momentum buffer
  bool nesterov = false;
};

// base to the power of a whole number, by squaring: the same bits on every device, which pow() does not promise.
GRADACC_HOST_DEVICE double whole_power(double base, double exponent) {
  double power = 1.0;
  for (int64_t left = static_cast<int64_t>(exponent); left > 0; left >>= 1) {
    if (left & 1) power *= base;
    base *= base;
  }
  return power;
}

// step: the effective step that is being made, from 1 (sgd: which update of the momentum buffer this is).
template <typename Math>
GRADACC_HOST_DEVICE RuleScalars<Math> rule_scalars(Rule rule, const double* row, double step) {
  RuleScalars<Math> s;
  s.lr = static_cast<Math>(row[kLr]);
  s.sign = row[kMaximize] != 0.0 ? Math(-1) : Math(1);
  const bool decoupled = rule == Rule::kAdamW || rule == Rule::kLion;
  s.weight_decay = decoupled ? Math(0) : static_cast<Math>(row[kWeightDecay]);
  s.decay = decoupled ? static_cast<Math>(1.0 - row[kLr] * row[kWeightDecay]) : Math(1);
  if (rule == Rule::kSgd) {
    s.momentum = static_cast<Math>(row[kMomentum]);
    s.one_minus_dampening = step > 1.0 ? static_cast<Math>(1.0 - row[kDampening]) : Math(1);
    s.nesterov = row[kNesterov] != 0.0;
    return s;
  }
  s.one_minus_beta1 = static_cast<Math>(1.0 - row[kBeta1]);
  s.beta2 = static_cast<Math>(row[kBeta2]);
  s.one_minus_beta2 = static_cast<Math>(1.0 - row[kBeta2]);
  if (rule == Rule::kLion) return s;
  const double bias_correction2_sqrt = sqrt(1.0 - whole_power(row[kBeta2], step));
  s.eps = static_cast<Math>(row[kEps] * bias_correction2_sqrt);
  s.step_size = static_cast<Math>(row[kLr] * bias_correction2_sqrt / (1.0 - whole_power(row[kBeta1], step)));
  return s;
}

// What the rule is given: the accumulated gradient times the multiplier, its size bounded.
template <typename Math>
GRADACC_HOST_DEVICE Math scaled_and_clamped(Math grad, Math multiplier, Math bound) {
  Math value = grad * multiplier;
  value = value > bound ? bound : value;
  return value < -bound ? -bound : value;
}

// Whether a step counts for a tensor: sgd counts the updates of its momentum buffer, so that the first one is known.
GRADACC_HOST_DEVICE bool step_counts(Rule rule, const double* row, bool with_buffer) {
  return rule != Rule::kSgd || (with_buffer && row[kMomentum] != 0.0);
}

// The decay as part of the gradient, where there is one (kL2). Without one the parameter is not read: 0 * inf would be
// NaN.
template <bool kL2, typename Math>
GRADACC_HOST_DEVICE Math decayed_gradient(Math grad, Math param, const RuleScalars<Math>& s) {
  return kL2 ? fused_multiply_add(s.weight_decay, param, grad) : grad;
}

// Adam and AdamW: the two differ in where the decay goes, and rule_scalars has set the other one to nothing.
template <bool kL2, typename Math>
GRADACC_HOST_DEVICE void adam(Math& param, Math grad, Math& exp_avg, Math& exp_avg_sq, const RuleScalars<Math>& s) {
  param = param * s.decay;
  grad = decayed_gradient<kL2>(grad, param, s);
  exp_avg = fused_multiply_add(s.one_minus_beta1, grad - exp_avg, exp_avg);
  exp_avg_sq = fused_multiply_add(s.one_minus_beta2 * grad, grad, s.beta2 * exp_avg_sq);
  // lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps), with sqrt(bc2) multiplied through: one division for two.
  param = param - s.step_size * exp_avg / (square_root(exp_avg_sq) + s.eps);
}

template <bool kL2, typename Math>
GRADACC_HOST_DEVICE void sgd(Math& param, Math grad, const RuleScalars<Math>& s) {
  grad = decayed_gradient<kL2>(grad, param, s);
  param = fused_multiply_add(-s.lr, grad, param);
}

template <bool kL2, typename Math>
GRADACC_HOST_DEVICE void sgd_momentum(Math& param, Math grad, Math& momentum_buffer, const RuleScalars<Math>& s) {
  grad = decayed_gradient<kL2>(grad, param, s);
  momentum_buffer = fused_multiply_add(s.momentum, momentum_buffer, s.one_minus_dampening * grad);
  const Math direction = s.nesterov ? fused_multiply_add(s.momentum, momentum_buffer, grad) : momentum_buffer;
  param = fused_multiply_add(-s.lr, direction, param);
}

// Steps by the sign (0 for NaN, as torch.sign) of the momentum as it was, moved a share of 1 - beta1 towards the
// gradient.
template <typename Math>
GRADACC_HOST_DEVICE void lion(Math& param, Math grad, Math& exp_avg, const RuleScalars<Math>& s) {
  const Math towards = grad - exp_avg;
  const Math direction = fused_multiply_add(s.one_minus_beta1, towards, exp_avg);
  exp_avg = fused_multiply_add(s.one_minus_beta2, towards, exp_avg);
  const Math sign = direction > Math(0) ? Math(1) : direction < Math(0) ? Math(-1) : Math(0);
  param = param * s.decay - s.lr * sign;
}

}  // namespace gradacc
