// Memory order: the kernels walk every tensor of a parameter linearly, in the order of the parameter's own strides.
// A tensor with other strides, or with gaps, is copied into that order first (and back, where it is written).
#pragma once

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>

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

// Hands out pointers in the wanted order for the length of one op and copies written tensors back at its end.
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
    written_.push_back(tensor);
    if (same_order(tensor, strides)) return tensor.mutable_data_ptr();
    at::Tensor dense = copy(tensor, strides);
    copied_back_.emplace_back(tensor, dense);
    return dense.mutable_data_ptr();
  }

  // Call once the kernel has run. Bumps the version of what was written, as torch's own in-place ops do.
  void finish() {
    for (auto& [tensor, dense] : copied_back_) tensor.copy_(dense);
    for (const at::Tensor& tensor : written_) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  at::Tensor copy(const at::Tensor& tensor, at::IntArrayRef strides) {
    held_.push_back(at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor));
    return held_.back();
  }

  std::vector<at::Tensor> held_;
  std::vector<at::Tensor> written_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copied_back_;
};

}  // namespace gradacc
