// What the ops keep per device and stream: static tables, a ring of address tables, and scratch memory.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

#include "device.h"
#include "launch.h"

namespace gradacc::cuda {

// A static table on the device: the slices of a list of tensors, and their rows.
struct Table {
  SliceTable slices;
  const void* rows;
};

// Tables by what they are made of, the last few that were used. One that was used before costs a comparison, no copy.
class TableCache {
 public:
  // numels: of the list. rows: row_bytes per tensor.
  Table get(const char* op, const std::vector<int64_t>& numels, const void* rows, size_t row_bytes, at::Device device,
            cudaStream_t stream);

 private:
  struct Entry {
    std::vector<int64_t> numels;
    std::vector<char> rows;
    at::Tensor memory;
    Table table;
    bool captured = false;  // a graph reads it: kept for good
  };
  static constexpr size_t kEntries = 8;  // beside those that graphs read

  void drop_oldest();
  std::list<Entry> entries_;  // the last used first
};

// Address tables that are too long for a kernel's parameters. The host writes them to pinned memory, from which the
// stream copies: a slot is written again only once its copy has been made. A captured launch gets a slot for good, as
// its graph copies from it at every replay.
class AddressRing {
 public:
  // Returns where the words will lie on the device for what is enqueued next.
  const uint64_t* put(const char* op, const std::vector<uint64_t>& words, at::Device device, cudaStream_t stream);

 private:
  struct Slot {
    uint64_t* pinned = nullptr;
    size_t capacity = 0;
    at::Tensor memory;
    cudaEvent_t copied = nullptr;  // nullptr: captured
  };
  static constexpr size_t kSlots = 8;  // before the host waits for the oldest copy

  void resize(const char* op, Slot& slot, size_t words, at::Device device);
  Slot& next(const char* op);
  const uint64_t* copy(const char* op, Slot& slot, const std::vector<uint64_t>& words, cudaStream_t stream);
  std::list<Slot> ring_, captured_;
  std::list<Slot>::iterator current_ = ring_.end();
};

struct Scratch {
  unsigned* nonfinite;
  unsigned* blocks_done;
  double* of_slices;
};

class StreamState {
 public:
  std::mutex mutex;
  TableCache tables;
  AddressRing ring;
  // Counters that are 0 between launches, and a double per slice.
  Scratch scratch(const char* op, int64_t slices, at::Device device, cudaStream_t stream);

 private:
  std::vector<at::Tensor> memory_;  // the last is in use; a captured graph may still write to the others
};

// The state of the current stream of a device. The lock is held while an op is enqueued.
struct Current {
  explicit Current(at::Device device);
  at::Device device;
  c10::cuda::CUDAGuard guard;
  c10::cuda::CUDAStream stream;
  StreamState& state;
  std::unique_lock<std::mutex> lock;
};

}  // namespace gradacc::cuda
