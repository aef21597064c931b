#include "hot_path.h"

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

#include "../checks.h"
#include "../dense.h"

namespace gradacc {

HotPath::HotPath(std::vector<at::Tensor> params, at::Tensor group_ids)
    : params_(std::move(params), "params"), group_ids_(std::move(group_ids)) {
  check_cells("HotPath", "group_ids", group_ids_, at::kInt, static_cast<int64_t>(params_.size()));
  std::vector<int64_t> numels;
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& param = params_[i];
    check_cpu("HotPath", "params", i, param);
    static_.push_back({param.sizes().vec(), dense_strides(param), param.numel(), element_dtype(param.scalar_type()),
                       param.scalar_type() == at::kDouble, !param.is_non_overlapping_and_dense()});
    if (static_.back().has_gaps && param.numel() > 0) with_gaps_.push_back(i);
    numels.push_back(param.numel());
  }
  chunks_ = Chunks(numels);
}

void HotPath::check_list(const char* name, const std::vector<at::Tensor>& list, bool may_be_absent) const {
  check_length("HotPath", name, list.size(), params_.size(), true);
  for (size_t i = 0; i < list.size(); ++i) {
    if (may_be_absent && list[i].numel() == 0) continue;
    check_cpu("HotPath", name, i, list[i]);
    check_shape("HotPath", name, i, list[i], params_[i]);
    check_math_dtype("HotPath", name, i, list[i], static_[i].is_double ? at::kDouble : at::kFloat);
    TORCH_CHECK_VALUE(same_order(list[i], static_[i].strides), item_name("HotPath", name, i),
                      " must have the parameter's memory order (strides ", at::IntArrayRef(static_[i].strides),
                      "), got ", list[i].strides(), ".");
  }
}

void HotPath::set_main_grads(std::vector<at::Tensor> main_grads) {
  check_list("main_grads", main_grads, false);
  main_grads_ = Located(std::move(main_grads), "main_grads");
}

void HotPath::set_state(const std::string& rule, std::vector<at::Tensor> main_params, std::vector<at::Tensor> exp_avgs,
                        std::vector<at::Tensor> exp_avg_sqs, at::Tensor steps) {
  rule_ = parse_rule(rule);
  check_list("main_params", main_params, true);
  check_list("exp_avgs", exp_avgs, false);
  check_list("exp_avg_sqs", exp_avg_sqs, false);
  check_cells("HotPath", "steps", steps, at::kFloat, static_cast<int64_t>(params_.size()));
  main_params_ = Located(std::move(main_params), "main_params");
  exp_avgs_ = Located(std::move(exp_avgs), "exp_avgs");
  exp_avg_sqs_ = Located(std::move(exp_avg_sqs), "exp_avg_sqs");
  steps_ = std::move(steps);
}

Gradients HotPath::take(const char* op, const Pieces& pieces, const at::Tensor& weights) {
  check_cells(op, "weights", weights, at::kDouble, static_cast<int64_t>(pieces.size()));
  sources_.clear();
  for (const auto& piece : pieces) {
    check_length(op, "grads", piece->sources.size(), params_.size(), false);
    if (!piece->exclusive) piece->locate();  // somebody may have given a gradient other memory
    sources_.push_back(piece->sources.data());
  }
  return {sources_.data(), weights.const_data_ptr<double>(), static_cast<int64_t>(pieces.size())};
}

void HotPath::run_accumulate(const char* op, const Gradients& added, const at::Tensor& partials,
                             const at::Tensor& found_inf, bool overwrite, bool store, double norm_type) {
  const size_t count = params_.size();
  check_length(op, "main_grads", main_grads_.size(), count, overwrite);
  TORCH_CHECK_VALUE(!store || main_grads_.size() == count, op, ": store=True needs main_grads to write to, got none.");
  NormCells cells(op, partials, found_inf, norm_type, chunks_.size());
  accumulate_rows_.resize(count);
  for_each_tensor(count, [&](size_t i) {
    void* main_grad = overwrite && !store ? nullptr : locate(op, main_grads_, i);
    accumulate_rows_[i] = {overwrite ? nullptr : main_grad, store ? main_grad : nullptr, static_[i].is_double};
  });
  accumulate_pass(chunks_, accumulate_rows_, added, cells);
}

