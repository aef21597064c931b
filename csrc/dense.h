// Memory order: the kernels walk every tensor of a parameter linearly, in the order of the parameter's own strides.
// A tensor with other strides, or with gaps, is copied into that order first (and back, where it is written).
#pragma once

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>

#include <utility>
#include <vector>

namespace gradacc {

inline bool same_order(const at::Tensor& tensor, at::IntArrayRef strides) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != strides[d]) return false;
  }
  return true;
}

// The strides of `like` without its gaps.
inline std::vector<int64_t> dense_strides(const at::Tensor& like) {
  if (like.is_non_overlapping_and_dense()) return like.strides().vec();
  return at::infer_dense_strides(like.sizes(), like.strides());
}

// Runs body(begin, end) for shares of 0 to count, long lists on all of torch's threads: what it costs to look at a
// tensor is the wait for its memory.
template <typename Body>
void share_tensors(size_t count, const Body& body) {
  constexpr int64_t kLeastShare = 512;
  at::parallel_for(0, static_cast<int64_t>(count), kLeastShare,
                   [&](int64_t begin, int64_t end) { body(static_cast<size_t>(begin), static_cast<size_t>(end)); });
}

// The same, tensor by tensor: body(i).
template <typename Body>
void for_each_tensor(size_t count, const Body& body) {
  share_tensors(count, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) body(i);
  });
}

// As torch's own in-place ops do; an inference tensor has no version.
inline void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Where a list of tensors lies, looked up once. A tensor whose memory was exchanged (tensor.data = ..., resize_) is
// looked up anew; the ones that stayed cost a few comparisons.
class Located {
 public:
  Located() = default;
  // A tensor without elements is located nowhere.
  Located(std::vector<at::Tensor> tensors, const char* name) : tensors_(std::move(tensors)), name_(name) {
    for (const at::Tensor& tensor : tensors_)
      places_.push_back({tensor.unsafeGetTensorImpl(), nullptr, nullptr, 0, nullptr});
  }

  bool empty() const { return tensors_.empty(); }
  size_t size() const { return tensors_.size(); }
  const at::Tensor& operator[](size_t i) const { return tensors_[i]; }

  // Asks for what write() will compare, for a tensor further on in the list.
  void announce(size_t i) const {
    constexpr size_t kStep = 8;
    if (i + 2 * kStep < places_.size()) __builtin_prefetch(&places_[i + 2 * kStep].impl->unsafe_storage());
    if (i + kStep < places_.size() && places_[i + kStep].storage) {
      __builtin_prefetch(&places_[i + kStep].storage->data_ptr());
    }
  }

  // strides: the memory order that is expected.
  void* write(const char* op, size_t i, at::IntArrayRef sizes, at::IntArrayRef strides, at::Device device) {
    Place& place = places_[i];
    if (place.data && place.impl->unsafe_storage().unsafeGetStorageImpl() == place.storage &&
        place.storage->data() == place.base && place.impl->storage_offset() == place.offset &&
        place.impl->sizes() == sizes && same_order(tensors_[i], strides)) {
      return place.data;
    }
    const at::Tensor& tensor = tensors_[i];
    if (tensor.numel() == 0) return nullptr;
    TORCH_CHECK_VALUE(tensor.sizes() == sizes && tensor.device() == device && same_order(tensor, strides), op, ": ",
                      name_, "[", i, "] must have shape ", sizes, " and strides ", strides, " on ", device.str(),
                      ", got ", tensor.sizes(), ", ", tensor.strides(), " on ", tensor.device().str(),
                      ". Replace state through load_state_dict().");
    void* data = tensor.mutable_data_ptr();
    place = {place.impl, tensor.storage().unsafeGetStorageImpl(), tensor.storage().data(), tensor.storage_offset(),
             data};
    return data;
  }

 private:
  struct Place {
    c10::TensorImpl* impl;
    const c10::StorageImpl* storage;
    const void* base;
    int64_t offset;
    void* data;
  };
  std::vector<at::Tensor> tensors_;
  const char* name_ = "";
  std::vector<Place> places_;
};

// Hands out pointers in the wanted order for the length of one op and copies written tensors back at its end. The
// tensors it is given have to live as long.
class DensePointers {
 public:
  const void* read(const at::Tensor& tensor, at::IntArrayRef strides) {
    if (same_order(tensor, strides)) return tensor.const_data_ptr();
    return copy(tensor, strides).const_data_ptr();
  }

  void* write(const at::Tensor& tensor, at::IntArrayRef strides) {
    TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                      "a tensor that is written must not overlap itself (an expanded tensor does), got strides ",
                      tensor.strides(), " for shape ", tensor.sizes(), ". Call .contiguous() or .clone() on it.");
    written_.push_back(&tensor);
    if (same_order(tensor, strides)) return tensor.mutable_data_ptr();
    at::Tensor dense = copy(tensor, strides);
    copied_back_.emplace_back(&tensor, dense);
    return dense.mutable_data_ptr();
  }

  // Call once the kernel has run.
  void finish() {
    for (auto& [tensor, dense] : copied_back_) tensor->copy_(dense);
    for (const at::Tensor* tensor : written_) bump_version(*tensor);
  }

 private:
  at::Tensor copy(const at::Tensor& tensor, at::IntArrayRef strides) {
    held_.push_back(at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor));
    return held_.back();
  }

  std::vector<at::Tensor> held_;
  std::vector<const at::Tensor*> written_;
  std::vector<std::pair<const at::Tensor*, at::Tensor>> copied_back_;
};

}  // namespace gradacc
