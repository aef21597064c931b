// Where the arrays of one parameter lie that an update reads and writes. No padding: rows are compared as bytes.
#pragma once

#include <cstdint>

#include "element.h"

namespace gradacc {

struct UpdateRow {
  const void* main_grad = nullptr;  // Math[], or nullptr: the gradient starts from zero
  void* param = nullptr;            // nullptr: nothing to update
  void* main_param = nullptr;       // Math[], or nullptr: the parameter itself is read and written
  void* exp_avg = nullptr;          // Math[]; sgd: momentum buffer, or nullptr
  void* exp_avg_sq = nullptr;       // Math[]; sgd, lion: nullptr
  int32_t param_dtype = static_cast<int32_t>(Dtype::kFloat32);
  int32_t is_double = 0;  // math dtype
};

}  // namespace gradacc
