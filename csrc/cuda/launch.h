// The launchers: raw pointers, sizes and a stream; no torch header. Each enqueues one kernel, or none where there is
// nothing to do, and returns what the launch said.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "tables.h"

namespace gradacc::cuda {

// The most addresses that travel as a kernel parameter (32,764 bytes from CUDA 12.1 on, 4 KiB before), and the most
// weights beside them; more lie in device memory.
#if CUDART_VERSION >= 12010
constexpr int64_t kParameterBytes = 32764;
constexpr int64_t kMostAddresses = 4040;
#else
constexpr int64_t kParameterBytes = 4096;
constexpr int64_t kMostAddresses = 464;
#endif
constexpr int64_t kFewAddresses = 464;  // a copy of 4 KiB is cheaper than one of 32
constexpr int64_t kMostWeights = 8;

cudaError_t launch_accumulate(const AccumulateArgs& args, const SourceArgs& sources, cudaStream_t stream);
cudaError_t launch_clip(const ClipArgs& args, cudaStream_t stream);
cudaError_t launch_update(const UpdateArgs& args, const SourceArgs& sources, cudaStream_t stream);

// How many blocks of a kernel the current device holds at once; asked once per kernel and device.
template <auto kKernel>
cudaError_t resident_blocks(int64_t* blocks) {
  constexpr int kDevices = 64;
  static std::atomic<int64_t> known[kDevices];
  int device = 0, processors = 0, of_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool has_place = device < kDevices;
  *blocks = has_place ? known[device].load() : 0;
  if (*blocks > 0) return cudaSuccess;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_processor, kKernel, kThreads, 0);
  }
  if (error != cudaSuccess) return error;
  *blocks = int64_t{processors} * of_processor;
  if (has_place) known[device].store(*blocks);
  return cudaSuccess;
}

// A kernel with one argument, and a grid that stays: as many blocks as the device holds at once, and no more than there
// is work for.
template <auto kKernel, typename Params>
cudaError_t launch_persistent(const Params& params, int64_t most_blocks, cudaStream_t stream) {
  static_assert(sizeof(Params) <= kParameterBytes, "more than a kernel's parameters may take");
  int64_t resident = 0;
  const cudaError_t error = resident_blocks<kKernel>(&resident);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(most_blocks < resident ? most_blocks : resident));
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(kKernel, grid, dim3(kThreads), arguments, 0, stream);
}

}  // namespace gradacc::cuda
