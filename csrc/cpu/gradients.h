// The gradient arguments that accumulate_ and update_ share: main grads and m micro-batches, piece-major, checked and
// turned into what the tiles read.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "../checks.h"
#include "../dense.h"
#include "gather.h"

namespace gradacc {

struct GradientArguments {
  std::vector<const void*> main_grads;        // one per tensor; nullptr: starts from zero
  std::vector<int64_t> numels;                // 0 where no gradient and no main grad says how long it is
  std::vector<std::vector<int64_t>> strides;  // memory order of each tensor
  std::vector<bool> is_double;                // math dtype
  std::vector<Source> sources;                // [micro-batch][tensor]
  std::vector<const Source*> of_micro_batch;
  Gradients added;
};

// main_grads may be empty when nothing was accumulated before; the tensors' own strides decide the memory order unless
// `like` (update_'s params) is given.
inline GradientArguments gradient_arguments(const char* op, at::TensorList main_grads, at::TensorList grads,
                                            const at::Tensor& weights, DensePointers& pointers, bool read_main_grads,
                                            const at::TensorList* like) {
  TORCH_CHECK_TYPE(weights.scalar_type() == at::kDouble, op, ": weights must be float64, got ",
                   dtype_name(weights.scalar_type()), ".");
  TORCH_CHECK_VALUE(weights.dim() == 1 && weights.is_contiguous() && weights.device().is_cpu(), op,
                    ": weights must be a contiguous 1-d tensor with one weight per micro-batch, got shape ",
                    weights.sizes(), " on ", weights.device().str(), ".");
  const size_t m = weights.numel();
  const size_t count = like ? like->size() : (main_grads.empty() && m > 0 ? grads.size() / m : main_grads.size());
  check_length(op, "main_grads", main_grads.size(), count, !read_main_grads);
  TORCH_CHECK_VALUE(grads.size() == m * count, op, ": grads must have ", m * count, " tensors (", m,
                    " micro-batches of ", count, " parameters, piece-major), got ", grads.size(), ".");

  GradientArguments out;
  out.main_grads.resize(count, nullptr);
  out.numels.resize(count, 0);
  out.strides.resize(count);
  out.is_double.resize(count, false);
  out.sources.resize(count * m);
  const double* weight = weights.const_data_ptr<double>();
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor* shape = like ? &(*like)[i] : (main_grads.empty() ? nullptr : &main_grads[i]);
    for (size_t j = 0; j < m && !shape; ++j) {
      if (grads[j * count + i].numel() > 0) shape = &grads[j * count + i];
    }
    if (!shape) continue;
    check_cpu(op, like ? "params" : (main_grads.empty() ? "grads" : "main_grads"), i, *shape);
    out.is_double[i] = shape->scalar_type() == at::kDouble;
    out.numels[i] = shape->numel();
    out.strides[i] = dense_strides(*shape);
    if (!main_grads.empty()) {
      check_cpu(op, "main_grads", i, main_grads[i]);
      check_shape(op, "main_grads", i, main_grads[i], *shape);
      if (like) {
        check_math_dtype(op, "main_grads", i, main_grads[i], out.is_double[i] ? at::kDouble : at::kFloat);
      } else {
        TORCH_CHECK_TYPE(main_grads[i].scalar_type() == at::kFloat || main_grads[i].scalar_type() == at::kDouble,
                         item_name(op, "main_grads", i), " must be float32 or float64, got ",
                         dtype_name(main_grads[i].scalar_type()), ". Allocate it in the math dtype.");
      }
    }
    for (size_t j = 0; j < m; ++j) {
      const at::Tensor& grad = grads[j * count + i];
      if (grad.numel() == 0 || out.numels[i] == 0) continue;
      check_gradient(op, j * count + i, grad);
      check_cpu(op, "grads", j * count + i, grad);
      check_shape(op, "grads", j * count + i, grad, *shape);
      Source& source = out.sources[j * count + i];
      source.dtype = element_dtype(grad.scalar_type());
      if (weight[j] != 0.0) source.data = pointers.read(grad, out.strides[i]);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (read_main_grads && out.numels[i] > 0) out.main_grads[i] = pointers.read(main_grads[i], out.strides[i]);
  }
  for (size_t j = 0; j < m; ++j) out.of_micro_batch.push_back(out.sources.data() + j * count);
  out.added = {out.of_micro_batch.data(), weight, static_cast<int64_t>(m)};
  return out;
}

}  // namespace gradacc
