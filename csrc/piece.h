// Piece: one micro-batch's gradients, from the collector that took them to the passes that read them.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <vector>

#include "checks.h"
#include "source.h"

namespace gradacc {

// What a piece's lists lie in, for the next piece: a large allocation after many small ones were freed makes malloc go
// through them all.
struct PieceMemory {
  struct Lists {
    std::vector<at::Tensor> grads;
    std::vector<Source> sources;
  };
  std::mutex mutex;
  std::vector<Lists> free;

  Lists take() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (free.empty()) return {};
    Lists lists = std::move(free.back());
    free.pop_back();
    return lists;
  }
  void give_back(Lists lists) {
    const std::lock_guard<std::mutex> lock(mutex);
    free.push_back(std::move(lists));
  }
};

// One micro-batch's gradients, checked, each in its parameter's memory order.
struct Piece {
  std::vector<at::Tensor> grads;  // one per active parameter; undefined: the micro-batch did not reach it
  std::vector<Source> sources;    // where they lie
  int64_t present = 0;
  int64_t bytes = 0;
  bool exclusive = false;  // nobody else can write them
  // On a device: whether its gradients' memory is kept until a stream is done with it, and which stream's.
  bool kept = false;
  const void* kept_for = nullptr;

  Piece(std::shared_ptr<PieceMemory> memory, size_t count);
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
  ~Piece();

  // Looks up where a gradient lies.
  void locate(size_t k) {
    const at::Tensor& grad = grads[k];
    if (!grad.defined()) return;
    sources[k] = {grad.numel() > 0 ? grad.const_data_ptr() : nullptr, element_dtype(grad.scalar_type())};
  }
  void locate() {
    for (size_t k = 0; k < grads.size(); ++k) locate(k);
  }

 private:
  std::shared_ptr<PieceMemory> memory_;
};

}  // namespace gradacc
