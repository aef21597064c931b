// update_: the accumulated gradient times the multiplier, clipped by value, into parameters and state, in one pass.
// Bytes per element (AdamW, bf16 parameter): reads the gradient, 12 of main param and moments; writes 12 + 2.
// A step whose found_inf is set or whose multiplier is not finite writes nothing, step counts included.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

#include "gradients.h"
#include "isa.h"
#include "norm.h"

namespace gradacc {
namespace {

struct UpdateTensor {
  bool is_double = false;
  Rule rule = Rule::kAdamW;
  Gradient gradient;
  void* param = nullptr;
  Dtype param_dtype = Dtype::kFloat32;
  void* main_param = nullptr;  // Math[], or nullptr: the parameter itself is read and written
  void* exp_avg = nullptr;     // Math[]; sgd: momentum buffer
  void* exp_avg_sq = nullptr;  // Math[]
  RuleScalars<float> scalars;
  RuleScalars<double> double_scalars;

  template <typename Math>
  GRADACC_INLINE const RuleScalars<Math>& scalars_of() const {
    if constexpr (sizeof(Math) == sizeof(double)) {
      return double_scalars;
    } else {
      return scalars;
    }
  }
};

struct UpdateArgs {
  const UpdateTensor* tensor = nullptr;
  int64_t start = 0;
  int64_t numel = 0;
  double multiplier = 1.0;
  double max_grad_value = 0.0;
};

template <typename Math>
GRADACC_INLINE void scale_and_clamp(Math* grad, int64_t n, Math multiplier, Math bound) {
  for (int64_t i = 0; i < n; ++i) {
    Math value = grad[i] * multiplier;
    value = value > bound ? bound : value;
    grad[i] = value < -bound ? -bound : value;
  }
}

template <typename Math>
GRADACC_INLINE void update_chunk(const UpdateArgs& args) {
  const UpdateTensor& tensor = *args.tensor;
  const RuleScalars<Math> scalars = tensor.scalars_of<Math>();
  alignas(64) Math grad[kTile];
  alignas(64) Math param[kTile];
  for_tiles(args.start, args.numel, [&](int64_t start, int64_t n) __attribute__((always_inline)) {
    gather_tile(grad, tensor.gradient, start, n);
    scale_and_clamp(grad, n, static_cast<Math>(args.multiplier), static_cast<Math>(args.max_grad_value));
    Math* main_param = tensor.main_param ? static_cast<Math*>(tensor.main_param) + start : nullptr;
    if (main_param) {
      load_elements(param, main_param, n);
    } else {
      load_tile(param, tensor.param, tensor.param_dtype, start, n);
    }
    if (tensor.rule == Rule::kSgd) {
      if (tensor.exp_avg && scalars.momentum != Math(0)) {
        Math* momentum_buffer = static_cast<Math*>(tensor.exp_avg) + start;
        for (int64_t i = 0; i < n; ++i) sgd_momentum(param[i], grad[i], momentum_buffer[i], scalars);
      } else {
        for (int64_t i = 0; i < n; ++i) sgd(param[i], grad[i], scalars);
      }
    } else {
      Math* exp_avg = static_cast<Math*>(tensor.exp_avg) + start;
      Math* exp_avg_sq = static_cast<Math*>(tensor.exp_avg_sq) + start;
      for (int64_t i = 0; i < n; ++i) adam(param[i], grad[i], exp_avg[i], exp_avg_sq[i], scalars);
    }
    if (main_param) store_elements(main_param, param, n);
    store_tile(tensor.param, tensor.param_dtype, start, param, n);
  });
}

GRADACC_INLINE void update_any(const UpdateArgs& args) {
  if (args.tensor->is_double) {
    update_chunk<double>(args);
  } else {
    update_chunk<float>(args);
  }
}

void update_plain(const UpdateArgs& args) { update_any(args); }
GRADACC_TARGET_AVX2 void update_avx2(const UpdateArgs& args) { update_any(args); }
GRADACC_TARGET_AVX512 void update_avx512(const UpdateArgs& args) { update_any(args); }
constexpr IsaLoops<UpdateArgs> kUpdate{update_plain, update_avx2, update_avx512};

Rule parse_rule(c10::string_view rule) {
  if (rule == "adamw") return Rule::kAdamW;
  if (rule == "adam") return Rule::kAdam;
  TORCH_CHECK_VALUE(rule == "sgd", "update_: rule must be adamw, adam or sgd, got '", std::string(rule), "'.");
  return Rule::kSgd;
}

void update_cpu(at::TensorList params, at::TensorList main_params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                const at::Tensor& steps, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                const at::Tensor& hyper, const at::Tensor& group_ids, const at::Tensor& touched,
                const at::Tensor& multiplier, const at::Tensor& found_inf, c10::string_view rule_name,
                double max_grad_value) {
  const Rule rule = parse_rule(rule_name);
  const int64_t count = static_cast<int64_t>(params.size());
  check_length("update_", "main_params", main_params.size(), count, true);
  check_length("update_", "exp_avgs", exp_avgs.size(), count, rule == Rule::kSgd);
  check_length("update_", "exp_avg_sqs", exp_avg_sqs.size(), rule == Rule::kSgd ? 0 : count, false);
  check_cells("update_", "steps", steps, at::kFloat, count);
  check_cells("update_", "group_ids", group_ids, at::kInt, count);
  check_cells("update_", "touched", touched, at::kByte, count);
  check_cells("update_", "hyper", hyper, at::kDouble, 0);
  TORCH_CHECK_VALUE(hyper.dim() == 2 && hyper.size(1) == kHyperColumns, "update_: hyper must have shape [groups, ",
                    static_cast<int>(kHyperColumns), "], got ", hyper.sizes(), ". Build it with hyper_rows().");
  TORCH_CHECK_VALUE(max_grad_value > 0.0, "update_: max_grad_value must be positive (inf: none), got ", max_grad_value,
                    ".");
  check_cell("update_", "multiplier", multiplier);
  check_cell("update_", "found_inf", found_inf);

  DensePointers pointers;
  GradientArguments arguments =
      gradient_arguments("update_", main_grads, grads, weights, pointers, !main_grads.empty(), &params);
  float* step = steps.mutable_data_ptr<float>();
  const int32_t* group = group_ids.const_data_ptr<int32_t>();
  const uint8_t* touch = touched.const_data_ptr<uint8_t>();
  const double* rows = hyper.const_data_ptr<double>();

  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_TYPE(is_gradient_dtype(params[i].scalar_type()), item_name("update_", "params", i),
                     " must be float32, float64, float16 or bfloat16, got ", dtype_name(params[i].scalar_type()), ".");
    TORCH_CHECK_VALUE(group[i] >= 0 && group[i] < hyper.size(0), item_name("update_", "group_ids", i),
                      " must name a row of hyper (", hyper.size(0), " rows), got ", group[i], ".");
    const auto math = arguments.is_double[i] ? at::kDouble : at::kFloat;
    for (auto [name, list] : {std::pair<const char*, at::TensorList>{"main_params", main_params},
                              {"exp_avgs", exp_avgs},
                              {"exp_avg_sqs", exp_avg_sqs}}) {
      if (list.empty() || (list[i].numel() == 0 && std::string(name) == "main_params")) continue;
      check_cpu("update_", name, i, list[i]);
      check_shape("update_", name, i, list[i], params[i]);
      check_math_dtype("update_", name, i, list[i], math);
    }
  }

