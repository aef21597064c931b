// The ops of csrc/cuda and its hot path for Python, on CPU tensors, with the arguments of the schemas in
// gradacc_fused/_ops.py.
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "../../../csrc/bind_hot_path.h"
#include "../../../csrc/cuda/device.h"
#include "../../../csrc/cuda/hot_path.h"
#include "../../../csrc/cuda/launch.h"
#include "../../../csrc/cuda/ops.h"

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace gradacc::cuda;
  module.def(
      "accumulate_",
      [](const Tensors& main_grads, const Tensors& grads, const at::Tensor& weights, const at::Tensor& partials,
         const at::Tensor& found_inf, bool overwrite, bool store, double norm_type) {
        accumulate_op(main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type);
      },
      py::arg("main_grads"), py::arg("grads"), py::arg("weights"), py::arg("partials"), py::arg("found_inf"),
      py::kw_only(), py::arg("overwrite"), py::arg("store"), py::arg("norm_type"));
  module.def(
      "norm_",
      [](const Tensors& main_grads, const at::Tensor& partials, const at::Tensor& found_inf, double norm_type) {
        norm_op(main_grads, partials, found_inf, norm_type);
      },
      py::arg("main_grads"), py::arg("partials"), py::arg("found_inf"), py::kw_only(), py::arg("norm_type"));
  module.def("clip_", &clip_op, py::arg("partials"), py::arg("counts"), py::arg("loss_scale"), py::arg("total_norm"),
             py::arg("clip_coef"), py::arg("multiplier"), py::arg("weight_sum"), py::kw_only(), py::arg("norm_type"),
             py::arg("max_norm"));
  module.def(
      "update_",
      [](const Tensors& params, const Tensors& main_params, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
         const at::Tensor& steps, const Tensors& main_grads, const Tensors& grads, const at::Tensor& weights,
         const at::Tensor& hyper, const at::Tensor& group_ids, const at::Tensor& touched, const at::Tensor& multiplier,
         const at::Tensor& found_inf, const std::string& rule, double max_grad_value) {
        update_op(params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, weights, hyper, group_ids,
                  touched, multiplier, found_inf, rule, max_grad_value);
      },
      py::arg("params"), py::arg("main_params"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("steps"),
      py::arg("main_grads"), py::arg("grads"), py::arg("weights"), py::arg("hyper"), py::arg("group_ids"),
      py::arg("touched"), py::arg("multiplier"), py::arg("found_inf"), py::kw_only(), py::arg("rule"),
      py::arg("max_grad_value"));
  gradacc::bind_hot_path<HotPath>(module);
  module.def("set_small_arrays_on_host", [](bool value) { harness_small_arrays_on_host = value; });
  module.def("recorded", [] { return c10::cuda::CUDACachingAllocator::recorded; });
}
