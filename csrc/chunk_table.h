// Chunks: fixed-size slices of the tensors of a list, none crossing a tensor's end; the unit of work and of the norm's
// partials on every backend. gradacc_fused/layout.py holds the same size for Python.
#pragma once

#include <cstdint>
#include <vector>

namespace gradacc {

constexpr int64_t kChunk = 65536;

struct Chunk {
  int64_t tensor;  // index in the list
  int64_t start;   // first element
  int64_t numel;   // 1 to kChunk
};

inline int64_t count_chunks(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Chunks of all tensors in list order; chunk k owns partials[k].
inline std::vector<Chunk> chunk_table(const std::vector<int64_t>& numels) {
  std::vector<Chunk> chunks;
  int64_t total = 0;
  for (int64_t numel : numels) total += count_chunks(numel);
  chunks.reserve(total);
  for (int64_t i = 0; i < static_cast<int64_t>(numels.size()); ++i) {
    for (int64_t start = 0; start < numels[i]; start += kChunk) {
      const int64_t left = numels[i] - start;
      chunks.push_back({i, start, left < kChunk ? left : kChunk});
    }
  }
  return chunks;
}

}  // namespace gradacc