  const double factor = NormCells::get_cell(multiplier);
  if (NormCells::get_cell(found_inf) != 0.0 || !std::isfinite(factor)) return;

  std::vector<UpdateTensor> tensors(count);
  std::vector<float> next_steps(step, step + count);
  for (int64_t i = 0; i < count; ++i) {
    if (!touch[i]) {
      arguments.numels[i] = 0;
      continue;
    }
    UpdateTensor& tensor = tensors[i];
    const double* row = rows + group[i] * kHyperColumns;
    // sgd counts the updates of its momentum buffer, so that the first one is known.
    const bool counts = rule != Rule::kSgd || (!exp_avgs.empty() && row[kMomentum] != 0.0);
    const float next_step = counts ? step[i] + 1.0f : step[i];
    next_steps[i] = next_step;
    tensor.is_double = arguments.is_double[i];
    tensor.rule = rule;
    tensor.gradient = arguments.gradients[i];
    if (tensor.is_double) {
      tensor.double_scalars = rule_scalars<double>(rule, row, next_step);
    } else {
      tensor.scalars = rule_scalars<float>(rule, row, next_step);
    }
    if (arguments.numels[i] == 0) continue;
    const auto& strides = arguments.strides[i];
    tensor.param = pointers.write(params[i], strides);
    tensor.param_dtype = element_dtype(params[i].scalar_type());
    if (!main_params.empty() && main_params[i].numel() > 0) {
      tensor.main_param = pointers.write(main_params[i], strides);
    }
    if (!exp_avgs.empty()) tensor.exp_avg = pointers.write(exp_avgs[i], strides);
    if (!exp_avg_sqs.empty()) tensor.exp_avg_sq = pointers.write(exp_avg_sqs[i], strides);
  }
  const std::vector<Chunk> chunks = chunk_table(arguments.numels);
  for_chunks(chunks, [&](int64_t k) {
    UpdateArgs args;
    args.tensor = &tensors[chunks[k].tensor];
    args.start = chunks[k].start;
    args.numel = chunks[k].numel;
    args.multiplier = factor;
    args.max_grad_value = max_grad_value;
    kUpdate(args);
  });
  pointers.finish();
  std::copy(next_steps.begin(), next_steps.end(), step);
  if (!steps.is_inference()) steps.unsafeGetTensorImpl()->bump_version();
}

}  // namespace
}  // namespace gradacc

TORCH_LIBRARY_IMPL(gradacc_fused, CPU, library) { library.impl("update_", gradacc::update_cpu); }
