// The accumulated gradient of a tile, for the passes that need its sums in memory.
#pragma once

#include "isa.h"
#include "run.h"

namespace gradacc {

constexpr int64_t kTile = 256;  // elements of a tile; kChunk is a multiple of it

// tile[i] = main_grad[i] (or 0), then fma(weight, gradient[i], tile[i]) per micro-batch that counts; elements start to
// start + n, n <= kTile. Asks for what the next tile will read.
template <typename Math>
using GatherTile = void(Math* tile, const Gradient& gradient, int64_t start, int64_t n);

// The loop for an instruction set.
template <typename Math>
GatherTile<Math>* gather_tile(Isa isa);

}  // namespace gradacc
