// Collector: the host's walk over the parameters, once per micro-batch, in C++ instead of a Python loop.
// gradacc_fused/collector.py holds the same class in Python for installs without the compiled extension.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/gather.h"

namespace gradacc {

// Whether a backward that began writing gradients also ended. Hooks that run before the gradient accumulators set it;
// the engine runs the completion callback only when the whole backward went through.
class BackwardWatch {
 public:
  ~BackwardWatch();
  void watch(const std::vector<at::Tensor>& params);
  void unwatch();
  bool unfinished() const;
  void reset();

 private:
  struct State;
  std::shared_ptr<State> state_;
  // A shared or an intrusive pointer to the node, by torch version. Held: a parameter only refers to it weakly.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::vector<std::pair<Accumulator, torch::autograd::FunctionPreHook*>> hooks_;
};

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

  Piece(std::shared_ptr<PieceMemory> memory, size_t count);
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
  ~Piece();

  // Looks up where a gradient lies.
  void locate(size_t k);
  void locate() {
    for (size_t k = 0; k < grads.size(); ++k) locate(k);
  }

 private:
  std::shared_ptr<PieceMemory> memory_;
};

class Collector {
 public:
  // params: the parameters of all groups in order. active: which of them belong to the layout.
  Collector(std::vector<at::Tensor> params, std::vector<bool> active, at::Tensor absent);

  // Gradients of the active parameters; .grad becomes None where `clear`. `touched` (uint8, one per active parameter)
  // gets a 1 where a gradient was there. Sparse gradients are coalesced and made dense.
  std::shared_ptr<Piece> collect(const at::Tensor& touched, bool clear);
  // Index (among all parameters) of the first gradient that lies where one of a held piece does, or -1.
  int64_t first_came_back(const Piece& piece, const std::vector<std::shared_ptr<Piece>>& held) const;
  // Index (among all parameters) of the first active parameter whose .grad is set, or -1.
  int64_t first_with_grad() const;
  // Remembers the gradients as they are; whether they are the same tensors since, not written and not cleared.
  void remember_grads();
  bool grads_unchanged() const;
  void clear_grads();
  // Whether the layout still describes the parameters: the same objects in the same order, the same requires_grad,
  // shapes, dtypes and devices.
  bool matches(const pybind11::list& param_lists) const;

  // Remembers the parameters' versions and addresses; `changed` lists the active ones written by others since.
  void remember();
  std::vector<int64_t> changed() const;

  BackwardWatch& backward_watch() { return watch_; }
  const std::vector<at::Tensor>& params() const { return params_; }

 private:
  struct Seen {
    uint32_t version;
    const void* address;
    bool operator==(const Seen& other) const { return version == other.version && address == other.address; }
  };
  static Seen see(const at::Tensor& tensor);
  // Ask for what a walk over the list reads a few parameters further on.
  void announce(size_t k, size_t count) const;
  void announce_param(size_t i) const;
  // Whether a gradient can be read as it is; what has to be made of it otherwise.
  bool usual(size_t k, const at::Tensor& grad) const;
  at::Tensor made_usual(size_t k, const at::Tensor& grad) const;
  void check_grad(int64_t index, const at::Tensor& grad) const;

  std::vector<at::Tensor> params_;
  std::vector<PyObject*> wrappers_;  // Python's objects for them
  std::vector<bool> active_;
  std::vector<int64_t> active_index_;
  at::Tensor absent_;
  std::vector<std::vector<int64_t>> sizes_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<std::vector<int64_t>> strides_;  // memory order, of the active ones
  std::vector<Seen> seen_;
  std::vector<Seen> seen_grads_;
  std::shared_ptr<PieceMemory> memory_ = std::make_shared<PieceMemory>();
  BackwardWatch watch_;
};

}  // namespace gradacc
