#include "stream_state.h"

#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "../chunk_table.h"

namespace gradacc::cuda {
namespace {

constexpr size_t kAlign = 16;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

at::Tensor device_bytes(size_t bytes, at::Device device) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(device).dtype(at::kByte));
}

// The slices of all tensors, and where the slices of each chunk begin.
void cut(const std::vector<int64_t>& numels, std::vector<Slice>& slices, std::vector<int64_t>& first_of_chunk) {
  for (const Chunk& chunk : chunk_table(numels)) {
    first_of_chunk.push_back(static_cast<int64_t>(slices.size()));
    for (int64_t start = 0; start < chunk.numel; start += kSlice) {
      const int64_t left = chunk.numel - start;
      slices.push_back({chunk.start + start, static_cast<int32_t>(chunk.tensor),
                        static_cast<int32_t>(left < kSlice ? left : kSlice)});
    }
  }
  first_of_chunk.push_back(static_cast<int64_t>(slices.size()));
}

}  // namespace

Table TableCache::get(const char* op, const std::vector<int64_t>& numels, const void* rows, size_t row_bytes,
                      at::Device device, cudaStream_t stream) {
  const size_t rows_bytes = numels.size() * row_bytes;
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (entry->rows.size() != rows_bytes || entry->numels != numels) continue;
    if (rows_bytes > 0 && std::memcmp(entry->rows.data(), rows, rows_bytes) != 0) continue;
    entries_.splice(entries_.begin(), entries_, entry);
    entries_.front().captured |= is_capturing(stream);
    return entries_.front().table;
  }
  check_not_capturing(op, "these tensors are new, and their table would be made", stream);
  std::vector<Slice> slices;
  std::vector<int64_t> first_of_chunk;
  cut(numels, slices, first_of_chunk);
  const size_t slices_bytes = aligned(slices.size() * sizeof(Slice));
  const size_t chunks_bytes = aligned(first_of_chunk.size() * sizeof(int64_t));
  std::vector<char> host(slices_bytes + chunks_bytes + rows_bytes);
  if (!slices.empty()) std::memcpy(host.data(), slices.data(), slices.size() * sizeof(Slice));
  std::memcpy(host.data() + slices_bytes, first_of_chunk.data(), first_of_chunk.size() * sizeof(int64_t));
  if (rows_bytes > 0) std::memcpy(host.data() + slices_bytes + chunks_bytes, rows, rows_bytes);

  Entry entry;
  entry.numels = numels;
  entry.rows.assign(host.begin() + static_cast<int64_t>(slices_bytes + chunks_bytes), host.end());
  entry.memory = device_bytes(host.size(), device);
  char* memory = static_cast<char*>(entry.memory.mutable_data_ptr());
  announce_wait();  // pageable memory
  check_cuda(op, cudaMemcpyAsync(memory, host.data(), host.size(), cudaMemcpyHostToDevice, stream));
  entry.table = {{reinterpret_cast<const Slice*>(memory), reinterpret_cast<const int64_t*>(memory + slices_bytes),
                  static_cast<int64_t>(slices.size()), static_cast<int64_t>(first_of_chunk.size()) - 1},
                 memory + slices_bytes + chunks_bytes};
  entries_.push_front(std::move(entry));
  drop_oldest();
  return entries_.front().table;
}

void TableCache::drop_oldest() {
  size_t free = 0;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool drop = !entry->captured && ++free > kEntries;
    entry = drop ? entries_.erase(entry) : std::next(entry);
  }
}

void AddressRing::resize(const char* op, Slot& slot, size_t words, at::Device device) {
  if (slot.capacity >= words) return;
  void* pinned = std::exchange(slot.pinned, nullptr);
  slot.capacity = 0;
  if (pinned) check_cuda(op, cudaFreeHost(pinned));
  words += words / 2;  // allocating may wait for the device: seldom
  check_cuda(op, cudaHostAlloc(&pinned, words * sizeof(uint64_t), cudaHostAllocDefault));
  slot.pinned = static_cast<uint64_t*>(pinned);
  slot.capacity = words;
  slot.memory = device_bytes(words * sizeof(uint64_t), device);
}

AddressRing::Slot& AddressRing::next(const char* op) {
  if (!ring_.empty() && ++current_ == ring_.end()) current_ = ring_.begin();
  const bool busy = !ring_.empty() && is_pending(op, current_->copied);
  if (ring_.empty() || (busy && ring_.size() < kSlots)) {
    current_ = ring_.emplace(current_);
    check_cuda(op, cudaEventCreateWithFlags(&current_->copied, cudaEventDisableTiming));
  } else if (busy) {
    announce_wait();
    check_cuda(op, cudaEventSynchronize(current_->copied));
  }
  return *current_;
}

const uint64_t* AddressRing::copy(const char* op, Slot& slot, const std::vector<uint64_t>& words, cudaStream_t stream) {
  std::memcpy(slot.pinned, words.data(), words.size() * sizeof(uint64_t));
  void* memory = slot.memory.mutable_data_ptr();
  check_cuda(op, cudaMemcpyAsync(memory, slot.pinned, words.size() * sizeof(uint64_t), cudaMemcpyHostToDevice, stream));
  return static_cast<const uint64_t*>(memory);
}

const uint64_t* AddressRing::put(const char* op, const std::vector<uint64_t>& words, at::Device device,
                                 cudaStream_t stream) {
  // Neither this stream's capture nor another thread's minds what is allocated and asked here.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  if (is_capturing(stream)) {
    resize(op, captured_.emplace_back(), words.size(), device);
    return copy(op, captured_.back(), words, stream);
  }
  Slot& slot = next(op);
  resize(op, slot, words.size(), device);
  const uint64_t* memory = copy(op, slot, words, stream);
  check_cuda(op, cudaEventRecord(slot.copied, stream));
  return memory;
}

Scratch StreamState::scratch(const char* op, int64_t slices, at::Device device, cudaStream_t stream) {
  const int64_t words = slices + 2;
  if (memory_.empty() || memory_.back().numel() < words) {
    check_not_capturing(op, "the scratch memory would be made", stream);
    memory_.push_back(at::zeros({words}, at::TensorOptions(device).dtype(at::kDouble)));
  }
  double* memory = memory_.back().mutable_data_ptr<double>();
  unsigned* counters = reinterpret_cast<unsigned*>(memory);
  return {counters, counters + 2, memory + 2};
}

namespace {

StreamState& state_of(c10::cuda::CUDAStream stream) {
  // Never destroyed: at exit the driver may be gone before them.
  static auto& mutex = *new std::mutex();
  static auto& states = *new std::map<std::pair<int, cudaStream_t>, StreamState>();
  const std::lock_guard<std::mutex> lock(mutex);
  return states[{stream.device_index(), stream.stream()}];
}

}  // namespace

Current::Current(at::Device device)
    : device(device),
      guard(device),
      stream(c10::cuda::getCurrentCUDAStream(device.index())),
      state(state_of(stream)),
      lock(state.mutex) {}

}  // namespace gradacc::cuda
