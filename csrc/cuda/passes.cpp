#include "passes.h"

#include "../chunk_table.h"
#include "../dense.h"

namespace gradacc::cuda {

SourceTable::SourceTable(const char* op, const std::vector<const Source*>& sources, size_t tensors,
                         const at::Tensor& weights, const Current& current) {
  const size_t m = sources.size(), addresses = m * tensors;
  const bool host_weights = lies_on_host(weights);
  args_.m = static_cast<int32_t>(m);
  args_.tensors = static_cast<int32_t>(tensors);
  args_.weights = weights.const_data_ptr<double>();
  args_.weights_on_device = !host_weights;
  words_.resize(addresses);
  for (size_t j = 0; j < m; ++j) {
    if (host_weights && args_.weights[j] == 0.0) continue;
    uint64_t* words = words_.data() + j * tensors;
    for (size_t i = 0; i < tensors; ++i) words[i] = tagged(sources[j][i].data, sources[j][i].dtype);
  }
  const bool far_addresses = static_cast<int64_t>(addresses) > kMostAddresses;
  const bool far_weights = host_weights && static_cast<int64_t>(m) > kMostWeights;
  args_.addresses = words_.data();
  args_.addresses_on_device = far_addresses;
  if (!far_addresses && !far_weights) return;
  if (far_weights) {
    const auto* bits = reinterpret_cast<const uint64_t*>(args_.weights);
    words_.insert(words_.end(), bits, bits + m);
  }
  const uint64_t* memory = current.state.ring.put(op, words_, current.device, current.stream.stream());
  args_.addresses = far_addresses ? memory : words_.data();
  if (far_weights) {
    args_.weights = reinterpret_cast<const double*>(memory + addresses);
    args_.weights_on_device = true;
  }
}

void enqueue_accumulate(const char* op, const Current& current, TableCache& tables, const Rows<AccumulateRow>& list,
                        const SourceTable& sources, const NormTensors& norm, bool read, bool store) {
  const at::Device device = current.device;
  const cudaStream_t stream = current.stream.stream();
  check_norm_type(op, norm.norm_type);
  const bool with_norm = norm.partials.numel() > 0;
  AccumulateArgs args{};
  if (with_norm) {
    int64_t chunks = 0;
    for (int64_t numel : list.numels) chunks += count_chunks(numel);
    check_cells(op, "partials", norm.partials, at::kDouble, chunks);
    check_lies_on(op, "partials", norm.partials, device);
    args.norm.found_inf = cell_of(op, "found_inf", norm.found_inf, device);
  }
  const Table table = tables.get(op, list.numels, list.rows.data(), sizeof(AccumulateRow), device, stream);
  args.table = table.slices;
  args.rows = static_cast<const AccumulateRow*>(table.rows);
  args.read = read;
  args.store = store;
  if (with_norm) {
    const Scratch scratch = current.state.scratch(op, table.slices.count, device, stream);
    args.norm.of_slices = scratch.of_slices;
    args.norm.nonfinite = scratch.nonfinite;
    args.norm.blocks_done = scratch.blocks_done;
    args.norm.partials = norm.partials.mutable_data_ptr<double>();
    args.norm.partials_numel = norm.partials.numel();
    args.norm.kind = kind_of(norm.norm_type);
  }
  check_cuda(op, launch_accumulate(args, sources.args(), stream));
  if (!with_norm) return;
  bump_version(norm.partials);
  bump_version(norm.found_inf);
}

void enqueue_update(const Current& current, TableCache& tables, Rule rule, const Rows<UpdateRow>& list,
                    const SourceTable& sources, const UpdateTensors& tensors, bool with_buffer) {
  const char* op = "update_";
  const at::Device device = current.device;
  const cudaStream_t stream = current.stream.stream();
  UpdateArgs args{};
  args.multiplier = cell_of(op, "multiplier", tensors.multiplier, device);
  args.found_inf = cell_of(op, "found_inf", tensors.found_inf, device);
  check_lies_on(op, "steps", tensors.steps, device);
  const Table table = tables.get(op, list.numels, list.rows.data(), sizeof(UpdateRow), device, stream);
  args.table = table.slices;
  args.rows = static_cast<const UpdateRow*>(table.rows);
  args.hyper = tensors.hyper.const_data_ptr<double>();
  args.group_ids = tensors.group_ids.const_data_ptr<int32_t>();
  args.touched = tensors.touched.const_data_ptr<uint8_t>();
  args.steps = tensors.steps.mutable_data_ptr<float>();
  args.blocks_done = current.state.scratch(op, 0, device, stream).blocks_done;
  args.max_grad_value = tensors.max_grad_value;
  args.rule = rule;
  args.with_buffer = with_buffer;
  check_cuda(op, launch_update(args, sources.args(), stream));
  bump_version(tensors.steps);
}

}  // namespace gradacc::cuda
