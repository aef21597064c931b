// The norm's output cells, filled chunk by chunk: used by accumulate_ (closing flush) and norm_ (a pass of its own).
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <limits>

#include "../checks.h"
#include "../dense.h"
#include "tile.h"

namespace gradacc {

class NormCells {
 public:
  // partials: float64, one per chunk or more (the rest is zeroed); no elements: no norm is taken.
  NormCells(const char* op, const at::Tensor& partials, const at::Tensor& found_inf, double norm_type, size_t chunks)
      : wanted_(partials.numel() > 0), partials_(partials), found_inf_(found_inf) {
    check_norm_type(op, norm_type);
    kind_ = kind_of(norm_type);
    if (!wanted_) return;
    check_cells(op, "partials", partials, at::kDouble, static_cast<int64_t>(chunks));
    check_cell(op, "found_inf", found_inf);
  }

  double* partial(int64_t chunk) const { return wanted_ ? partials_.mutable_data_ptr<double>() + chunk : nullptr; }
  NormKind kind() const { return kind_; }
  std::atomic<int>* nonfinite() { return &nonfinite_; }

  void finish(size_t chunks) {
    if (!wanted_) return;
    double* partials = partials_.mutable_data_ptr<double>();
    for (int64_t k = static_cast<int64_t>(chunks); k < partials_.numel(); ++k) partials[k] = 0.0;
    set_cell(found_inf_, nonfinite_.load() != 0 ? 1.0 : 0.0);
    bump_version(partials_);
  }

  static void set_cell(const at::Tensor& cell, double value) {
    if (cell.scalar_type() == at::kDouble) {
      *cell.mutable_data_ptr<double>() = value;
    } else {
      *cell.mutable_data_ptr<float>() = static_cast<float>(value);
    }
    bump_version(cell);
  }

 private:
  bool wanted_;
  at::Tensor partials_;
  at::Tensor found_inf_;
  NormKind kind_ = NormKind::kTwo;
  std::atomic<int> nonfinite_{0};
};

}  // namespace gradacc
