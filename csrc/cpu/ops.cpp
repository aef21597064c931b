// The registered CPU implementations of the ops: they check their arguments, then run the passes.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../gradients.h"
#include "passes.h"

namespace gradacc {
namespace {

void run_accumulate(const char* op, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                    const at::Tensor& partials, const at::Tensor& found_inf, bool overwrite, bool store,
                    double norm_type) {
  DensePointers pointers;
  const GradientArguments arguments =
      gradient_arguments(op, main_grads, grads, weights, pointers, /*read_main_grads=*/!overwrite, nullptr, at::kCPU);
  const size_t count = arguments.main_grads.size();
  check_store(op, store, main_grads, count);
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
  check_norm_partials(partials);
  run_accumulate("norm_", main_grads, {}, at::empty({0}, at::kDouble), partials, found_inf, /*overwrite=*/false,
                 /*store=*/false, norm_type);
}

void update_op(at::TensorList params, at::TensorList main_params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               const at::Tensor& steps, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
               const at::Tensor& hyper, const at::Tensor& group_ids, const at::Tensor& touched,
               const at::Tensor& multiplier, const at::Tensor& found_inf, c10::string_view rule_name,
               double max_grad_value) {
  const Rule rule = parse_rule(rule_name);
  const int64_t count = static_cast<int64_t>(params.size());
  check_state_lengths(rule, main_params, exp_avgs, exp_avg_sqs, count);
  check_update_cells(steps, group_ids, touched, hyper, multiplier, found_inf, count, max_grad_value);
  check_params(params);
  check_group_ids(group_ids, hyper, count);

  DensePointers pointers;
  GradientArguments arguments =
      gradient_arguments("update_", main_grads, grads, weights, pointers, !main_grads.empty(), &params, at::kCPU);
  check_state("main_params", main_params, params, true, at::kCPU);
  check_state("exp_avgs", exp_avgs, params, false, at::kCPU);
  check_state("exp_avg_sqs", exp_avg_sqs, params, false, at::kCPU);

  if (!step_applies(multiplier, found_inf)) return;
  const UpdatedLists lists{params, main_params, exp_avgs, exp_avg_sqs};
  std::vector<StepRow> rows(count);
  StepScalars scalars(rule, hyper.const_data_ptr<double>());
  const uint8_t* touch = touched.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (touch[i] && arguments.numels[i] > 0) rows[i] = {lists.row(arguments, pointers, i)};
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
