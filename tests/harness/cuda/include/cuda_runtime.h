// Stands in for the toolkit's cuda_runtime.h so that g++ compiles the kernels as they are and the CPU executes them: a
// block's threads are fibers on one thread of the host, blocks run one after the other, in an order that can be chosen.
// It has what our kernels and launchers use, and no more: an unknown name does not compile. Nothing here is a GPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__ &  // const Params __grid_constant__ p: shared by all threads, and nobody can write it
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static  // gets red zones
#else
#define __shared__ static thread_local  // lies in a range that can be found, and filled with garbage before every block
#endif

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotReady = 600,
  cudaErrorStreamCaptureUnsupported = 900
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
constexpr unsigned cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocDefault = 0;
struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

// Under names of their own: a CUDA build of torch has loaded the toolkit's.
#define cudaGetErrorString harness_cudaGetErrorString
#define cudaGetLastError harness_cudaGetLastError
#define cudaGetDevice harness_cudaGetDevice
#define cudaDeviceGetAttribute harness_cudaDeviceGetAttribute
#define cudaMemcpyAsync harness_cudaMemcpyAsync
#define cudaHostAlloc harness_cudaHostAlloc
#define cudaFreeHost harness_cudaFreeHost
#define cudaEventCreateWithFlags harness_cudaEventCreateWithFlags
#define cudaEventRecord harness_cudaEventRecord
#define cudaEventQuery harness_cudaEventQuery
#define cudaEventSynchronize harness_cudaEventSynchronize
#define cudaStreamIsCapturing harness_cudaStreamIsCapturing

extern "C" {  // stream.cpp
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
}

namespace harness {

struct Thread {
  uint3 index{};
};
extern Thread* current;  // the CUDA thread that runs
extern uint3 block_index;
extern dim3 grid_dim;

cudaError_t enqueue(std::function<void()> kernel, dim3 grid, dim3 block, cudaStream_t stream);  // stream.cpp
int barrier(int predicate, const char* file, int line);                                         // block.cpp
uint64_t shuffle(uint32_t mask, uint64_t value, int lane_xor, const char* file, int line);
void fence();

// Atomics are relaxed, as CUDA's are: only a fence orders anything around them.
template <typename Update>
inline unsigned atomic(unsigned* cell, const Update& update) {
  unsigned old = __atomic_load_n(cell, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(cell, &old, update(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

}  // namespace harness

#define threadIdx (::harness::current->index)
#define blockIdx (::harness::block_index)
#define gridDim (::harness::grid_dim)

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

// Kernels take one argument.
template <typename Params>
cudaError_t cudaLaunchKernel(void (*kernel)(const Params&), dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t stream) {
  const Params params = *static_cast<const Params*>(arguments[0]);  // copied at the launch, as a GPU's are
  return harness::enqueue([kernel, params] { kernel(params); }, grid, block, stream);
}

#define HARNESS_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(HARNESS_HERE) { harness::barrier(0, file, line); }
inline int __syncthreads_or(int predicate, HARNESS_HERE) { return harness::barrier(predicate, file, line); }
template <typename Value>
inline Value __shfl_xor_sync(unsigned mask, Value value, int lane_xor, HARNESS_HERE) {
  return std::bit_cast<Value>(harness::shuffle(mask, std::bit_cast<uint64_t>(value), lane_xor, file, line));
}
inline void __threadfence() { harness::fence(); }
inline unsigned atomicAdd(unsigned* cell, unsigned value) {
  return harness::atomic(cell, [value](unsigned old) { return old + value; });
}
inline unsigned atomicOr(unsigned* cell, unsigned value) {
  return harness::atomic(cell, [value](unsigned old) { return old | value; });
}
inline unsigned atomicExch(unsigned* cell, unsigned value) {
  return harness::atomic(cell, [value](unsigned) { return value; });
}
#define __builtin_assume(claim)
inline bool __isGlobal(const void*) { return true; }
template <typename Value>
inline Value __ldcg(const Value* from) {
  return *from;
}
