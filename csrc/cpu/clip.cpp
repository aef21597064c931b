// clip_: partials -> total_norm, clip_coef and the one multiplier that the update applies.
#include <ATen/core/Tensor.h>

#include "../norm_math.h"
#include "passes.h"

namespace gradacc {
namespace {

double fold_partials(const at::Tensor& partials, NormKind kind) {
  const double* values = partials.const_data_ptr<double>();
  double folded = 0.0;
  for (int64_t k = 0; k < partials.numel(); ++k) folded = with_part(folded, values[k], kind);
  return folded;
}

}  // namespace

void clip_pass(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
               const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
               const at::Tensor& weight_sum, double norm_type, double max_norm) {
  check_clip(partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum, norm_type, max_norm);
  double sum = 0.0;
  const double* count = counts.const_data_ptr<double>();
  for (int64_t j = 0; j < counts.numel(); ++j) sum += count[j];
  const NormKind kind = kind_of(norm_type);
  const Clip clip = clip_of(fold_partials(partials, kind), kind, sum * host_cell(loss_scale), max_norm);
  NormCells::set_cell(total_norm, clip.norm);
  NormCells::set_cell(clip_coef, clip.coefficient);
  NormCells::set_cell(multiplier, clip.multiplier);
  NormCells::set_cell(weight_sum, sum);
}

}  // namespace gradacc
