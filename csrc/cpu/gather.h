// The accumulated gradient of a tile: m micro-batches in order, one fused multiply-add each. The one place where
// gradients are summed; every pass calls it.
#pragma once

#include <cstdint>

#include "element.h"
#include "isa.h"

namespace gradacc {

constexpr int64_t kTile = 256;  // elements of a tile; kChunk is a multiple of it

// One micro-batch's gradient of one tensor.
struct Source {
  const void* data = nullptr;  // nullptr: the micro-batch did not reach this parameter, or weighs 0
  Dtype dtype = Dtype::kFloat32;
  double weight = 0.0;
};

// A tensor's accumulated gradient: main_grad (or zero) plus m micro-batches.
struct Gradient {
  const void* main_grad = nullptr;  // Math[numel], or nullptr: starts from zero
  const Source* sources = nullptr;
  int64_t m = 0;
};

// tile[i] = main_grad[i] (or 0), then fma(weight, gradient[i], tile[i]) per micro-batch that counts; elements start to
// start + n, n <= kTile. ahead: also asks for what the next tile will read; else the caller does, between other work.
template <typename Math>
using GatherTile = void(Math* tile, const Gradient& gradient, int64_t start, int64_t n, bool ahead);

// The loop for an instruction set.
template <typename Math>
GatherTile<Math>* gather_tile(Isa isa);

}  // namespace gradacc
