// Whether an optimizer's state still holds the objects that were taken up from it. gradacc_fused/collector.py holds the
// same class in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace gradacc {

class StateRecord {
 public:
  // state: {parameter: {name: value}}.
  explicit StateRecord(const pybind11::dict& state) {
    PyObject *param = nullptr, *of_param = nullptr, *name = nullptr, *value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(state.ptr(), &i, &param, &of_param);) {
      taken_.push_back({pybind11::reinterpret_borrow<pybind11::object>(of_param), {}});
      if (!PyDict_Check(of_param)) continue;
      for (Py_ssize_t k = 0; PyDict_Next(of_param, &k, &name, &value);) {
        taken_.back().values.push_back(pybind11::reinterpret_borrow<pybind11::object>(value));
      }
    }
  }

  // Compares identities: the same parameters' dicts, with the same values in the same order. Values that somebody added
  // do not matter.
  bool holds(const pybind11::dict& state) const {
    PyObject *param = nullptr, *of_param = nullptr, *name = nullptr, *value = nullptr;
    if (PyDict_Size(state.ptr()) != static_cast<Py_ssize_t>(taken_.size())) return false;
    auto taken = taken_.begin();
    for (Py_ssize_t i = 0; PyDict_Next(state.ptr(), &i, &param, &of_param); ++taken) {
      if (taken->of_param.ptr() != of_param) return false;
      auto wanted = taken->values.begin();
      for (Py_ssize_t k = 0; wanted != taken->values.end() && PyDict_Next(of_param, &k, &name, &value);) {
        if (wanted->ptr() == value) ++wanted;
      }
      if (wanted != taken->values.end()) return false;
    }
    return true;
  }

 private:
  struct Taken {
    pybind11::object of_param;
    std::vector<pybind11::object> values;
  };
  std::vector<Taken> taken_;
};

}  // namespace gradacc
