// The ops on a CUDA device: the same arguments, checks and meaning as those of cpu/ops.cpp. Nothing waits for the
// device. Lists lie on one device; weights, counts, loss_scale, hyper, group_ids and touched lie there or on the host:
// what lies on the host is read when the op is called, so a captured graph keeps those values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

namespace gradacc::cuda {

void accumulate_op(at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                   const at::Tensor& partials, const at::Tensor& found_inf, bool overwrite, bool store,
                   double norm_type);

void norm_op(at::TensorList main_grads, const at::Tensor& partials, const at::Tensor& found_inf, double norm_type);

void clip_op(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
             const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
             const at::Tensor& weight_sum, double norm_type, double max_norm);

void update_op(at::TensorList params, at::TensorList main_params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               const at::Tensor& steps, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
               const at::Tensor& hyper, const at::Tensor& group_ids, const at::Tensor& touched,
               const at::Tensor& multiplier, const at::Tensor& found_inf, c10::string_view rule, double max_grad_value);

}  // namespace gradacc::cuda