void HotPath::accumulate(const Pieces& pieces, const at::Tensor& weights, const at::Tensor& partials,
                         const at::Tensor& found_inf, bool overwrite, bool store, double norm_type) {
  RECORD_FUNCTION("gradacc_fused::accumulate_", {});
  const Gradients added = take("accumulate_", pieces, weights);
  run_accumulate("accumulate_", added, partials, found_inf, overwrite, store, norm_type);
}

void HotPath::norm(const at::Tensor& partials, const at::Tensor& found_inf, double norm_type) {
  RECORD_FUNCTION("gradacc_fused::norm_", {});
  run_accumulate("norm_", Gradients(), partials, found_inf, /*overwrite=*/false, /*store=*/false, norm_type);
}

void HotPath::update(const Pieces& pieces, const at::Tensor& weights, bool stored, const at::Tensor& hyper,
                     const at::Tensor& touched, const at::Tensor& multiplier, const at::Tensor& found_inf,
                     double max_grad_value) {
  RECORD_FUNCTION("gradacc_fused::update_", {});
  const size_t count = params_.size();
  TORCH_CHECK_VALUE(steps_.defined(), "update_: the state is not set.");
  check_update_cells(steps_, group_ids_, touched, hyper, multiplier, found_inf, static_cast<int64_t>(count),
                     max_grad_value);
  if (!step_applies(multiplier, found_inf)) return;

  const Gradients added = take("update_", pieces, weights);
  check_length("update_", "main_grads", main_grads_.size(), count, !stored);
  update_rows_.resize(count);
  for_each_tensor(count, [&](size_t i) {
    const Static& fixed = static_[i];
    UpdateRow& row = update_rows_[i] = UpdateRow();
    if (fixed.numel == 0) return;
    row.is_double = fixed.is_double;
    row.param_dtype = fixed.dtype;
    if (stored) row.main_grad = locate("update_", main_grads_, i);
    if (!fixed.has_gaps) row.param = locate("update_", params_, i);
    row.main_param = locate("update_", main_params_, i);
    row.exp_avg = locate("update_", exp_avgs_, i);
    row.exp_avg_sq = locate("update_", exp_avg_sqs_, i);
  });
  DensePointers pointers;
  const uint8_t* touch = touched.const_data_ptr<uint8_t>();
  for (size_t i : with_gaps_) {
    if (touch[i]) update_rows_[i].param = pointers.write(params_[i], static_[i].strides);
  }
  StepScalars scalars(rule_, hyper.const_data_ptr<double>());
  update_touched(chunks_, update_rows_, added, scalars, group_ids_, touched, steps_, !exp_avgs_.empty(), multiplier,
                 max_grad_value, next_steps_);
  pointers.finish();
  for_each_tensor(count, [&](size_t i) {
    if (touch[i] && !static_[i].has_gaps) bump_version(params_[i]);
  });
  store_steps(steps_, next_steps_);
}

void recorded_clip(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
                   const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
                   const at::Tensor& weight_sum, double norm_type, double max_norm) {
  RECORD_FUNCTION("gradacc_fused::clip_", {});
  clip_pass(partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum, norm_type, max_norm);
}

std::vector<at::Tensor> window_cells(bool wide) {
  constexpr int kCells = 5;
  constexpr int64_t kSlot = sizeof(double);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), kCells * kSlot,
                                                             c10::GetCPUAllocator(), /*resizable=*/false));
  const at::ScalarType norms = wide ? at::kDouble : at::kFloat;
  const at::ScalarType types[kCells] = {norms, norms, at::kDouble, at::kDouble, at::kFloat};
  std::vector<at::Tensor> cells;
  for (int k = 0; k < kCells; ++k) {
    const int64_t offset = k * kSlot / static_cast<int64_t>(c10::elementSize(types[k]));
    cells.push_back(at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(types[k])));
    cells.back().unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(), at::IntArrayRef(), offset);
  }
  return cells;
}

}  // namespace gradacc
