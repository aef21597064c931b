// The gradient arguments that accumulate_ and update_ share: main grads and m micro-batches, piece-major, checked and
// turned into addresses.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "checks.h"
#include "dense.h"
#include "source.h"
#include "update_row.h"

namespace gradacc {

struct GradientArguments {
  std::vector<const void*> main_grads;        // one per tensor; nullptr: starts from zero
  std::vector<int64_t> numels;                // 0 where no gradient and no main grad says how long it is
  std::vector<std::vector<int64_t>> strides;  // memory order of each tensor
  std::vector<bool> is_double;                // math dtype
  std::vector<Source> sources;                // [micro-batch][tensor]
  std::vector<const Source*> of_micro_batch;
  Gradients added;  // its weights: nullptr where they lie on another device than the host
};

// main_grads may be empty when nothing was accumulated before; the tensors' own strides decide the memory order unless
// `like` (update_'s params) is given. device: where all tensors must lie; the weights may lie on the host instead.
inline GradientArguments gradient_arguments(const char* op, at::TensorList main_grads, at::TensorList grads,
                                            const at::Tensor& weights, DensePointers& pointers, bool read_main_grads,
                                            const at::TensorList* like, at::Device device,
                                            bool weights_on_host = true) {
  TORCH_CHECK_TYPE(weights.scalar_type() == at::kDouble, op, ": weights must be float64, got ",
                   dtype_name(weights.scalar_type()), ".");
  TORCH_CHECK_VALUE(weights.dim() == 1 && weights.is_contiguous() && may_lie(weights, device), op,
                    ": weights must be a contiguous 1-d tensor with one weight per micro-batch, got shape ",
                    weights.sizes(), " on ", weights.device().str(), ".");
  const size_t m = weights.numel();
  const size_t count = like ? like->size() : (main_grads.empty() && m > 0 ? grads.size() / m : main_grads.size());
  check_length(op, "main_grads", main_grads.size(), count, !read_main_grads);
  TORCH_CHECK_VALUE(grads.size() == m * count, op, ": grads must have ", m * count, " tensors (", m,
                    " micro-batches of ", count, " parameters, piece-major), got ", grads.size(), ".");

  GradientArguments out;
  out.main_grads.resize(count, nullptr);
  out.numels.resize(count, 0);
  out.strides.resize(count);
  out.is_double.resize(count, false);
  out.sources.resize(count * m);
  const double* weight = weights_on_host ? weights.const_data_ptr<double>() : nullptr;
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor* shape = like ? &(*like)[i] : (main_grads.empty() ? nullptr : &main_grads[i]);
    for (size_t j = 0; j < m && !shape; ++j) {
      if (grads[j * count + i].numel() > 0) shape = &grads[j * count + i];
    }
    if (!shape) continue;
    check_device(op, like ? "params" : (main_grads.empty() ? "grads" : "main_grads"), i, *shape, device);
    out.is_double[i] = shape->scalar_type() == at::kDouble;
    out.numels[i] = shape->numel();
    out.strides[i] = dense_strides(*shape);
    if (!main_grads.empty()) {
      check_device(op, "main_grads", i, main_grads[i], device);
      check_shape(op, "main_grads", i, main_grads[i], *shape);
      if (like) {
        check_math_dtype(op, "main_grads", i, main_grads[i], out.is_double[i] ? at::kDouble : at::kFloat);
      } else {
        TORCH_CHECK_TYPE(main_grads[i].scalar_type() == at::kFloat || main_grads[i].scalar_type() == at::kDouble,
                         item_name(op, "main_grads", i), " must be float32 or float64, got ",
                         dtype_name(main_grads[i].scalar_type()), ". Allocate it in the math dtype.");
      }
    }
    for (size_t j = 0; j < m; ++j) {
      const at::Tensor& grad = grads[j * count + i];
      if (grad.numel() == 0 || out.numels[i] == 0) continue;
      check_gradient(op, j * count + i, grad);
      check_device(op, "grads", j * count + i, grad, device);
      check_shape(op, "grads", j * count + i, grad, *shape);
      Source& source = out.sources[j * count + i];
      source.dtype = element_dtype(grad.scalar_type());
      if (!weight || weight[j] != 0.0) source.data = pointers.read(grad, out.strides[i]);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (read_main_grads && out.numels[i] > 0) out.main_grads[i] = pointers.read(main_grads[i], out.strides[i]);
  }
  for (size_t j = 0; j < m; ++j) out.of_micro_batch.push_back(out.sources.data() + j * count);
  out.added = {out.of_micro_batch.data(), weight, static_cast<int64_t>(m)};
  return out;
}

// What update_ writes to, beside its arguments.
struct UpdatedLists {
  at::TensorList params, main_params, exp_avgs, exp_avg_sqs;

  // A parameter's row. It has elements.
  UpdateRow row(const GradientArguments& arguments, DensePointers& pointers, size_t i) const {
    const auto& strides = arguments.strides[i];
    UpdateRow row;
    row.main_grad = arguments.main_grads[i];
    row.param = pointers.write(params[i], strides);
    if (!main_params.empty() && main_params[i].numel() > 0) row.main_param = pointers.write(main_params[i], strides);
    if (!exp_avgs.empty()) row.exp_avg = pointers.write(exp_avgs[i], strides);
    if (!exp_avg_sqs.empty()) row.exp_avg_sq = pointers.write(exp_avg_sqs[i], strides);
    row.param_dtype = static_cast<int32_t>(element_dtype(params[i].scalar_type()));
    row.is_double = arguments.is_double[i];
    return row;
  }
};

}  // namespace gradacc
