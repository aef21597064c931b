// The optimizer's own way into a backend's passes, as gradacc_fused/engine.py calls it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace gradacc {

template <typename Path>
void bind_hot_path(pybind11::module_& module) {
  namespace py = pybind11;
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Path>(module, "HotPath", py::module_local())
      .def(py::init<std::vector<at::Tensor>, at::Tensor, at::Device>(), py::arg("params"), py::arg("group_ids"),
           py::arg("device"))
      .def("set_main_grads", &Path::set_main_grads, py::arg("main_grads"))
      .def("set_state", &Path::set_state, py::arg("rule"), py::arg("main_params"), py::arg("exp_avgs"),
           py::arg("exp_avg_sqs"), py::arg("steps"))
      .def("accumulate", &Path::accumulate, py::arg("pieces"), py::arg("weights"), py::arg("partials"),
           py::arg("found_inf"), py::arg("overwrite"), py::arg("store"), py::arg("norm_type"), Released())
      .def("norm", &Path::norm, py::arg("partials"), py::arg("found_inf"), py::arg("norm_type"), Released())
      .def("clip", &Path::clip, py::arg("partials"), py::arg("counts"), py::arg("loss_scale"), py::arg("total_norm"),
           py::arg("clip_coef"), py::arg("multiplier"), py::arg("weight_sum"), py::arg("norm_type"),
           py::arg("max_norm"), Released())
      .def("update", &Path::update, py::arg("pieces"), py::arg("weights"), py::arg("stored"), py::arg("hyper"),
           py::arg("late"), py::arg("touched"), py::arg("multiplier"), py::arg("found_inf"), py::arg("max_grad_value"),
           Released())
      .def("window_cells", &Path::window_cells, py::arg("wide"));
}

}  // namespace gradacc
