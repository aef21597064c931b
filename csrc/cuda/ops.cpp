#include "ops.h"

#include <vector>

#include "../gradients.h"
#include "passes.h"

namespace gradacc::cuda {
namespace {

void check_lies(const char* op, const char* name, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK_VALUE(may_lie(tensor, device), op, ": ", name, " must be on ", device.str(), " or on cpu, got ",
                    tensor.device().str(), ".");
}

// A small array on the device. One that lies on the host is copied, and kept alive by the stream's own order.
at::Tensor on_device(const char* op, const char* name, const at::Tensor& tensor, const Current& current) {
  check_lies(op, name, tensor, current.device);
  if (!lies_on_host(tensor)) return tensor;
  const cudaStream_t stream = current.stream.stream();
  check_not_capturing(op, std::string(name) + " lies on the host, and would be copied", stream);
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options().device(current.device));
  if (tensor.numel() == 0) return copy;
  check_cuda(op, cudaMemcpyAsync(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes(),
                                 cudaMemcpyHostToDevice, stream));
  return copy;
}

// Those that the launch reads are not given to somebody else before it is done.
void keep(const SourceTable& sources, at::TensorList grads, const Current& current) {
  const size_t tensors = sources.args().tensors;
  for (size_t k = 0; k < grads.size(); ++k) {
    if (sources.has(k / tensors, k % tensors)) keep_for_stream(grads[k], current.stream);
  }
}

at::Device device_of(at::TensorList first, at::TensorList second, const at::Tensor& third) {
  for (at::TensorList list : {first, second}) {
    for (const at::Tensor& tensor : list) {
      if (tensor.device().type() == GRADACC_DEVICE_TYPE) return tensor.device();
    }
  }
  return third.device();
}

void run_accumulate(const char* op, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                    const NormTensors& norm, bool overwrite, bool store) {
  const at::Device device = device_of(main_grads, grads, norm.partials);
  const Current current(device);
  DensePointers pointers;
  const GradientArguments arguments =
      gradient_arguments(op, main_grads, grads, weights, pointers, !overwrite, nullptr, device, lies_on_host(weights));
  const size_t count = arguments.numels.size();
  check_store(op, store, main_grads, count);
  std::vector<AccumulateRow> rows(count);
  for (size_t i = 0; i < count; ++i) {
    void* main_grad = const_cast<void*>(arguments.main_grads[i]);
    if (store && arguments.numels[i] > 0) main_grad = pointers.write(main_grads[i], arguments.strides[i]);
    rows[i] = {main_grad, arguments.is_double[i]};
  }
  const SourceTable sources(op, arguments.of_micro_batch, count, weights, current);
  keep(sources, grads, current);
  enqueue_accumulate(op, current, current.state.tables, {arguments.numels, rows}, sources, norm, !overwrite, store);
  pointers.finish();
}

}  // namespace

void accumulate_op(at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                   const at::Tensor& partials, const at::Tensor& found_inf, bool overwrite, bool store,
                   double norm_type) {
  run_accumulate("accumulate_", main_grads, grads, weights, {partials, found_inf, norm_type}, overwrite, store);
}

// The norm as a stage of its own is an accumulation of no micro-batch that stores nothing.
void norm_op(at::TensorList main_grads, const at::Tensor& partials, const at::Tensor& found_inf, double norm_type) {
  check_norm_partials(partials);
  run_accumulate("norm_", main_grads, {}, at::empty({0}, at::kDouble), {partials, found_inf, norm_type},
                 /*overwrite=*/false, /*store=*/false);
}

void clip_op(const at::Tensor& partials, const at::Tensor& counts, const at::Tensor& loss_scale,
             const at::Tensor& total_norm, const at::Tensor& clip_coef, const at::Tensor& multiplier,
             const at::Tensor& weight_sum, double norm_type, double max_norm) {
  check_clip(partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum, norm_type, max_norm);
  const at::Device device = partials.device();
  check_lies("clip_", "counts", counts, device);
  check_lies("clip_", "loss_scale", loss_scale, device);
  const Current current(device);
  ClipArgs args{};
  args.partials = partials.const_data_ptr<double>();
  args.partials_numel = partials.numel();
  const double* values = counts.const_data_ptr<double>();
  if (lies_on_host(counts)) {
    for (int64_t j = 0; j < counts.numel(); ++j) args.count += values[j];
  } else if (counts.numel() > 0) {
    args.counts = values;
    args.counts_numel = counts.numel();
  }
  if (lies_on_host(loss_scale)) {
    args.scale = host_cell(loss_scale);
  } else {
    args.loss_scale = cell_of("clip_", "loss_scale", loss_scale, device);
  }
  args.total_norm = cell_of("clip_", "total_norm", total_norm, device);
  args.clip_coef = cell_of("clip_", "clip_coef", clip_coef, device);
  args.multiplier = cell_of("clip_", "multiplier", multiplier, device);
  args.weight_sum = cell_of("clip_", "weight_sum", weight_sum, device);
  args.max_norm = max_norm;
  args.kind = kind_of(norm_type);
  check_cuda("clip_", launch_clip(args, current.stream.stream()));
  for (const at::Tensor* written : {&total_norm, &clip_coef, &multiplier, &weight_sum}) bump_version(*written);
}

void update_op(at::TensorList params, at::TensorList main_params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               const at::Tensor& steps, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
               const at::Tensor& hyper, const at::Tensor& group_ids, const at::Tensor& touched,
               const at::Tensor& multiplier, const at::Tensor& found_inf, c10::string_view rule_name,
               double max_grad_value) {
  const char* op = "update_";
  const Rule rule = parse_rule(rule_name);
  const int64_t count = static_cast<int64_t>(params.size());
  check_state_lengths(rule, main_params, exp_avgs, exp_avg_sqs, count);
  check_update_cells(steps, group_ids, touched, hyper, multiplier, found_inf, count, max_grad_value);
  check_params(params);
  if (count == 0) return;
  const at::Device device = params[0].device();
  if (lies_on_host(group_ids)) check_group_ids(group_ids, hyper, count);

  const Current current(device);
  DensePointers pointers;
  const GradientArguments arguments = gradient_arguments(op, main_grads, grads, weights, pointers, !main_grads.empty(),
                                                         &params, device, lies_on_host(weights));
  check_state("main_params", main_params, params, true, device);
  check_state("exp_avgs", exp_avgs, params, false, device);
  check_state("exp_avg_sqs", exp_avg_sqs, params, false, device);
  const at::Tensor hyper_rows = on_device(op, "hyper", hyper, current);
  const at::Tensor groups = on_device(op, "group_ids", group_ids, current);
  const at::Tensor touches = on_device(op, "touched", touched, current);

  const UpdatedLists lists{params, main_params, exp_avgs, exp_avg_sqs};
  std::vector<UpdateRow> rows(count);
  for (int64_t i = 0; i < count; ++i) {
    if (arguments.numels[i] > 0) rows[i] = lists.row(arguments, pointers, i);
  }
  const SourceTable sources(op, arguments.of_micro_batch, count, weights, current);
  keep(sources, grads, current);
  enqueue_update(current, current.state.tables, rule, {arguments.numels, rows}, sources,
                 {hyper_rows, groups, touches, steps, multiplier, found_inf, max_grad_value}, !exp_avgs.empty());
  pointers.finish();
}

}  // namespace gradacc::cuda
