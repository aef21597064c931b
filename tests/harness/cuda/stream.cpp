// Streams, events and memory of the harness. A stream does its work at once, or, when delayed, not before somebody
// waits for it: then whoever writes to memory that a pending copy still reads is found out. A capture records the work
// of all streams and does none of it.
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "block.h"

#define HARNESS_API extern "C" __attribute__((visibility("default")))

struct CUstream_st {
  std::deque<std::function<void()>> work;
};
struct CUevent_st {
  bool passed = true;
  cudaStream_t stream = nullptr;
};

namespace harness {
namespace {

CUstream_st default_stream;
bool delayed = false;
bool capturing = false;
std::vector<std::function<void()>> graph;  // what the last capture recorded
int processors = 2;
cudaError_t last_error = cudaSuccess;  // of the last call that failed, until somebody asks for it
int64_t launches = 0, copies = 0, event_waits = 0;
std::map<const char*, size_t> pinned;

CUstream_st& of(cudaStream_t stream) { return stream ? *stream : default_stream; }

void drain(CUstream_st& stream, const std::function<bool()>& enough) {
  while (!stream.work.empty() && !enough()) {
    const auto next = std::move(stream.work.front());
    stream.work.pop_front();
    next();
  }
}

void submit(cudaStream_t stream, std::function<void()> work) {
  if (capturing) {
    graph.push_back(std::move(work));
  } else if (delayed) {
    of(stream).work.push_back(std::move(work));
  } else {
    work();
  }
}

bool is_pinned(const void* memory) {
  const char* place = static_cast<const char*>(memory);
  auto after = pinned.upper_bound(place);
  if (after == pinned.begin()) return false;
  --after;
  return place < after->first + after->second;
}

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

}  // namespace

bool relaxed_capture = false;

cudaError_t enqueue(std::function<void()> kernel, dim3 grid, dim3 block, cudaStream_t stream) {
  if (block.x == 0 || block.x > 1024 || grid.x == 0) return failed(cudaErrorInvalidConfiguration);
  ++launches;
  submit(stream, [kernel = std::move(kernel), grid, block] { run_kernel(kernel, grid, block); });
  return cudaSuccess;
}

}  // namespace harness

using namespace harness;

// -- what the tests set and read -----------------------------------------------------------------------------------

HARNESS_API void harness_set_delayed(int value) { delayed = value != 0; }
HARNESS_API void harness_set_capturing(int value) {
  capturing = value != 0;
  if (capturing) graph.clear();
}
HARNESS_API void harness_replay() {
  for (const auto& work : graph) submit(nullptr, work);
}
HARNESS_API void harness_set_processors(int count) { processors = count; }
HARNESS_API void harness_drain() {
  drain(default_stream, [] { return false; });
}
HARNESS_API void harness_reset_counts() { launches = copies = event_waits = 0; }
HARNESS_API int64_t harness_launches() { return launches; }
HARNESS_API int64_t harness_copies() { return copies; }
HARNESS_API int64_t harness_event_waits() { return event_waits; }

// -- the runtime's functions ---------------------------------------------------------------------------------------

HARNESS_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorNotReady:
      return "not ready";
    case cudaErrorStreamCaptureUnsupported:
      return "not permitted during a capture";
    default:
      return "invalid configuration";
  }
}
HARNESS_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
HARNESS_API cudaError_t cudaGetDevice(int* device) {
  *device = 1000;  // more than anybody keeps facts of: the tests change them
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = processors;
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  ++copies;
  if (is_pinned(from)) {
    submit(stream, [=] { std::memcpy(to, from, bytes); });
    return cudaSuccess;
  }
  if (capturing) return failed(cudaErrorStreamCaptureUnsupported);
  // Pageable memory is staged before the call returns.
  const auto* begin = static_cast<const char*>(from);
  auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
  submit(stream, [=] { std::memcpy(to, staged->data(), bytes); });
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if (capturing && !relaxed_capture) return failed(cudaErrorStreamCaptureUnsupported);
  *memory = std::malloc(bytes);
  pinned[static_cast<const char*>(*memory)] = bytes;
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaFreeHost(void* memory) {
  pinned.erase(static_cast<const char*>(memory));
  std::free(memory);
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->passed = false;
  event->stream = stream;
  submit(stream, [event] { event->passed = true; });
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (capturing) return failed(cudaErrorStreamCaptureUnsupported);
  return event->passed ? cudaSuccess : failed(cudaErrorNotReady);
}
HARNESS_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++event_waits;
  drain(of(event->stream), [event] { return event->passed; });
  return cudaSuccess;
}
HARNESS_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
