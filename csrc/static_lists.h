// What the optimizer's own way into the passes (cpu/hot_path.h, cuda/hot_path.h) looks at once: parameters, main grads
// and state do not change from window to window, and gradients come as collected pieces. The registered ops run the
// same passes on lists that they check at every call; gradacc_fused/backends/ops_path.py is a hot path over those.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"
#include "dense.h"
#include "piece.h"
#include "update_row.h"

namespace gradacc {

class StaticLists {
 public:
  using Pieces = std::vector<std::shared_ptr<Piece>>;
  // Hyper-parameters that only the device knows: row, column, value.
  using Late = std::vector<std::tuple<int64_t, int64_t, at::Tensor>>;

  // params: the active parameters; group_ids: int32, the group of each; device: where all lists lie.
  StaticLists(std::vector<at::Tensor> params, at::Tensor group_ids, at::Device device)
      : device_(device), params_(std::move(params), "params"), group_ids_(std::move(group_ids)) {
    check_cells("HotPath", "group_ids", group_ids_, at::kInt, static_cast<int64_t>(params_.size()));
    for (size_t i = 0; i < params_.size(); ++i) {
      const at::Tensor& param = params_[i];
      check_device("HotPath", "params", i, param, device_);
      static_.push_back({param.sizes().vec(), dense_strides(param), element_dtype(param.scalar_type()),
                         param.scalar_type() == at::kDouble, !param.is_non_overlapping_and_dense()});
      numels_.push_back(param.numel());
      if (static_.back().has_gaps && param.numel() > 0) with_gaps_.push_back(i);
    }
  }

  // Each in its parameter's memory order and math dtype.
  void set_main_grads(std::vector<at::Tensor> main_grads) {
    check_list("main_grads", main_grads, false);
    main_grads_ = Located(std::move(main_grads), "main_grads");
  }

  // Empty lists where there are none; a main param without elements: the parameter itself is updated.
  void set_state(const std::string& rule, std::vector<at::Tensor> main_params, std::vector<at::Tensor> exp_avgs,
                 std::vector<at::Tensor> exp_avg_sqs, at::Tensor steps) {
    rule_ = parse_rule(rule);
    check_list("main_params", main_params, true);
    check_list("exp_avgs", exp_avgs, false);
    check_list("exp_avg_sqs", exp_avg_sqs, false);
    check_cells("HotPath", "steps", steps, at::kFloat, static_cast<int64_t>(params_.size()));
    check_lies_on("HotPath", "steps", steps, device_);
    main_params_ = Located(std::move(main_params), "main_params");
    exp_avgs_ = Located(std::move(exp_avgs), "exp_avgs");
    exp_avg_sqs_ = Located(std::move(exp_avg_sqs), "exp_avg_sqs");
    steps_ = std::move(steps);
  }

 protected:
  struct Static {
    std::vector<int64_t> sizes, strides;
    Dtype dtype;
    bool is_double;
    bool has_gaps;  // updated through a copy
  };

  size_t count() const { return params_.size(); }

  // Where the pieces' gradients lie.
  const std::vector<const Source*>& sources_of(const char* op, const Pieces& pieces, const at::Tensor& weights) {
    check_cells(op, "weights", weights, at::kDouble, static_cast<int64_t>(pieces.size()));
    sources_.clear();
    for (const auto& piece : pieces) {
      check_length(op, "grads", piece->sources.size(), count(), false);
      if (!piece->exclusive) piece->locate();  // somebody may have given a gradient other memory
      sources_.push_back(piece->sources.data());
    }
    return sources_;
  }

  void check_main_grads(const char* op, bool read, bool store) const {
    check_length(op, "main_grads", main_grads_.size(), count(), !read);
    TORCH_CHECK_VALUE(!store || main_grads_.size() == count(), op,
                      ": store=True needs main_grads to write to, got none.");
  }

  // Where the main grad of parameter i lies; looks it up anew where its memory was exchanged.
  void* main_grad(const char* op, size_t i) { return locate(op, main_grads_, i); }

