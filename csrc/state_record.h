// Whether an optimizer's state still holds the objects that were taken up from it. gradacc_fused/collector.py holds the
// same class in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "cpu/simd.h"

namespace gradacc {

class StateRecord {
 public:
  // state: {parameter: {name: value}}.
  explicit StateRecord(const pybind11::dict& state) {
    PyObject *param = nullptr, *of_param = nullptr, *name = nullptr, *value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(state.ptr(), &i, &param, &of_param);) {
      taken_.push_back({pybind11::reinterpret_borrow<pybind11::object>(of_param), values_.size()});
      if (!PyDict_Check(of_param)) continue;
      for (Py_ssize_t k = 0; PyDict_Next(of_param, &k, &name, &value);) {
        values_.push_back(pybind11::reinterpret_borrow<pybind11::object>(value));
      }
    }
  }

  // Compares identities: the same parameters' dicts, with the same values in the same order. Values that somebody added
  // do not matter.
  bool holds(const pybind11::dict& state) const {
    PyObject *param = nullptr, *of_param = nullptr, *name = nullptr, *value = nullptr;
    if (PyDict_Size(state.ptr()) != static_cast<Py_ssize_t>(taken_.size())) return false;
    size_t n = 0;
    for (Py_ssize_t i = 0; PyDict_Next(state.ptr(), &i, &param, &of_param); ++n) {
      announce(n);
      if (taken_[n].of_param.ptr() != of_param) return false;
      size_t wanted = taken_[n].first_value;
      const size_t end = n + 1 < taken_.size() ? taken_[n + 1].first_value : values_.size();
      for (Py_ssize_t k = 0; wanted < end && PyDict_Next(of_param, &k, &name, &value);) {
        if (values_[wanted].ptr() == value) ++wanted;
      }
      if (wanted < end) return false;
    }
    return true;
  }

 private:
  struct Taken {
    pybind11::object of_param;
    size_t first_value;
  };

  // Asks for dicts further on: for the object, then for the table it points at.
  void announce(size_t n) const {
    constexpr size_t kStep = 6;
    if (n + 2 * kStep < taken_.size()) prefetch(taken_[n + 2 * kStep].of_param.ptr(), 0, 1, kLine);
    if (n + kStep >= taken_.size()) return;
    PyObject* next = taken_[n + kStep].of_param.ptr();
    if (PyDict_Check(next)) prefetch(reinterpret_cast<PyDictObject*>(next)->ma_keys, 0, 4, kLine);
  }

  std::vector<Taken> taken_;
  std::vector<pybind11::object> values_;  // of all dicts, one after the other
};

}  // namespace gradacc
