// Functions that the CPU loops and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define GRADACC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GRADACC_HOST_DEVICE inline __attribute__((always_inline))
#endif

#define GRADACC_INLINE inline __attribute__((always_inline))