  // Parameter i's row, its param left out where that has gaps.
  UpdateRow update_row(size_t i, bool stored) {
    const Static& fixed = static_[i];
    UpdateRow row;
    if (numels_[i] == 0) return row;
    if (stored) row.main_grad = main_grad("update_", i);
    if (!fixed.has_gaps) row.param = locate("update_", params_, i);
    row.main_param = locate("update_", main_params_, i);
    row.exp_avg = locate("update_", exp_avgs_, i);
    row.exp_avg_sq = locate("update_", exp_avg_sqs_, i);
    row.param_dtype = static_cast<int32_t>(fixed.dtype);
    row.is_double = fixed.is_double;
    return row;
  }

  // Fills in the parameters with gaps, as copies without. touch: one flag per parameter.
  template <typename Rows>
  void open_gaps(const uint8_t* touch, Rows& rows) {
    without_gaps_.resize(with_gaps_.size());
    for (size_t k = 0; k < with_gaps_.size(); ++k) {
      const at::Tensor& param = params_[with_gaps_[k]];
      at::Tensor& copy = without_gaps_[k];
      if (!copy.defined()) copy = at::empty_strided(param.sizes(), static_[with_gaps_[k]].strides, param.options());
      if (touch[with_gaps_[k]]) copy.copy_(param);
      rows[with_gaps_[k]].param = copy.mutable_data_ptr();
    }
  }

  // Copies those back that were written, and counts the others as written.
  void close_gaps(const uint8_t* touch) {
    for (size_t k = 0; k < with_gaps_.size(); ++k) {
      if (touch[with_gaps_[k]]) params_[with_gaps_[k]].copy_(without_gaps_[k]);
    }
    for_each_tensor(count(), [&](size_t i) {
      if (touch[i] && !static_[i].has_gaps) bump_version(params_[i]);
    });
  }

  static const at::Tensor& with_late(const at::Tensor& rows, const Late& late) {
    for (const auto& [row, column, value] : late)
      rows.select(0, row).select(0, column).copy_(value.detach().reshape(at::IntArrayRef()));
    return rows;
  }

  at::Device device_;
  Located params_;
  std::vector<Static> static_;
  std::vector<int64_t> numels_;
  std::vector<size_t> with_gaps_;
  std::vector<at::Tensor> without_gaps_;  // copies of those; they stay where they are
  at::Tensor group_ids_;
  Located main_grads_, main_params_, exp_avgs_, exp_avg_sqs_;
  at::Tensor steps_;
  Rule rule_ = Rule::kAdamW;

 private:
  void check_list(const char* name, const std::vector<at::Tensor>& list, bool may_be_absent) const {
    check_length("HotPath", name, list.size(), count(), true);
    for (size_t i = 0; i < list.size(); ++i) {
      if (may_be_absent && list[i].numel() == 0) continue;
      check_device("HotPath", name, i, list[i], device_);
      check_shape("HotPath", name, i, list[i], params_[i]);
      check_math_dtype("HotPath", name, i, list[i], static_[i].is_double ? at::kDouble : at::kFloat);
      TORCH_CHECK_VALUE(same_order(list[i], static_[i].strides), item_name("HotPath", name, i),
                        " must have the parameter's memory order (strides ", at::IntArrayRef(static_[i].strides),
                        "), got ", list[i].strides(), ".");
    }
  }

  void* locate(const char* op, Located& list, size_t i) {
    if (list.empty()) return nullptr;
    list.announce(i);
    return numels_[i] == 0 ? nullptr : list.write(op, i, static_[i].sizes, static_[i].strides, device_);
  }

  std::vector<const Source*> sources_;  // of the pass that runs; kept for its memory
};

// The scalar cells of a window in one allocation of five doubles: total_norm and clip_coef (float64 where wide, else
// float32), multiplier and weight_sum (float64), found_inf (float32).
inline std::vector<at::Tensor> cells_in(const c10::Storage& storage, c10::DispatchKey key, bool wide) {
  const at::ScalarType norms = wide ? at::kDouble : at::kFloat;
  const at::ScalarType types[] = {norms, norms, at::kDouble, at::kDouble, at::kFloat};
  std::vector<at::Tensor> cells;
  for (at::ScalarType type : types) {
    const int64_t offset = static_cast<int64_t>(cells.size() * sizeof(double) / c10::elementSize(type));
    cells.push_back(at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                             c10::scalarTypeToTypeMeta(type)));
    cells.back().unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(), at::IntArrayRef(), offset);
  }
  return cells;
}
constexpr int64_t kCellBytes = 5 * sizeof(double);

}  // namespace gradacc
