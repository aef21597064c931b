// The optimizer's own way into the CPU passes: a pass is one call whatever the number of tensors.
#pragma once

#include <vector>

#include "../static_lists.h"
#include "passes.h"

namespace gradacc {

class HotPath : public StaticLists {
 public:
  HotPath(std::vector<at::Tensor> params, at::Tensor group_ids, at::Device device);

  // accumulate_ and norm_ over the main grads and the pieces; see gradacc_fused/accumulate.py and clip.py.
  void accumulate(const Pieces& pieces, const at::Tensor& weights, const at::Tensor& partials,
                  const at::Tensor& found_inf, bool overwrite, bool store, double norm_type);
  void norm(const at::Tensor& partials, const at::Tensor& found_inf, double norm_type);
  void clip(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
            const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
            const at::Tensor& weight_sum, double norm_type, double max_norm) const;
  // update_ over the main grads (if stored) and the pieces; see gradacc_fused/update.py.
  void update(const Pieces& pieces, const at::Tensor& weights, bool stored, const at::Tensor& hyper, const Late& late,
              const at::Tensor& touched, const at::Tensor& multiplier, const at::Tensor& found_inf,
              double max_grad_value);

  std::vector<at::Tensor> window_cells(bool wide) const;

 private:
  Gradients take(const char* op, const Pieces& pieces, const at::Tensor& weights);
  void run_accumulate(const char* op, const Gradients& added, const at::Tensor& partials, const at::Tensor& found_inf,
                      bool overwrite, bool store, double norm_type);

  Chunks chunks_;
  // Of the pass that runs; kept for their memory.
  std::vector<AccumulateRow> accumulate_rows_;
  std::vector<StepRow> update_rows_;
  std::vector<float> next_steps_;
};

}  // namespace gradacc
