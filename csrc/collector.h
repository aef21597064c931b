// Collector: the host's walk over the parameters, once per micro-batch, in C++ instead of a Python loop.
// gradacc_fused/collector.py holds the same class in Python for installs without the compiled extension.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "piece.h"

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
  // shapes, strides, dtypes and devices.
  bool matches(const pybind11::list& param_lists) const;

  // Remembers the parameters' versions and addresses; `changed` lists the active ones written by others since.
  void remember();
  std::vector<int64_t> changed() const;
  // The same for a window: marks the parameters at its start; index (among all) of the first written since, or -1.
  void mark();
  int64_t first_written() const;

  BackwardWatch& backward_watch() { return watch_; }
  const std::vector<at::Tensor>& params() const { return params_; }

 private:
  struct Seen {
    uint32_t version;
    const void* address;
    bool operator==(const Seen& other) const { return version == other.version && address == other.address; }
  };
  static Seen see(const at::Tensor& tensor);
  void see_params(std::vector<Seen>& seen) const;
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
  std::vector<std::vector<int64_t>> sizes_, param_strides_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<std::vector<int64_t>> strides_;  // memory order, of the active ones
  std::vector<Seen> seen_;
  std::vector<Seen> marked_;
  std::vector<Seen> seen_grads_;
  std::shared_ptr<PieceMemory> memory_ = std::make_shared<PieceMemory>();
  BackwardWatch watch_;
};

}  // namespace gradacc
