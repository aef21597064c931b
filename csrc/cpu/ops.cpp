// The registered CPU implementations of the ops: they check their arguments, then run the passes.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "gradients.h"
#include "passes.h"

namespace gradacc {
namespace {

void run_accumulate(const char* op, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                    const at::Tensor& partials, const at::Tensor& found_inf, bool overwrite, bool store,
                    double norm_type) {
  DensePointers pointers;
  const GradientArguments arguments =
      gradient_arguments(op, main_grads, grads, weights, pointers, /*read_main_grads=*/!overwrite, nullptr);
  const size_t count = arguments.main_grads.size();
  TORCH_CHECK_VALUE(!store || !main_grads.empty() || count == 0, op,
                    ": store=True needs main_grads to write to, got none. Pass them, or store=False.");
  const Chunks chunks(arguments.numels);
  NormCells cells(op, partials, found_inf, norm_type, chunks.size());

  std::vector<AccumulateRow> rows(count);
  for (size_t i = 0; i < count; ++i) {
    rows[i].main_grad = arguments.main_grads[i];
    rows[i].is_double = arguments.is_double[i];
    if (!store || arguments.numels[i] == 0) continue;
    rows[i].stored = pointers.write(main_grads[i], arguments.strides[i]);
    if (!overwrite) rows[i].main_grad = rows[i].stored;
  }
  accumulate_pass(chunks, rows, arguments.added, cells);
  pointers.finish();
}

void accumulate_op(at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                   const at::Tensor& partials, const at::Tensor& found_inf, bool overwrite, bool store,
                   double norm_type) {
  run_accumulate("accumulate_", main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type);
}

// The norm as a stage of its own is an accumulation of no micro-batch that stores nothing.
void norm_op(at::TensorList main_grads, const at::Tensor& partials, const at::Tensor& found_inf, double norm_type) {
  TORCH_CHECK_VALUE(partials.numel() > 0, "norm_: partials must have one element per chunk, got none. ",
                    "Allocate n_partials(main_grads) of them.");
  run_accumulate("norm_", main_grads, {}, at::empty({0}, at::kDouble), partials, found_inf, /*overwrite=*/false,
                 /*store=*/false, norm_type);
}

void check_state(const char* name, at::TensorList list, at::TensorList params, bool may_be_absent) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (may_be_absent && list[i].numel() == 0) continue;
    check_cpu("update_", name, i, list[i]);
    check_shape("update_", name, i, list[i], params[i]);
    check_math_dtype("update_", name, i, list[i], params[i].scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
}

void update_op(at::TensorList params, at::TensorList main_params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               const at::Tensor& steps, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
               const at::Tensor& hyper, const at::Tensor& group_ids, const at::Tensor& touched,
               const at::Tensor& multiplier, const at::Tensor& found_inf, c10::string_view rule_name,
               double max_grad_value) {
  const Rule rule = parse_rule(rule_name);
  const int64_t count = static_cast<int64_t>(params.size());
  check_length("update_", "main_params", main_params.size(), count, true);
  check_length("update_", "exp_avgs", exp_avgs.size(), count, rule == Rule::kSgd);
  check_length("update_", "exp_avg_sqs", exp_avg_sqs.size(), rule == Rule::kSgd ? 0 : count, false);
  check_update_cells(steps, group_ids, touched, hyper, multiplier, found_inf, count, max_grad_value);
  const int32_t* group = group_ids.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_TYPE(is_gradient_dtype(params[i].scalar_type()), item_name("update_", "params", i),
                     " must be float32, float64, float16 or bfloat16, got ", dtype_name(params[i].scalar_type()), ".");
    TORCH_CHECK_VALUE(group[i] >= 0 && group[i] < hyper.size(0), item_name("update_", "group_ids", i),
                      " must name a row of hyper (", hyper.size(0), " rows), got ", group[i], ".");
  }

  DensePointers pointers;
  GradientArguments arguments =
      gradient_arguments("update_", main_grads, grads, weights, pointers, !main_grads.empty(), &params);
  check_state("main_params", main_params, params, true);
  check_state("exp_avgs", exp_avgs, params, false);
  check_state("exp_avg_sqs", exp_avg_sqs, params, false);

  if (!step_applies(multiplier, found_inf)) return;
  std::vector<UpdateRow> rows(count);
  StepScalars scalars(rule, hyper.const_data_ptr<double>());
  const uint8_t* touch = touched.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (!touch[i] || arguments.numels[i] == 0) continue;
    UpdateRow& row = rows[i];
    const auto& strides = arguments.strides[i];
    row.main_grad = arguments.main_grads[i];
    row.is_double = arguments.is_double[i];
    row.param = pointers.write(params[i], strides);
    row.param_dtype = element_dtype(params[i].scalar_type());
    if (!main_params.empty() && main_params[i].numel() > 0) row.main_param = pointers.write(main_params[i], strides);
    if (!exp_avgs.empty()) row.exp_avg = pointers.write(exp_avgs[i], strides);
    if (!exp_avg_sqs.empty()) row.exp_avg_sq = pointers.write(exp_avg_sqs[i], strides);
  }
  std::vector<float> next_steps;
  update_touched(Chunks(arguments.numels), rows, arguments.added, scalars, group_ids, touched, steps, !exp_avgs.empty(),
                 multiplier, max_grad_value, next_steps);
  pointers.finish();
  store_steps(steps, next_steps);
}

}  // namespace
}  // namespace gradacc

TORCH_LIBRARY_IMPL(gradacc_fused, CPU, library) {
  library.impl("accumulate_", gradacc::accumulate_op);
  library.impl("norm_", gradacc::norm_op);
  library.impl("clip_", gradacc::clip_pass);
  library.impl("update_", gradacc::update_op);
}
