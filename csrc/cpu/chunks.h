// Chunks of a list of tensors, shared out over torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "../chunk_table.h"

namespace gradacc {

class Chunks {
 public:
  Chunks() = default;
  explicit Chunks(const std::vector<int64_t>& numels) : chunks_(chunk_table(numels)) {
    costs_.reserve(chunks_.size() + 1);
    costs_.push_back(0);
    for (const Chunk& chunk : chunks_) {
      elements_ += chunk.numel;
      costs_.push_back(costs_.back() + chunk.numel + kChunkCost);
    }
  }

  size_t size() const { return chunks_.size(); }
  int64_t elements() const { return elements_; }
  const Chunk& operator[](int64_t k) const { return chunks_[k]; }

  // Runs body(chunk index) over all chunks. Threads get shares of equal cost; who gets which changes no bit.
  template <typename Body>
  void for_each(const Body& body) const {
    const int64_t shares = std::min<int64_t>(at::get_num_threads(), costs_.empty() ? 0 : costs_.back() / kLeastShare);
    if (shares <= 1 || at::in_parallel_region()) {
      for (int64_t k = 0; k < static_cast<int64_t>(size()); ++k) body(k);
      return;
    }
    at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
      const int64_t last = first_of(end, shares);
      for (int64_t k = first_of(begin, shares); k < last; ++k) body(k);
    });
  }

 private:
  static constexpr int64_t kChunkCost = 128;     // what a chunk costs beside its elements, in elements
  static constexpr int64_t kLeastShare = 32768;  // below it a second thread costs more than it saves

  int64_t first_of(int64_t share, int64_t shares) const {
    const int64_t cost = costs_.back() / shares * share;
    if (share == shares) return static_cast<int64_t>(size());
    return std::lower_bound(costs_.begin(), costs_.end(), cost) - costs_.begin();
  }

  std::vector<Chunk> chunks_;
  std::vector<int64_t> costs_;  // of all chunks before this one
  int64_t elements_ = 0;
};

}  // namespace gradacc
