#include "collector.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <unordered_map>

#include "checks.h"
#include "cpu/simd.h"
#include "dense.h"

namespace gradacc {

namespace {

// A walk over a list asks for what it will read a few tensors further on, each step by the pointer that the one before
// has asked for.
void ask(const void* object, int lines) { prefetch(object, 0, lines, kLine); }

}  // namespace

Piece::Piece(std::shared_ptr<PieceMemory> memory, size_t count) : memory_(std::move(memory)) {
  PieceMemory::Lists lists = memory_->take();
  grads = std::move(lists.grads);
  sources = std::move(lists.sources);
  grads.resize(count);
  sources.assign(count, Source());
}

Piece::~Piece() {
  // Asks for what freeing a gradient reads.
  constexpr size_t kStep = 6;
  const size_t count = grads.size();
  for (size_t k = 0; k < count; ++k) {
    if (k + 3 * kStep < count && grads[k + 3 * kStep].defined()) ask(grads[k + 3 * kStep].unsafeGetTensorImpl(), 3);
    if (k + 2 * kStep < count) {
      const at::Tensor& grad = grads[k + 2 * kStep];
      if (grad.defined() && grad.has_storage()) ask(grad.storage().unsafeGetStorageImpl(), 2);
    }
    if (k + kStep < count && sources[k + kStep].data) {
      ask(static_cast<const char*>(sources[k + kStep].data) - kLine, 2);  // malloc's own entry lies before it
    }
    grads[k].reset();
  }
  memory_->give_back({std::move(grads), std::move(sources)});
}

struct BackwardWatch::State {
  std::atomic<bool> in_flight{false};
};

BackwardWatch::~BackwardWatch() { unwatch(); }

namespace {

struct BeginHook : torch::autograd::FunctionPreHook {
  explicit BeginHook(std::function<void()> begin) : begin_(std::move(begin)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    begin_();
    return grads;
  }
  std::function<void()> begin_;
};

}  // namespace

void BackwardWatch::watch(const std::vector<at::Tensor>& params) {
  const bool unfinished_before = unfinished();
  unwatch();
  state_ = std::make_shared<State>();
  state_->in_flight = unfinished_before;
  const auto begin = [state = state_] {
    if (!state->in_flight.exchange(true)) {
      torch::autograd::Engine::get_default_engine().queue_callback([state] { state->in_flight = false; });
    }
  };
  for (const at::Tensor& param : params) {
    if (!param.requires_grad() || !param.is_leaf()) continue;
    auto accumulator = torch::autograd::impl::grad_accumulator(param);
    if (!accumulator) continue;
    auto hook = std::make_unique<BeginHook>(begin);
    torch::autograd::FunctionPreHook* key = hook.get();
    accumulator->add_pre_hook(std::move(hook));
    hooks_.emplace_back(std::move(accumulator), key);
  }
}

void BackwardWatch::unwatch() {
  for (auto& [accumulator, key] : hooks_) {
    auto& hooks = accumulator->pre_hooks();
    hooks.erase(std::remove_if(hooks.begin(), hooks.end(), [k = key](const auto& hook) { return hook.get() == k; }),
                hooks.end());
  }
  hooks_.clear();
}

bool BackwardWatch::unfinished() const { return state_ && state_->in_flight; }
void BackwardWatch::reset() {
  if (state_) state_->in_flight = false;
}

Collector::Collector(std::vector<at::Tensor> params, std::vector<bool> active, at::Tensor absent)
    : params_(std::move(params)), active_(std::move(active)), absent_(std::move(absent)) {
  TORCH_CHECK_VALUE(params_.size() == active_.size(), "Collector: active must have one flag per parameter (",
                    params_.size(), "), got ", active_.size(), ".");
  for (size_t i = 0; i < params_.size(); ++i) {
    if (active_[i]) {
      active_index_.push_back(static_cast<int64_t>(i));
      strides_.push_back(dense_strides(params_[i]));
    }
    PyObject* wrapper = THPVariable_Wrap(params_[i]);  // it lives as long as its tensor
    wrappers_.push_back(wrapper);
    Py_DECREF(wrapper);
    sizes_.push_back(params_[i].sizes().vec());
    param_strides_.push_back(params_[i].strides().vec());
    dtypes_.push_back(params_[i].scalar_type());
  }
}

namespace {

// Whether a living Python wrapper is referred to by its tensor (so by torch's own account one reference more than what
// Python code holds). It was not in older versions; asked of a tensor made for the purpose.
bool tensors_hold_their_wrappers() {
  const at::Tensor probe = at::empty({1});
  PyObject* wrapper = THPVariable_Wrap(probe);
  const bool holds = Py_REFCNT(wrapper) > 1;
  Py_DECREF(wrapper);
  return holds;
}

// Whether the piece has the only reference to a gradient. A wrapper that Python code once made and dropped counts for
// nothing: it may stay alive with its tensor.
bool only_ours(const at::Tensor& grad) {
  if (grad.use_count() == 1) return true;
  static const bool held_wrappers = tensors_hold_their_wrappers();
  if (!held_wrappers || grad.use_count() != 2) return false;
  PyObject* wrapper = THPVariable_Wrap(grad);
  const bool was_the_wrappers = grad.use_count() == 2;  // else: a C++ reference, and the wrapper is new
  const bool alone = was_the_wrappers && Py_REFCNT(wrapper) == 2;
  Py_DECREF(wrapper);
  return alone;
}

// Memory that torch did not allocate has owners that its counts do not know.
bool allocated_by_torch(const at::Tensor& grad) {
  static const auto on_host = c10::GetDefaultCPUAllocator()->raw_deleter();
  const auto deleter = grad.storage().unsafeGetStorageImpl()->data_ptr().get_deleter();
  if (grad.device().is_cpu()) return deleter == on_host;
  return deleter && deleter == c10::GetAllocator(grad.device().type())->raw_deleter();
}

// Whether nobody else can write these gradients: each storage is used by them alone.
bool all_ours(const std::vector<at::Tensor>& grads) {
  std::unordered_map<const c10::StorageImpl*, size_t> shared;  // storages with more than one use, and ours of them
  for (const at::Tensor& grad : grads) {
    if (!grad.defined() || grad.numel() == 0) continue;
    if (!grad.has_storage() || !allocated_by_torch(grad)) return false;
    // No Python or C++ reference to the tensor besides ours.
    if (!only_ours(grad)) return false;
    if (grad.storage().use_count() != 1) ++shared[grad.storage().unsafeGetStorageImpl()];
  }
  for (const at::Tensor& grad : grads) {
    if (shared.empty()) break;
    if (!grad.defined() || grad.numel() == 0) continue;
    const auto uses = shared.find(grad.storage().unsafeGetStorageImpl());
    if (uses != shared.end() && grad.storage().use_count() != uses->second) return false;
  }
  return true;
}

}  // namespace

void Collector::announce(size_t k, size_t count) const {
  constexpr size_t kStep = 6;
  const auto param = [this](size_t i) { return params_[active_index_[i]].unsafeGetTensorImpl(); };
  if (k + 4 * kStep < count) ask(param(k + 4 * kStep), 1);
  if (k + 3 * kStep < count) ask(param(k + 3 * kStep)->autograd_meta(), 2);
  if (k + 2 * kStep < count) {
    const at::Tensor& grad = params_[active_index_[k + 2 * kStep]].grad();
    if (grad.defined()) ask(grad.unsafeGetTensorImpl(), 3);
  }
  if (k + kStep < count) {
    const at::Tensor& grad = params_[active_index_[k + kStep]].grad();
    if (grad.defined() && grad.has_storage()) ask(grad.storage().unsafeGetStorageImpl(), 2);
  }
}

void Collector::announce_param(size_t i) const {
  constexpr size_t kStep = 8;
  if (i + 2 * kStep < params_.size()) ask(params_[i + 2 * kStep].unsafeGetTensorImpl(), 3);
  if (i + kStep >= params_.size()) return;
  const at::Tensor& param = params_[i + kStep];
  ask(param.unsafeGetTensorImpl()->autograd_meta(), 1);
  if (param.has_storage()) ask(param.storage().unsafeGetStorageImpl(), 2);
}

void Collector::check_grad(int64_t index, const at::Tensor& grad) const {
  TORCH_CHECK_TYPE(is_gradient_dtype(grad.scalar_type()), "the gradient of parameter ", index,
                   " must be float32, float64, float16 or bfloat16, got ", dtype_name(grad.scalar_type()), ".");
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(sizes_[index]) && grad.device() == absent_.device(),
                    "the gradient of parameter ", index, " must have shape ", at::IntArrayRef(sizes_[index]), " on ",
                    absent_.device().str(), ", got ", grad.sizes(), " on ", grad.device().str(), ".");
}

