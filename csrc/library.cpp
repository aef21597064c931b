// gradacc_fused._C: the collector and the host-side helpers. The ops register themselves (cpu/*.cpp).
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include "checks.h"
#include "chunk_table.h"
#include "collector.h"
#include "cpu/isa.h"
#include "update_math.h"

namespace py = pybind11;

namespace {

// The value of a one-element tensor that lies in host memory, read without an operator call.
double read_host_scalar(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.numel() == 1 && tensor.has_storage(),
                    "read_host_scalar: expected one element on cpu, got ", tensor.numel(), " on ",
                    tensor.device().str(), ".");
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return *tensor.const_data_ptr<double>();
    case at::kFloat:
      return *tensor.const_data_ptr<float>();
    case at::kHalf:
      return static_cast<float>(*tensor.const_data_ptr<at::Half>());
    case at::kBFloat16:
      return static_cast<float>(*tensor.const_data_ptr<at::BFloat16>());
    case at::kLong:
      return static_cast<double>(*tensor.const_data_ptr<int64_t>());
    case at::kInt:
      return *tensor.const_data_ptr<int32_t>();
    case at::kShort:
      return *tensor.const_data_ptr<int16_t>();
    case at::kChar:
      return *tensor.const_data_ptr<int8_t>();
    case at::kByte:
      return *tensor.const_data_ptr<uint8_t>();
    case at::kBool:
      return *tensor.const_data_ptr<bool>() ? 1.0 : 0.0;
    default:
      TORCH_CHECK_TYPE(false, "read_host_scalar: cannot read ", gradacc::dtype_name(tensor.scalar_type()), ".");
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using gradacc::Collector;
  module.attr("CHUNK") = gradacc::kChunk;
  module.attr("HYPER_COLUMNS") = static_cast<int>(gradacc::kHyperColumns);
  module.def("isa", &gradacc::isa_name, "The instruction set the CPU loops run on.");
  module.def("use_isa", &gradacc::use_isa, py::arg("name"), "Forces plain, avx2 or avx512.");
  module.def("read_host_scalar", &read_host_scalar, py::arg("tensor"));

  py::class_<Collector>(module, "Collector")
      .def(py::init<std::vector<at::Tensor>, std::vector<bool>, at::Tensor>(), py::arg("params"), py::arg("active"),
           py::arg("absent"))
      // Returns (gradients, how many are there, owned): ownership is counted before Python holds references of its own.
      .def(
          "collect",
          [](Collector& self, const at::Tensor& touched, bool clear) {
            auto collected = self.collect(touched, clear);
            const bool owned = clear && Collector::owned(collected.grads);
            return std::make_tuple(std::move(collected.grads), collected.present, owned);
          },
          py::arg("touched"), py::arg("clear"))
      .def("first_with_grad", &Collector::first_with_grad)
      .def("remember_grads", &Collector::remember_grads)
      .def("grads_unchanged", &Collector::grads_unchanged)
      .def("clear_grads", &Collector::clear_grads)
      .def("matches", &Collector::matches, py::arg("param_lists"))
      .def("remember", &Collector::remember)
      .def("changed", &Collector::changed)
      .def("watch_backward", [](Collector& self) { self.backward_watch().watch(self.params()); })
      .def("unwatch_backward", [](Collector& self) { self.backward_watch().unwatch(); })
      .def("unfinished_backward", [](Collector& self) { return self.backward_watch().unfinished(); })
      .def("reset_backward", [](Collector& self) { self.backward_watch().reset(); });
}
