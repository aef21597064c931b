// The optimizer's own way into the passes: everything that does not change from window to window is looked at once,
// and gradients come as collected pieces, so that a pass is one call whatever the number of tensors. The registered ops
// (ops.cpp) run the same passes on lists. backends/passes.py holds the same class over those ops.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "../collector.h"
#include "../dense.h"
#include "passes.h"

namespace gradacc {

class HotPath {
 public:
  using Pieces = std::vector<std::shared_ptr<Piece>>;

  // params: the active parameters; group_ids: int32, the group of each.
  HotPath(std::vector<at::Tensor> params, at::Tensor group_ids);

  // Each in its parameter's memory order and math dtype.
  void set_main_grads(std::vector<at::Tensor> main_grads);
  // Empty lists where there are none; a main param without elements: the parameter itself is updated.
  void set_state(const std::string& rule, std::vector<at::Tensor> main_params, std::vector<at::Tensor> exp_avgs,
                 std::vector<at::Tensor> exp_avg_sqs, at::Tensor steps);

  // accumulate_ and norm_ over the main grads and the pieces; see gradacc_fused/accumulate.py and clip.py.
  void accumulate(const Pieces& pieces, const at::Tensor& weights, const at::Tensor& partials,
                  const at::Tensor& found_inf, bool overwrite, bool store, double norm_type);
  void norm(const at::Tensor& partials, const at::Tensor& found_inf, double norm_type);
  // update_ over the main grads (if stored) and the pieces; see gradacc_fused/update.py.
  void update(const Pieces& pieces, const at::Tensor& weights, bool stored, const at::Tensor& hyper,
              const at::Tensor& touched, const at::Tensor& multiplier, const at::Tensor& found_inf,
              double max_grad_value);

 private:
  struct Static {
    std::vector<int64_t> sizes, strides;
    int64_t numel;
    Dtype dtype;
    bool is_double;
    bool has_gaps;  // updated through a copy
  };

  void check_list(const char* name, const std::vector<at::Tensor>& list, bool may_be_absent) const;
  void* locate(const char* op, Located& list, size_t i) {
    if (list.empty()) return nullptr;
    list.announce(i);
    return static_[i].numel == 0 ? nullptr : list.write(op, i, static_[i].sizes, static_[i].strides);
  }
  // The pieces as one pass reads them.
  Gradients take(const char* op, const Pieces& pieces, const at::Tensor& weights);
  void run_accumulate(const char* op, const Gradients& added, const at::Tensor& partials, const at::Tensor& found_inf,
                      bool overwrite, bool store, double norm_type);

  Located params_;
  std::vector<Static> static_;
  std::vector<size_t> with_gaps_;
  Chunks chunks_;
  at::Tensor group_ids_;
  Located main_grads_, main_params_, exp_avgs_, exp_avg_sqs_;
  at::Tensor steps_;
  Rule rule_ = Rule::kAdamW;
  // Of the pass that runs; kept for their memory.
  std::vector<const Source*> sources_;
  std::vector<AccumulateRow> accumulate_rows_;
  std::vector<UpdateRow> update_rows_;
  std::vector<float> next_steps_;
};

// clip_ as the optimizer's own path calls it.
void recorded_clip(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
                   const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
                   const at::Tensor& weight_sum, double norm_type, double max_norm);

// The scalar cells of a window in one allocation: total_norm and clip_coef (float64 where wide, else float32),
// multiplier and weight_sum (float64), found_inf (float32).
std::vector<at::Tensor> window_cells(bool wide);

}  // namespace gradacc
