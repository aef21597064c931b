// The optimizer's own way into the CUDA passes. What the host decides (hyper-parameters, which parameters got a
// gradient) is copied to the device when it changes, so a usual window copies nothing and waits for nothing.
#pragma once

#include <map>
#include <vector>

#include "../static_lists.h"
#include "passes.h"

namespace gradacc::cuda {

// A small host array as it is on the device. It is copied when it changes, to the same address as long as its shape
// stays; what a captured launch reads is left alone, and the next copy lies elsewhere.
class Mirror {
 public:
  // late: places that the caller overwrites with values of the device's own.
  const at::Tensor& of(const at::Tensor& host, const Current& current, const StaticLists::Late& late = {});

 private:
  std::vector<char> known_;  // the array, and the places
  at::Tensor copy_;
  bool captured_ = false;
  std::vector<at::Tensor> for_graphs_;
};

class HotPath : public StaticLists {
 public:
  HotPath(std::vector<at::Tensor> params, at::Tensor group_ids, at::Device device);

  // As the methods of cpu/hot_path.h. All but hyper, touched, weights, counts and loss_scale lies on the device.
  void accumulate(const Pieces& pieces, const at::Tensor& weights, const at::Tensor& partials,
                  const at::Tensor& found_inf, bool overwrite, bool store, double norm_type);
  void norm(const at::Tensor& partials, const at::Tensor& found_inf, double norm_type);
  void clip(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
            const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
            const at::Tensor& weight_sum, double norm_type, double max_norm) const;
  void update(const Pieces& pieces, const at::Tensor& weights, bool stored, const at::Tensor& hyper, const Late& late,
              const at::Tensor& touched, const at::Tensor& multiplier, const at::Tensor& found_inf,
              double max_grad_value);

  std::vector<at::Tensor> window_cells(bool wide) const;

 private:
  const std::vector<const Source*>& take(const char* op, const Pieces& pieces, const at::Tensor& weights,
                                         const Current& current);
  void run_accumulate(const char* op, const Pieces& pieces, const at::Tensor& weights, const NormTensors& norm,
                      bool overwrite, bool store);

  Mirror groups_, hyper_, touched_;
  std::map<cudaStream_t, TableCache> tables_;
  at::Tensor no_weights_;
  // Of the pass that runs; kept for their memory.
  std::vector<AccumulateRow> accumulate_rows_;
  std::vector<UpdateRow> update_rows_;
};

}  // namespace gradacc::cuda