bool Collector::usual(size_t k, const at::Tensor& grad) const {
  const int64_t index = active_index_[k];
  return grad.layout() == at::kStrided && grad.has_storage() && grad.device() == absent_.device() &&
         grad.sizes() == at::IntArrayRef(sizes_[index]) && same_order(grad, strides_[k]) &&
         (grad.scalar_type() == dtypes_[index] || grad.scalar_type() == at::kFloat);
}

at::Tensor Collector::made_usual(size_t k, const at::Tensor& grad) const {
  const int64_t index = active_index_[k];
  check_grad(index, grad);
  at::Tensor made = grad.layout() == at::kStrided ? grad : grad.to_dense();
  // An fp64 gradient of another parameter would be measured and applied in different dtypes.
  if (made.scalar_type() == at::kDouble && dtypes_[index] != at::kDouble) made = made.to(at::kFloat);
  if (same_order(made, strides_[k])) return made;
  return at::empty_strided(made.sizes(), strides_[k], made.options()).copy_(made);
}

std::shared_ptr<Piece> Collector::collect(const at::Tensor& touched, bool clear) {
  const size_t count = active_index_.size();
  check_cells("collect", "touched", touched, at::kByte, static_cast<int64_t>(count));
  auto piece = std::make_shared<Piece>(memory_, count);
  const auto of_param = [this](size_t k) -> at::Tensor& { return params_[active_index_[k]].mutable_grad(); };
  std::atomic<int64_t> present{0}, bytes{0};
  std::atomic<bool> all_usual{true}, all_alone{true};
  share_tensors(count, [&](size_t begin, size_t end) {
    int64_t here = 0, here_bytes = 0;
    bool alone = true;
    for (size_t k = begin; k < end; ++k) {
      announce(k, end);
      at::Tensor& grad = of_param(k);
      if (!grad.defined()) continue;
      if (!usual(k, grad)) {
        all_usual = false;
        continue;
      }
      at::Tensor& taken = piece->grads[k];
      if (clear) {
        taken = std::move(grad);
      } else {
        taken = grad;
      }
      ++here;
      here_bytes += static_cast<int64_t>(taken.nbytes());
      piece->locate(k);
      alone = alone && taken.use_count() == 1 && taken.storage().use_count() == 1 && allocated_by_torch(taken);
    }
    present += here;
    bytes += here_bytes;
    if (!alone) all_alone = false;
  });
  piece->present = present;
  piece->bytes = bytes;
  if (!all_usual) {
    try {
      std::vector<std::pair<size_t, at::Tensor>> made;
      for (size_t k = 0; k < count; ++k) {
        if (!piece->grads[k].defined() && of_param(k).defined()) made.emplace_back(k, made_usual(k, of_param(k)));
      }
      for (auto& [k, grad] : made) {
        ++piece->present;
        piece->bytes += static_cast<int64_t>(grad.nbytes());
        piece->grads[k] = std::move(grad);
        piece->locate(k);
        if (clear) of_param(k).reset();
      }
    } catch (...) {  // .grad stays unless all of them are usable
      for (size_t k = 0; clear && k < count; ++k) {
        if (piece->grads[k].defined()) of_param(k) = std::move(piece->grads[k]);
      }
      throw;
    }
  }
  uint8_t* touch = touched.mutable_data_ptr<uint8_t>();
  for (size_t k = 0; k < count; ++k) {
    if (piece->grads[k].defined()) touch[k] = 1;
  }
  piece->exclusive = clear && ((all_usual && all_alone) || all_ours(piece->grads));
  return piece;
}

