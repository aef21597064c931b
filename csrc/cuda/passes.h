// The passes as the ops (ops.h) and the optimizer's own way (hot_path.h) enqueue them, once lists are addresses.
#pragma once

#include <cstdint>
#include <vector>

#include "../checks.h"
#include "../source.h"
#include "../update_row.h"
#include "device.h"
#include "launch.h"
#include "stream_state.h"

namespace gradacc::cuda {

// A one-element array on the device, for a kernel.
inline Cell cell_of(const char* op, const char* name, const at::Tensor& tensor, at::Device device) {
  check_cell(op, name, tensor);
  check_lies_on(op, name, tensor, device);
  return {tensor.mutable_data_ptr(), tensor.scalar_type() == at::kDouble};
}

// The gradients' addresses and weights, in a form that a launch takes.
class SourceTable {
 public:
  // sources: of each micro-batch, one per tensor; weights: one per micro-batch, on the device or the host.
  SourceTable(const char* op, const std::vector<const Source*>& sources, size_t tensors, const at::Tensor& weights,
              const Current& current);
  SourceTable(const SourceTable&) = delete;  // args point into it
  SourceTable& operator=(const SourceTable&) = delete;

  // Whether tensor i has a gradient that counts in micro-batch j.
  bool has(size_t j, size_t i) const { return words_[j * args_.tensors + i] != 0; }
  const SourceArgs& args() const { return args_; }

 private:
  std::vector<uint64_t> words_;
  SourceArgs args_{};
};

// A list of tensors, for the static table of its pass.
template <typename Row>
struct Rows {
  const std::vector<int64_t>& numels;
  const std::vector<Row>& rows;
};

struct NormTensors {
  const at::Tensor &partials, &found_inf;  // partials without elements: no norm
  double norm_type;
};

// tables: where the list's table is looked for, and kept. read: the sum starts from the main grads; store: it goes
// there.
void enqueue_accumulate(const char* op, const Current& current, TableCache& tables, const Rows<AccumulateRow>& list,
                        const SourceTable& sources, const NormTensors& norm, bool read, bool store);

struct UpdateTensors {
  const at::Tensor &hyper, &group_ids, &touched;  // on the device
  const at::Tensor &steps, &multiplier, &found_inf;
  double max_grad_value;
};

// with_buffer: sgd has momentum buffers.
void enqueue_update(const Current& current, TableCache& tables, Rule rule, const Rows<UpdateRow>& list,
                    const SourceTable& sources, const UpdateTensors& tensors, bool with_buffer);

}  // namespace gradacc::cuda
