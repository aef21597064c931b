// What the host code asks of torch about the device; with launch.h the only place that knows whose device it is.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime.h>

#include <string>

#ifndef GRADACC_DEVICE_TYPE  // the tests build these ops for another type of device
#define GRADACC_DEVICE_TYPE c10::DeviceType::CUDA
#define GRADACC_LIES_ON_HOST(tensor) (tensor).device().is_cpu()
#endif

namespace gradacc::cuda {

inline bool lies_on_host(const at::Tensor& tensor) { return GRADACC_LIES_ON_HOST(tensor); }

inline void check_cuda(const char* op, cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();  // told here; the next op of torch's would tell it again
  TORCH_CHECK(error == cudaSuccess, op, ": CUDA said: ", cudaGetErrorString(error), ".");
}

// Whether the work before an event is still to be done.
inline bool is_pending(const char* op, cudaEvent_t event) {
  const cudaError_t error = cudaEventQuery(event);
  if (error != cudaErrorNotReady) check_cuda(op, error);
  if (error == cudaErrorNotReady) (void)cudaGetLastError();  // an answer, and the runtime remembers it as an error
  return error == cudaErrorNotReady;
}

// The host may wait for the device here: told where torch.cuda.set_sync_debug_mode asks for it.
inline void announce_wait() {
  if (c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_DISABLED) {
    c10::cuda::warn_or_error_on_sync();
  }
}

// The memory must not be given to somebody else before what this stream does now is done.
inline void keep_for_stream(const at::Tensor& tensor, c10::cuda::CUDAStream stream) {
  c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream);
}

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda("gradacc_fused", cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// What has to be made or copied by the host cannot become part of a graph.
inline void check_not_capturing(const char* op, const std::string& what, cudaStream_t stream) {
  TORCH_CHECK(!is_capturing(stream), op, ": ", what, " while a CUDA graph is captured. Run one window with the same ",
              "tensors on the capturing stream before the capture.");
}

}  // namespace gradacc::cuda
