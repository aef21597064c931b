// Where the gradients of m micro-batches lie.
#pragma once

#include <cstdint>

#include "element.h"

namespace gradacc {

// One micro-batch's gradient of one tensor.
struct Source {
  const void* data = nullptr;  // nullptr: the micro-batch did not reach this parameter
  Dtype dtype = Dtype::kFloat32;
};

// m micro-batches' gradients of a list of tensors.
struct Gradients {
  const Source* const* sources = nullptr;  // [m][tensors]
  const double* weights = nullptr;         // [m]
  int64_t m = 0;
};

}  // namespace gradacc