int64_t Collector::first_came_back(const Piece& piece, const std::vector<std::shared_ptr<Piece>>& held) const {
  for (const auto& earlier : held) {
    for (size_t k = 0; k < piece.sources.size(); ++k) {
      if (piece.sources[k].data && piece.sources[k].data == earlier->sources[k].data) return active_index_[k];
    }
  }
  return -1;
}

int64_t Collector::first_with_grad() const {
  for (int64_t index : active_index_) {
    if (params_[index].grad().defined()) return index;
  }
  return -1;
}

void Collector::remember_grads() {
  seen_grads_.clear();
  for (int64_t index : active_index_) seen_grads_.push_back(see(params_[index].grad()));
}

bool Collector::grads_unchanged() const {
  if (seen_grads_.size() != active_index_.size()) return false;
  for (size_t k = 0; k < seen_grads_.size(); ++k) {
    if (!(see(params_[active_index_[k]].grad()) == seen_grads_[k])) return false;
  }
  return true;
}

void Collector::clear_grads() {
  for (at::Tensor& param : params_) param.mutable_grad().reset();
}

bool Collector::matches(const pybind11::list& param_lists) const {
  size_t i = 0;
  for (const pybind11::handle& group : param_lists) {
    const auto sequence = pybind11::reinterpret_steal<pybind11::object>(PySequence_Fast(group.ptr(), "params"));
    if (!sequence) throw pybind11::error_already_set();
    PyObject** items = PySequence_Fast_ITEMS(sequence.ptr());
    for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(sequence.ptr()); ++k, ++i) {
      if (i >= params_.size()) return false;
      if (items[k] == wrappers_[i]) continue;
      if (!THPVariable_Check(items[k])) return false;
      if (THPVariable_Unpack(items[k]).unsafeGetTensorImpl() != params_[i].unsafeGetTensorImpl()) return false;
    }
  }
  std::atomic<bool> same{i == params_.size()};
  for_each_tensor(i, [&](size_t k) {
    announce_param(k);
    const at::Tensor& param = params_[k];
    const bool as_described = param.requires_grad() == active_[k] && param.sizes() == at::IntArrayRef(sizes_[k]) &&
                              param.strides() == at::IntArrayRef(param_strides_[k]) &&
                              param.scalar_type() == dtypes_[k] && param.device() == absent_.device();
    if (!as_described) same = false;
  });
  return same;
}

