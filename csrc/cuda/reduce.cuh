// Reductions in a fixed order, and the block that ends a launch. No float atomics: the same bits from every run and
// grid.
#pragma once

#include "launch.h"

namespace gradacc::cuda {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kWarp = 32;

// Folds one value per thread of a block: a tree within each warp, then the warps in order. Valid in thread 0.
__device__ __forceinline__ double fold_block(double value, NormKind kind) {
  __shared__ double of_warp[kThreads / kWarp];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = with_part(value, __shfl_xor_sync(kWholeWarp, value, distance), kind);
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / kWarp; ++warp) value = with_part(value, of_warp[warp], kind);
  }
  __syncthreads();  // of_warp is written anew for the next slice
  return value;
}

// Whether this is the last block of the launch to get here: then everything that thread 0 of the others wrote before is
// visible to it, and it alone goes on. To be called by all threads.
__device__ __forceinline__ bool last_block(unsigned* blocks_done) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(blocks_done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

__device__ __forceinline__ double read(const Cell& cell) {
  return cell.is_double ? *static_cast<const double*>(cell.data) : *static_cast<const float*>(cell.data);
}

__device__ __forceinline__ void write(const Cell& cell, double value) {
  if (cell.is_double) {
    *static_cast<double*>(cell.data) = value;
  } else {
    *static_cast<float*>(cell.data) = static_cast<float>(value);
  }
}

}  // namespace gradacc::cuda
