#include "collector.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <unordered_map>

#include "checks.h"

namespace gradacc {

struct BackwardWatch::State {
  std::atomic<bool> in_flight{false};
};

BackwardWatch::~BackwardWatch() { unwatch(); }

void BackwardWatch::watch(const std::vector<at::Tensor>& params) {
  unwatch();
  state_ = std::make_shared<State>();
  for (const at::Tensor& param : params) {
    if (!param.requires_grad() || !param.is_leaf()) continue;
    auto accumulator = torch::autograd::impl::grad_accumulator(param);
    if (!accumulator) continue;
    auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [state = state_](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
          if (!state->in_flight.exchange(true)) {
            torch::autograd::Engine::get_default_engine().queue_callback([state] { state->in_flight = false; });
          }
          return outputs;
        });
    const uintptr_t key = accumulator->add_post_hook(std::move(hook));
    hooks_.emplace_back(std::move(accumulator), key);
  }
}

void BackwardWatch::unwatch() {
  for (auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
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
    out.grads.push_back(grad.layout() == at::kStrided ? grad : grad.to_dense());
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
    // One use per tensor of the piece, and no Python or C++ reference to the tensor besides the piece's own.
    if (grad.storage().use_count() != uses[grad.storage().unsafeGetStorageImpl()]) return false;
    if (!only_ours(grad)) return false;
  }
  return true;
}

int64_t Collector::first_with_grad() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].grad().defined()) return static_cast<int64_t>(i);
  }
  return -1;
}

int64_t Collector::first_outside_with_grad() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!active_[i] && params_[i].requires_grad() && params_[i].grad().defined()) return static_cast<int64_t>(i);
  }
  return -1;
}

void Collector::clear_grads() {
  for (at::Tensor& param : params_) param.mutable_grad().reset();
}

bool Collector::matches(const pybind11::list& param_lists) const {
  size_t i = 0;
  for (const pybind11::handle& group : param_lists) {
    PyObject* list = group.ptr();
    if (!PyList_Check(list)) return false;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(list); ++k, ++i) {
      if (i >= params_.size()) return false;
      PyObject* item = PyList_GET_ITEM(list, k);
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

Collector::Seen Collector::see(size_t index) const {
  const at::Tensor& param = params_[index];
  return {param.is_inference() ? 0u : static_cast<uint32_t>(param._version()),
          param.has_storage() ? param.const_data_ptr() : nullptr};
}

void Collector::remember() {
  seen_.clear();
  for (int64_t index : active_index_) seen_.push_back(see(index));
}

std::vector<int64_t> Collector::changed() const {
  std::vector<int64_t> out;
  for (size_t k = 0; k < seen_.size(); ++k) {
    if (!(see(active_index_[k]) == seen_[k])) out.push_back(static_cast<int64_t>(k));
  }
  return out;
}

}  // namespace gradacc
