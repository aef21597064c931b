// Argument checks of the registered ops: each message names the op, the argument with its index, what was expected,
// what came and what to do. gradacc_fused/checks.py words the same ones for the reference.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "element.h"
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

// The value of a cell that lies on the host.
inline double host_cell(const at::Tensor& cell) {
  return cell.scalar_type() == at::kDouble ? *cell.const_data_ptr<double>() : *cell.const_data_ptr<float>();
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
  if (rule == "sgd") return Rule::kSgd;
  TORCH_CHECK_VALUE(rule == "lion", "update_: rule must be adamw, adam, sgd or lion, got '", std::string(rule), "'.");
  return Rule::kLion;
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

inline void check_device(const char* op, const char* argument, int64_t index, const at::Tensor& tensor,
                         at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, item_name(op, argument, index), " must be on ", device.str(), ", got ",
                    tensor.device().str(), ". All tensors of one call live on one device.");
}

inline void check_cpu(const char* op, const char* argument, int64_t index, const at::Tensor& tensor) {
  check_device(op, argument, index, tensor, at::kCPU);
}

// Small arrays of a call may lie on its device or on the host.
inline bool may_lie(const at::Tensor& tensor, at::Device device) {
  return tensor.device() == device || tensor.device().is_cpu();
}

// One that is no item of a list.
inline void check_lies_on(const char* op, const char* argument, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, op, ": ", argument, " must be on ", device.str(), ", got ",
                    tensor.device().str(), ".");
}

inline void check_store(const char* op, bool store, at::TensorList main_grads, size_t count) {
  TORCH_CHECK_VALUE(!store || !main_grads.empty() || count == 0, op,
                    ": store=True needs main_grads to write to, got none. Pass them, or store=False.");
}

inline void check_norm_partials(const at::Tensor& partials) {
  TORCH_CHECK_VALUE(partials.numel() > 0, "norm_: partials must have one element per chunk, got none. ",
                    "Allocate n_partials(main_grads) of them.");
}

inline void check_clip(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
                       const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
                       const at::Tensor& weight_sum, double norm_type, double max_norm) {
  check_norm_type("clip_", norm_type);
  TORCH_CHECK_VALUE(max_norm > 0.0, "clip_: max_norm must be positive (inf: no clipping), got ", max_norm, ".");
  check_cells("clip_", "partials", partials, at::kDouble, 0);
  check_cells("clip_", "counts", counts, at::kDouble, 0);
  check_cell("clip_", "loss_scale", loss_scale);
  check_cell("clip_", "total_norm", total_norm);
  check_cell("clip_", "clip_coef", clip_coef);
  check_cell("clip_", "multiplier", multiplier);
  check_cell("clip_", "weight_sum", weight_sum);
}

// -- update_ -------------------------------------------------------------------------------------------------------

inline void check_params(at::TensorList params) {
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_TYPE(is_gradient_dtype(params[i].scalar_type()), item_name("update_", "params", i),
                     " must be float32, float64, float16 or bfloat16, got ", dtype_name(params[i].scalar_type()), ".");
  }
}

// group_ids and hyper: on the host.
inline void check_group_ids(const at::Tensor& group_ids, const at::Tensor& hyper, int64_t count) {
  const int32_t* group = group_ids.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(group[i] >= 0 && group[i] < hyper.size(0), item_name("update_", "group_ids", i),
                      " must name a row of hyper (", hyper.size(0), " rows), got ", group[i], ".");
  }
}

inline void check_state_lengths(Rule rule, at::TensorList main_params, at::TensorList exp_avgs,
                                at::TensorList exp_avg_sqs, int64_t count) {
  check_length("update_", "main_params", main_params.size(), count, true);
  check_length("update_", "exp_avgs", exp_avgs.size(), count, rule == Rule::kSgd);
  check_length("update_", "exp_avg_sqs", exp_avg_sqs.size(), formula_of(rule) == Formula::kAdam ? count : 0, false);
}

inline void check_state(const char* name, at::TensorList list, at::TensorList params, bool may_be_absent,
                        at::Device device) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (may_be_absent && list[i].numel() == 0) continue;
    check_device("update_", name, i, list[i], device);
    check_shape("update_", name, i, list[i], params[i]);
    check_math_dtype("update_", name, i, list[i], params[i].scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
}

}  // namespace gradacc
