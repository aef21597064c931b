// clip_: partials -> total_norm, clip_coef and the one multiplier that the update applies.
#include <ATen/core/Tensor.h>

#include <cmath>

#include "passes.h"

namespace gradacc {
namespace {

double fold_partials(const at::Tensor& partials, bool two) {
  const double* values = partials.const_data_ptr<double>();
  double folded = 0.0;
  for (int64_t k = 0; k < partials.numel(); ++k) {
    if (two) {
      folded += values[k];
    } else if (!(values[k] <= folded)) {
      folded = values[k];  // larger, or NaN
    }
    if (std::isnan(folded)) break;
  }
  return two ? std::sqrt(folded) : folded;
}

}  // namespace

void clip_pass(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
               const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
               const at::Tensor& weight_sum, double norm_type, double max_norm) {
  check_norm_type("clip_", norm_type);
  TORCH_CHECK_VALUE(max_norm > 0.0, "clip_: max_norm must be positive (inf: no clipping), got ", max_norm, ".");
  check_cells("clip_", "partials", partials, at::kDouble, 0);
  check_cells("clip_", "counts", counts, at::kDouble, 0);
  check_cell("clip_", "loss_scale", loss_scale);
  check_cell("clip_", "total_norm", total_norm);
  check_cell("clip_", "clip_coef", clip_coef);
  check_cell("clip_", "multiplier", multiplier);
  check_cell("clip_", "weight_sum", weight_sum);

  double sum = 0.0;
  const double* count = counts.const_data_ptr<double>();
  for (int64_t j = 0; j < counts.numel(); ++j) sum += count[j];
  const double denominator = sum * NormCells::get_cell(loss_scale);
  const double folded = fold_partials(partials, norm_type == 2.0);
  const double norm = denominator == 0.0 ? 0.0 : folded / std::fabs(denominator);
  const double coefficient = norm > 0.0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
  const double factor = coefficient / denominator;
  const bool norm_usable = !std::isfinite(max_norm) || std::isfinite(norm);
  // The update's math may be fp32: a factor beyond it would not be finite there.
  const bool usable = norm_usable && std::isfinite(denominator) && std::isfinite(static_cast<float>(factor));
  NormCells::set_cell(total_norm, norm);
  NormCells::set_cell(clip_coef, coefficient);
  NormCells::set_cell(multiplier, usable ? factor : std::nan(""));
  NormCells::set_cell(weight_sum, sum);
}

}  // namespace gradacc