Collector::Seen Collector::see(const at::Tensor& tensor) {
  if (!tensor.defined()) return {0u, nullptr};
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const uint32_t version = tensor.is_inference() ? 0u : impl->version_counter().current_version();
  if (!impl->has_storage()) return {version, impl};
  return {version, static_cast<const char*>(impl->unsafe_storage().data()) + impl->storage_offset()};
}

void Collector::see_params(std::vector<Seen>& seen) const {
  seen.resize(active_index_.size());
  for_each_tensor(seen.size(), [&](size_t k) {
    announce_param(active_index_[k]);
    seen[k] = see(params_[active_index_[k]]);
  });
}

void Collector::remember() { see_params(seen_); }
void Collector::mark() { see_params(marked_); }

int64_t Collector::first_written() const {
  for (size_t k = 0; k < marked_.size(); ++k) {
    announce_param(active_index_[k]);
    if (!(see(params_[active_index_[k]]) == marked_[k])) return active_index_[k];
  }
  return -1;
}

std::vector<int64_t> Collector::changed() const {
  std::vector<uint8_t> differs(seen_.size());
  for_each_tensor(seen_.size(), [&](size_t k) {
    announce_param(active_index_[k]);
    differs[k] = !(see(params_[active_index_[k]]) == seen_[k]);
  });
  std::vector<int64_t> out;
  for (size_t k = 0; k < seen_.size(); ++k) {
    if (differs[k]) out.push_back(static_cast<int64_t>(k));
  }
  return out;
}

}  // namespace gradacc
