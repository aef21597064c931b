// Stands in for torch's header.
#pragma once

#include <cuda_runtime.h>

namespace harness {
extern bool relaxed_capture;  // stream.cpp
}

namespace c10::cuda {

// Calls that a capture refuses are allowed while it lives.
struct CUDAStreamCaptureModeGuard {
  explicit CUDAStreamCaptureModeGuard(cudaStreamCaptureMode) { harness::relaxed_capture = true; }
  ~CUDAStreamCaptureModeGuard() { harness::relaxed_capture = false; }
};

}  // namespace c10::cuda
