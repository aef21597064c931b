// Stands in for torch's header: counts what is recorded.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

namespace c10::cuda::CUDACachingAllocator {

inline int64_t recorded = 0;

inline void recordStream(const c10::DataPtr&, CUDAStream) { ++recorded; }

}  // namespace c10::cuda::CUDACachingAllocator
