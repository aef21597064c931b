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

namespace gradacc {

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
    if (active_[i]) active_index_.push_back(static_cast<int64_t>(i));
    sizes_.push_back(params_[i].sizes().vec());
    dtypes_.push_back(params_[i].scalar_type());
  }
}

Collector::Collected Collector::collect(const at::Tensor& touched, bool clear) {
  check_cells("collect", "touched", touched, at::kByte, static_cast<int64_t>(active_index_.size()));
  uint8_t* touch = touched.mutable_data_ptr<uint8_t>();
  Collected out;
  out.grads.reserve(active_index_.size());
  for (size_t k = 0; k < active_index_.size(); ++k) {
    at::Tensor& grad = params_[active_index_[k]].mutable_grad();
    if (!grad.defined()) {
      out.grads.push_back(absent_);
      continue;
    }
    touch[k] = 1;
    ++out.present;
    // An fp64 gradient of another parameter would be measured and applied in different dtypes.
    const bool narrow = grad.scalar_type() == at::kDouble && params_[active_index_[k]].scalar_type() != at::kDouble;
    const at::Tensor dense = grad.layout() == at::kStrided ? grad : grad.to_dense();
    out.grads.push_back(narrow ? dense.to(at::kFloat) : dense);
    if (clear) grad.reset();
  }
  return out;
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

}  // namespace

bool Collector::owned(const std::vector<at::Tensor>& grads) {
  std::unordered_map<const c10::StorageImpl*, size_t> uses;
  for (const at::Tensor& grad : grads) {
    if (!grad.has_storage()) return false;
    if (grad.numel() > 0) ++uses[grad.storage().unsafeGetStorageImpl()];
  }
  for (const at::Tensor& grad : grads) {
    if (grad.numel() == 0) continue;
    // Memory that torch did not allocate has owners that its counts do not know.
    if (grad.device().is_cpu() &&
        grad.storage().data_ptr().get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter()) {
      return false;
    }
    // One use per tensor of the piece, and no Python or C++ reference to the tensor besides the piece's own.
    if (grad.storage().use_count() != uses[grad.storage().unsafeGetStorageImpl()]) return false;
    if (!only_ours(grad)) return false;
  }
  return true;
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
      PyObject* item = items[k];
      if (!THPVariable_Check(item)) return false;
      const at::Tensor& param = THPVariable_Unpack(item);
      if (param.unsafeGetTensorImpl() != params_[i].unsafeGetTensorImpl()) return false;
      if (param.requires_grad() != active_[i]) return false;
      if (param.sizes() != at::IntArrayRef(sizes_[i]) || param.scalar_type() != dtypes_[i]) return false;
      if (param.device() != absent_.device()) return false;
    }
  }
  return i == params_.size();
}

Collector::Seen Collector::see(const at::Tensor& tensor) {
  if (!tensor.defined()) return {0u, nullptr};
  return {tensor.is_inference() ? 0u : static_cast<uint32_t>(tensor._version()),
          tensor.has_storage() ? tensor.const_data_ptr() : tensor.unsafeGetTensorImpl()};
}

void Collector::remember() {
  seen_.clear();
  for (int64_t index : active_index_) seen_.push_back(see(params_[index]));
}

std::vector<int64_t> Collector::changed() const {
  std::vector<int64_t> out;
  for (size_t k = 0; k < seen_.size(); ++k) {
    if (!(see(params_[active_index_[k]]) == seen_[k])) out.push_back(static_cast<int64_t>(k));
  }
  return out;
}

}  // namespace gradacc
