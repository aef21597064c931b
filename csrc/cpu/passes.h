// The passes over all tensors of a list: what the registered ops run once their arguments are checked, and what the
// optimizer's own path (hot_path.h) enters directly.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../element.h"
#include "../update_math.h"
#include "../update_row.h"
#include "chunks.h"
#include "gather.h"
#include "norm.h"
#include "simd.h"

namespace gradacc {

GRADACC_INLINE void prefetch(const Gradients& added, int64_t tensor, int64_t start, int64_t n) {
  for (int64_t j = 0; j < added.m; ++j) {
    const Source& source = added.sources[j][tensor];
    prefetch(source.data, start, n, element_bytes(source.dtype));
  }
}

// The hardware reads ahead in long arrays. In short ones it has hardly begun when they end: those are asked for some
// chunks ahead.
constexpr int64_t kShort = 1024, kChunksAhead = 4;

struct AccumulateRow {
  const void* main_grad = nullptr;  // Math[], or nullptr: the sum starts from zero
  void* stored = nullptr;           // Math[], or nullptr: the sum is not stored
  bool is_double = false;           // math dtype
};

GRADACC_INLINE void prefetch(const AccumulateRow& row, int64_t start, int64_t n) {
  prefetch(row.main_grad, start, n, row.is_double ? sizeof(double) : sizeof(float));
}

// rows: one per tensor. Chunk k's norm goes to the cells' partial k, where a norm is wanted.
void accumulate_pass(const Chunks& chunks, const std::vector<AccumulateRow>& rows, const Gradients& added,
                     NormCells& cells);

// A row whose param is nullptr is not touched in this window.
struct StepRow : UpdateRow {
  int32_t scalars = 0;  // index
};

GRADACC_INLINE void prefetch(const UpdateRow& row, int64_t start, int64_t n) {
  if (!row.param) return;
  const int64_t math_bytes = row.is_double ? sizeof(double) : sizeof(float);
  prefetch(row.main_grad, start, n, math_bytes);
  prefetch(row.main_param, start, n, math_bytes);
  prefetch(row.exp_avg, start, n, math_bytes);
  prefetch(row.exp_avg_sq, start, n, math_bytes);
  prefetch(row.param, start, n, element_bytes(static_cast<Dtype>(row.param_dtype)));
}

template <typename Rows>
GRADACC_INLINE void prefetch_ahead(const Chunks& chunks, int64_t k, const Rows& rows, const Gradients& added) {
  if (k + kChunksAhead >= static_cast<int64_t>(chunks.size())) return;
  const Chunk& chunk = chunks[k + kChunksAhead];
  if (chunk.numel >= kShort) return;
  prefetch(rows[chunk.tensor], chunk.start, chunk.numel);
  prefetch(added, chunk.tensor, chunk.start, chunk.numel);
}

// Step counts, and the scalars that follow from them: computed once for all tensors of a group with the same step.
class StepScalars {
 public:
  // rows: hyper-parameter rows [groups, kHyperColumns].
  StepScalars(Rule rule, const double* rows) : rule_(rule), rows_(rows) {}

  // Advances the step of a touched tensor; returns the index of its scalars. with_buffer: it has a momentum buffer.
  int32_t advance(int32_t group, float& step, bool with_buffer) {
    const double* row = rows_ + group * kHyperColumns;
    if (step_counts(rule_, row, with_buffer)) step += 1.0f;
    if (narrow_.empty() || group != group_ || step != step_) {
      narrow_.push_back(rule_scalars<float>(rule_, row, step));
      wide_.push_back(rule_scalars<double>(rule_, row, step));
      group_ = group;
      step_ = step;
    }
    return static_cast<int32_t>(narrow_.size()) - 1;
  }

  Rule rule() const { return rule_; }
  template <typename Math>
  const RuleScalars<Math>& of(int32_t index) const {
    if constexpr (sizeof(Math) == sizeof(double)) {
      return wide_[index];
    } else {
      return narrow_[index];
    }
  }

 private:
  Rule rule_;
  const double* rows_;
  int32_t group_ = -1;
  float step_ = 0.0f;
  std::vector<RuleScalars<float>> narrow_;
  std::vector<RuleScalars<double>> wide_;
};

// multiplier: finite; multiplies the gradient. max_grad_value: bound of its elements after that, inf for none.
void update_pass(const Chunks& chunks, const std::vector<StepRow>& rows, const Gradients& added,
                 const StepScalars& scalars, double multiplier, double max_grad_value);

// Whether a step may write anything: no gradient was found not finite, and the multiplier is.
inline bool step_applies(const at::Tensor& multiplier, const at::Tensor& found_inf) {
  return host_cell(found_inf) == 0.0 && std::isfinite(host_cell(multiplier));
}

// The update of a step that applies: counts it for the touched tensors, then runs the pass.
// rows: filled but for their scalars; those of other tensors lose their parameter. next_steps: gets the steps to store
// once everything is written.
inline void update_touched(const Chunks& chunks, std::vector<StepRow>& rows, const Gradients& added,
                           StepScalars& scalars, const at::Tensor& group_ids, const at::Tensor& touched,
                           const at::Tensor& steps, bool with_buffer, const at::Tensor& multiplier,
                           double max_grad_value, std::vector<float>& next_steps) {
  const float* step = steps.const_data_ptr<float>();
  const int32_t* group = group_ids.const_data_ptr<int32_t>();
  const uint8_t* touch = touched.const_data_ptr<uint8_t>();
  next_steps.assign(step, step + rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (touch[i]) {
      rows[i].scalars = scalars.advance(group[i], next_steps[i], with_buffer);
    } else {
      rows[i].param = nullptr;
    }
  }
  update_pass(chunks, rows, added, scalars, host_cell(multiplier), max_grad_value);
}

inline void store_steps(const at::Tensor& steps, const std::vector<float>& next_steps) {
  std::copy(next_steps.begin(), next_steps.end(), steps.mutable_data_ptr<float>());
  bump_version(steps);
}

// clip_: folds the partials; writes the cells.
void clip_pass(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
               const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
               const at::Tensor& weight_sum, double norm_type, double max_norm);

}  // namespace gradacc
