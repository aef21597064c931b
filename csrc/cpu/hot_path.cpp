#include "hot_path.h"

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

namespace gradacc {

HotPath::HotPath(std::vector<at::Tensor> params, at::Tensor group_ids, at::Device device)
    : StaticLists(std::move(params), std::move(group_ids), device), chunks_(numels_) {
  TORCH_CHECK_VALUE(device.is_cpu(), "HotPath: device must be cpu, got ", device.str(), ".");
}

Gradients HotPath::take(const char* op, const Pieces& pieces, const at::Tensor& weights) {
  const auto& sources = sources_of(op, pieces, weights);
  return {sources.data(), weights.const_data_ptr<double>(), static_cast<int64_t>(pieces.size())};
}

void HotPath::run_accumulate(const char* op, const Gradients& added, const at::Tensor& partials,
                             const at::Tensor& found_inf, bool overwrite, bool store, double norm_type) {
  check_main_grads(op, !overwrite, store);
  NormCells cells(op, partials, found_inf, norm_type, chunks_.size());
  accumulate_rows_.resize(count());
  for_each_tensor(count(), [&](size_t i) {
    void* place = overwrite && !store ? nullptr : main_grad(op, i);
    accumulate_rows_[i] = {overwrite ? nullptr : place, store ? place : nullptr, static_[i].is_double};
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

void HotPath::clip(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
                   const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
                   const at::Tensor& weight_sum, double norm_type, double max_norm) const {
  RECORD_FUNCTION("gradacc_fused::clip_", {});
  clip_pass(partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum, norm_type, max_norm);
}

void HotPath::update(const Pieces& pieces, const at::Tensor& weights, bool stored, const at::Tensor& hyper,
                     const Late& late, const at::Tensor& touched, const at::Tensor& multiplier,
                     const at::Tensor& found_inf, double max_grad_value) {
  RECORD_FUNCTION("gradacc_fused::update_", {});
  TORCH_CHECK_VALUE(steps_.defined(), "update_: the state is not set.");
  check_update_cells(steps_, group_ids_, touched, hyper, multiplier, found_inf, static_cast<int64_t>(count()),
                     max_grad_value);
  if (!step_applies(multiplier, found_inf)) return;

  const Gradients added = take("update_", pieces, weights);
  check_main_grads("update_", stored, false);
  update_rows_.resize(count());
  for_each_tensor(count(), [&](size_t i) { update_rows_[i] = {update_row(i, stored)}; });
  const uint8_t* touch = touched.const_data_ptr<uint8_t>();
  open_gaps(touch, update_rows_);
  StepScalars scalars(rule_, with_late(hyper, late).const_data_ptr<double>());
  update_touched(chunks_, update_rows_, added, scalars, group_ids_, touched, steps_, !exp_avgs_.empty(), multiplier,
                 max_grad_value, next_steps_);
  close_gaps(touch);
  store_steps(steps_, next_steps_);
}

std::vector<at::Tensor> HotPath::window_cells(bool wide) const {
  const c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), kCellBytes,
                                                                   c10::GetCPUAllocator(), /*resizable=*/false));
  return cells_in(storage, c10::DispatchKey::CPU, wide);
}

}  // namespace gradacc
