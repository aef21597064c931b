// Runs one kernel on the CPU, block by block.
#pragma once

#include <cuda_runtime.h>

#include <functional>

namespace harness {

// Throws std::runtime_error, with the kernel's file and line, for what a GPU would leave undefined or hang on: a
// barrier that not all threads reach at the same place, a warp operation that waits for lanes that never come, a
// shuffle from a lane that is not there. Shared memory is filled with 0xFF before every block. The order of threads,
// warps and blocks is ascending, descending, or drawn from a seed (GRADACC_HARNESS_ORDER = asc, desc or a number).
void run_kernel(const std::function<void()>& kernel, dim3 grid, dim3 block);

}  // namespace harness
