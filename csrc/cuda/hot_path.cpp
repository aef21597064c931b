#include "hot_path.h"

#include <ATen/record_function.h>

#include "ops.h"

namespace gradacc::cuda {

const at::Tensor& Mirror::of(const at::Tensor& host, const Current& current, const StaticLists::Late& late) {
  const char* data = static_cast<const char*>(host.const_data_ptr());
  std::vector<char> wanted(data, data + host.nbytes());
  for (const auto& [row, column, value] : late) {  // the copy has other values there
    for (int64_t place : {row, column}) {
      const char* bytes = reinterpret_cast<const char*>(&place);
      wanted.insert(wanted.end(), bytes, bytes + sizeof(place));
    }
  }
  const bool same_shape = copy_.defined() && copy_.sizes() == host.sizes();
  const bool capturing = is_capturing(current.stream.stream());
  if (!same_shape || wanted != known_) {
    TORCH_CHECK(
        !capturing,
        "step: hyper-parameters or the set of parameters with gradients changed, and a CUDA graph is captured. ",
        "Run one window with the same ones before the capture; give a changing lr as a CUDA tensor.");
    known_.clear();
    if (!same_shape || captured_) copy_ = at::empty(host.sizes(), host.options().device(current.device));
    captured_ = false;
    // The copy is made later, from pinned memory that torch keeps until then.
    const bool pinned = current.device.is_cuda();
    const at::Tensor staged = pinned ? at::empty(host.sizes(), host.options().pinned_memory(true)).copy_(host) : host;
    copy_.copy_(staged, /*non_blocking=*/true);
    known_ = std::move(wanted);
  }
  if (capturing && !captured_) {
    captured_ = true;
    for_graphs_.push_back(copy_);
  }
  return copy_;
}

HotPath::HotPath(std::vector<at::Tensor> params, at::Tensor group_ids, at::Device device)
    : StaticLists(std::move(params), std::move(group_ids), device), no_weights_(at::empty({0}, at::kDouble)) {
  TORCH_CHECK_VALUE(device.type() == GRADACC_DEVICE_TYPE, "HotPath: device must be one of CUDA's, got ", device.str(),
                    ".");
}

const std::vector<const Source*>& HotPath::take(const char* op, const Pieces& pieces, const at::Tensor& weights,
                                                const Current& current) {
  TORCH_CHECK_VALUE(may_lie(weights, device_), op, ": weights must be on ", device_.str(), " or on cpu, got ",
                    weights.device().str(), ".");
  const auto& sources = sources_of(op, pieces, weights);
  for (const auto& piece : pieces) {
    const void* stream = current.stream.stream();
    const bool kept = piece->exclusive && piece->kept && piece->kept_for == stream;
    for (size_t k = 0; !kept && k < piece->grads.size(); ++k) {
      if (piece->sources[k].data) keep_for_stream(piece->grads[k], current.stream);
    }
    piece->kept = true;
    piece->kept_for = stream;
  }
  return sources;
}

void HotPath::run_accumulate(const char* op, const Pieces& pieces, const at::Tensor& weights, const NormTensors& norm,
                             bool overwrite, bool store) {
  const Current current(device_);
  const SourceTable sources(op, take(op, pieces, weights, current), count(), weights, current);
  check_main_grads(op, !overwrite, store);
  accumulate_rows_.resize(count());
  for_each_tensor(count(), [&](size_t i) {
    accumulate_rows_[i] = {overwrite && !store ? nullptr : main_grad(op, i), static_[i].is_double};
  });
  enqueue_accumulate(op, current, tables_[current.stream.stream()], {numels_, accumulate_rows_}, sources, norm,
                     !overwrite, store);
}

void HotPath::accumulate(const Pieces& pieces, const at::Tensor& weights, const at::Tensor& partials,
                         const at::Tensor& found_inf, bool overwrite, bool store, double norm_type) {
  RECORD_FUNCTION("gradacc_fused::accumulate_", {});
  run_accumulate("accumulate_", pieces, weights, {partials, found_inf, norm_type}, overwrite, store);
}

void HotPath::norm(const at::Tensor& partials, const at::Tensor& found_inf, double norm_type) {
  RECORD_FUNCTION("gradacc_fused::norm_", {});
  run_accumulate("norm_", {}, no_weights_, {partials, found_inf, norm_type}, /*overwrite=*/false, /*store=*/false);
}

void HotPath::clip(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
                   const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
                   const at::Tensor& weight_sum, double norm_type, double max_norm) const {
  RECORD_FUNCTION("gradacc_fused::clip_", {});
  clip_op(partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum, norm_type, max_norm);
}

void HotPath::update(const Pieces& pieces, const at::Tensor& weights, bool stored, const at::Tensor& hyper,
                     const Late& late, const at::Tensor& touched, const at::Tensor& multiplier,
                     const at::Tensor& found_inf, double max_grad_value) {
  RECORD_FUNCTION("gradacc_fused::update_", {});
  TORCH_CHECK_VALUE(steps_.defined(), "update_: the state is not set.");
  check_update_cells(steps_, group_ids_, touched, hyper, multiplier, found_inf, static_cast<int64_t>(count()),
                     max_grad_value);
  if (count() == 0) return;
  const Current current(device_);
  const SourceTable sources("update_", take("update_", pieces, weights, current), count(), weights, current);
  check_main_grads("update_", stored, false);
  update_rows_.resize(count());
  for_each_tensor(count(), [&](size_t i) { update_rows_[i] = update_row(i, stored); });
  const uint8_t* touch = touched.const_data_ptr<uint8_t>();
  open_gaps(touch, update_rows_);
  const at::Tensor& rows = with_late(hyper_.of(hyper, current, late), late);
  enqueue_update(current, tables_[current.stream.stream()], rule_, {numels_, update_rows_}, sources,
                 {rows, groups_.of(group_ids_, current), touched_.of(touched, current), steps_, multiplier, found_inf,
                  max_grad_value},
                 !exp_avgs_.empty());
  close_gaps(touch);
}

std::vector<at::Tensor> HotPath::window_cells(bool wide) const {
  const at::Tensor memory = at::empty({kCellBytes}, at::TensorOptions(device_).dtype(at::kByte));
  return cells_in(memory.storage(), c10::computeDispatchKey(std::nullopt, std::nullopt, device_), wide);
}

}  // namespace gradacc::cuda
