// Argument checks of the registered ops: each message names the op, the argument with its index, what was expected,
// what came and what to do. gradacc_fused/checks.py words the same ones for the reference.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "cpu/element.h"
#include "update_math.h"

namespace gradacc {

inline std::string dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kByte:
      return "uint8";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    default:
      return c10::toString(type);
  }
}

inline std::string item_name(const char* op, const char* argument, int64_t index) {
  return std::string(op) + ": " + argument + "[" + std::to_string(index) + "]";
}

inline bool is_gradient_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

inline Dtype element_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      return Dtype::kFloat32;
  }
}

// A tensor of an exact dtype, at least `numel` elements long, contiguous.
inline void check_cells(const char* op, const char* argument, const at::Tensor& tensor, at::ScalarType type,
                        int64_t numel) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, op, ": ", argument, " must be ", dtype_name(type), ", got ",
                   dtype_name(tensor.scalar_type()), ".");
  TORCH_CHECK_VALUE(tensor.numel() >= numel && tensor.is_contiguous(), op, ": ", argument,
                    " must be contiguous with at least ", numel, " elements, got ", tensor.numel(), ".");
}

inline void check_cell(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble, op, ": ", argument,
                   " must be float32 or float64, got ", dtype_name(tensor.scalar_type()), ".");
  TORCH_CHECK_VALUE(tensor.numel() == 1, op, ": ", argument, " must have one element, got ", tensor.numel(), ".");
}

inline void check_update_cells(const at::Tensor& steps, const at::Tensor& group_ids, const at::Tensor& touched,
                               const at::Tensor& hyper, const at::Tensor& multiplier, const at::Tensor& found_inf,
                               int64_t count, double max_grad_value) {
  check_cells("update_", "steps", steps, at::kFloat, count);
  check_cells("update_", "group_ids", group_ids, at::kInt, count);
  check_cells("update_", "touched", touched, at::kByte, count);
  check_cells("update_", "hyper", hyper, at::kDouble, 0);
  TORCH_CHECK_VALUE(hyper.dim() == 2 && hyper.size(1) == kHyperColumns, "update_: hyper must have shape [groups, ",
                    static_cast<int>(kHyperColumns), "], got ", hyper.sizes(), ". Build it with hyper_rows().");
  TORCH_CHECK_VALUE(max_grad_value > 0.0, "update_: max_grad_value must be positive (inf: none), got ", max_grad_value,
                    ".");
  check_cell("update_", "multiplier", multiplier);
  check_cell("update_", "found_inf", found_inf);
}

inline Rule parse_rule(c10::string_view rule) {
  if (rule == "adamw") return Rule::kAdamW;
  if (rule == "adam") return Rule::kAdam;
  TORCH_CHECK_VALUE(rule == "sgd", "update_: rule must be adamw, adam or sgd, got '", std::string(rule), "'.");
  return Rule::kSgd;
}

inline void check_norm_type(const char* op, double norm_type) {
  TORCH_CHECK_VALUE(norm_type == 2.0 || norm_type == std::numeric_limits<double>::infinity(), op,
                    ": norm_type must be 2 or inf, got ", norm_type, ".");
}

// `count` entries, or none at all where `optional`.
inline void check_length(const char* op, const char* argument, size_t length, size_t count, bool optional) {
  TORCH_CHECK_VALUE(length == count || (optional && length == 0), op, ": ", argument, " must have ", count,
                    " tensors, one per parameter", optional ? ", or none" : "", ", got ", length, ".");
}

inline void check_shape(const char* op, const char* argument, int64_t index, const at::Tensor& tensor,
                        const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.sizes() == like.sizes(), item_name(op, argument, index), " must have shape ", like.sizes(),
                    ", got ", tensor.sizes(), ". Give an empty tensor where there is none.");
}

inline void check_math_dtype(const char* op, const char* argument, int64_t index, const at::Tensor& tensor,
                             at::ScalarType type) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, item_name(op, argument, index), " must be ", dtype_name(type),
                   ", got ", dtype_name(tensor.scalar_type()), ". The math dtype is float64 for float64 parameters, ",
                   "float32 for all others.");
}

inline void check_gradient(const char* op, int64_t index, const at::Tensor& grad) {
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided, item_name(op, "grads", index),
                    " must be dense, got a sparse tensor. Call .to_dense() on it first.");
  TORCH_CHECK_TYPE(is_gradient_dtype(grad.scalar_type()), item_name(op, "grads", index),
                   " must be float32, float64, float16 or bfloat16, got ", dtype_name(grad.scalar_type()), ".");
}

inline void check_cpu(const char* op, const char* argument, int64_t index, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), item_name(op, argument, index), " must be on cpu, got ",
                    tensor.device().str(), ". All tensors of one call live on one device.");
}

}  // namespace gradacc
