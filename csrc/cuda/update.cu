// update_: the accumulated gradient times the multiplier, clipped by value, into parameters and state, in one launch.
// Bytes per element (AdamW, bf16 parameter): reads the gradient, 12 of main param and moments; writes 12 + 2.
// Step counts, hyper-parameters and the skip lie on the device: nothing of a step passes through the host.
#include "gather.cuh"
#include "reduce.cuh"

namespace gradacc::cuda {
namespace {

constexpr int kBlocks = 4;  // per multiprocessor at least: half of its threads

// What all elements of a slice share.
template <typename Math>
struct SliceScalars {
  const RuleScalars<Math>& rule;  // in shared memory: as copies they would take too many registers
  Math multiplier;
  Math bound;
};

template <Formula kFormula, typename Param, typename Kind, typename Math, typename Params>
__device__ __forceinline__ void update_slice(Kind, const Params& p, const Slice& slice, const UpdateRow& row,
                                             const SliceScalars<Math>& scalars) {
  constexpr bool kAdam = kFormula == Formula::kAdam, kSgd = kFormula == Formula::kSgd;
  constexpr int kVector = sizeof(Math) == sizeof(float) ? 4 : 1;  // two doubles at once are spilled
  const Math* main_grad = static_cast<const Math*>(row.main_grad);
  Math* main_param = static_cast<Math*>(row.main_param);
  Param* param = static_cast<Param*>(row.param);
  Math* exp_avg = static_cast<Math*>(row.exp_avg);
  Math* exp_avg_sq = static_cast<Math*>(row.exp_avg_sq);
  const bool l2 = scalars.rule.weight_decay != Math(0);
  const bool buffered = !kSgd || (exp_avg && scalars.rule.momentum != Math(0));
  for_slice<kVector, Kind>(slice, [&](auto part, int64_t i) {
    constexpr int kWidth = decltype(part)::kWidth;
    using Here = typename decltype(part)::Kind;
    // Left undefined, they are spilled.
    Math grad[kWidth] = {}, value[kWidth] = {}, first[kWidth] = {}, second[kWidth] = {};
    Param stored[kWidth] = {};
    if (main_grad) load<Here::kAligned>(grad, main_grad + i);
    if (main_param) {
      load<Here::kAligned>(value, main_param + i);
    } else {
      load<Here::kAligned>(stored, param + i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) value[k] = static_cast<Math>(widen(stored[k]));
    }
    if (buffered) load<Here::kAligned>(first, exp_avg + i);
    if (kAdam) load<Here::kAligned>(second, exp_avg_sq + i);
    add_micro_batches(Here(), grad, p.sources, slice.tensor, i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      Math scaled = scaled_and_clamped(grad[k], scalars.multiplier, scalars.bound);
      if (l2) scaled = decayed_gradient<true>(scaled, value[k], scalars.rule);
      if constexpr (kAdam) {
        adam<false>(value[k], scaled, first[k], second[k], scalars.rule);
      } else if constexpr (!kSgd) {
        lion(value[k], scaled, first[k], scalars.rule);
      } else if (buffered) {
        sgd_momentum<false>(value[k], scaled, first[k], scalars.rule);
      } else {
        sgd<false>(value[k], scaled, scalars.rule);
      }
      narrow(value[k], stored[k]);
    }
    if (main_param) store<Here::kAligned>(main_param + i, value);
    if (buffered) store<Here::kAligned>(exp_avg + i, first);
    if (kAdam) store<Here::kAligned>(exp_avg_sq + i, second);
    store<Here::kAligned>(param + i, stored);
  });
}

template <Formula kFormula, typename Param, typename Math, typename Params>
__device__ __forceinline__ void update_any(const Params& p, const Slice& slice, const UpdateRow& row, double multiplier,
                                           const RuleScalars<Math>& rule) {
  const SliceScalars<Math> scalars{rule, static_cast<Math>(multiplier) * rule.sign,
                                   static_cast<Math>(p.max_grad_value)};
  if constexpr (sizeof(Math) == sizeof(float)) {
    const auto aligned = [&](const void* array, int64_t bytes) {
      return is_aligned(static_cast<const char*>(array) + slice.start * bytes, 16);
    };
    if (aligned(row.main_grad, sizeof(Math)) && aligned(row.main_param, sizeof(Math)) &&
        aligned(row.exp_avg, sizeof(Math)) && aligned(row.exp_avg_sq, sizeof(Math)) &&
        aligned(row.param, sizeof(Param)) && is_uniform<Param>(p.sources, slice.tensor, slice.start)) {
      return update_slice<kFormula, Param>(Uniform<Param>(), p, slice, row, scalars);
    }
  }
  update_slice<kFormula, Param>(Mixed(), p, slice, row, scalars);
}

// The step that a tensor is at once this update is done.
template <typename Params>
__device__ __forceinline__ float next_step(const Params& p, int64_t tensor) {
  const double* row = p.hyper + int64_t{p.group_ids[tensor]} * kHyperColumns;
  return p.steps[tensor] + (step_counts(p.rule, row, p.with_buffer) ? 1.0f : 0.0f);
}

// A slice's scalars, computed by one thread for all.
template <typename Math, typename Params>
__device__ __forceinline__ const RuleScalars<Math>& shared_scalars(const Params& p, int tensor) {
  __shared__ double shared[(sizeof(RuleScalars<Math>) + sizeof(double) - 1) / sizeof(double)];
  __syncthreads();  // the last slice's were read
  if (threadIdx.x == 0) {
    const double* row = p.hyper + int64_t{p.group_ids[tensor]} * kHyperColumns;
    const RuleScalars<Math> computed = rule_scalars<Math>(p.rule, row, next_step(p, tensor));
    memcpy(shared, &computed, sizeof(computed));
  }
  __syncthreads();
  return *reinterpret_cast<const RuleScalars<Math>*>(shared);
}

template <Formula kFormula, int64_t kAddresses>
__global__ void __launch_bounds__(kThreads, kBlocks)
    update_kernel(const Params<UpdateArgs, kAddresses> __grid_constant__ p) {
  const double multiplier = read(p.multiplier);
  if (read(p.found_inf) != 0.0 || exponent_full(multiplier)) return;  // the step is skipped
  for (int64_t s = blockIdx.x; s < p.table.count; s += gridDim.x) {
    const Slice slice = p.table.slices[s];
    if (!p.touched[slice.tensor]) continue;
    const UpdateRow row = p.rows[slice.tensor];
    if (row.is_double) {
      update_any<kFormula, double>(p, slice, row, multiplier, shared_scalars<double>(p, slice.tensor));
      continue;
    }
    const RuleScalars<float>& rule = shared_scalars<float>(p, slice.tensor);
    switch (static_cast<Dtype>(row.param_dtype)) {
      case Dtype::kBFloat16:
        update_any<kFormula, BFloat16>(p, slice, row, multiplier, rule);
        break;
      case Dtype::kFloat16:
        update_any<kFormula, Float16>(p, slice, row, multiplier, rule);
        break;
      default:
        update_any<kFormula, float>(p, slice, row, multiplier, rule);
    }
  }
  if (!last_block(p.blocks_done)) return;
  for (int t = threadIdx.x; t < p.sources.tensors; t += kThreads) {
    if (p.touched[t]) p.steps[t] = next_step(p, t);
  }
  if (threadIdx.x == 0) atomicExch(p.blocks_done, 0u);
}

template <Formula kFormula, int64_t kAddresses>
cudaError_t launch(const UpdateArgs& args, const SourceArgs& sources, cudaStream_t stream) {
  return launch_pass<update_kernel<kFormula, kAddresses>, UpdateArgs, kAddresses>(args, sources, stream);
}

template <Formula kFormula>
cudaError_t launch_rule(const UpdateArgs& args, const SourceArgs& sources, cudaStream_t stream) {
  return fits(sources, kFewAddresses) ? launch<kFormula, kFewAddresses>(args, sources, stream)
                                      : launch<kFormula, kMostAddresses>(args, sources, stream);
}

}  // namespace

cudaError_t launch_update(const UpdateArgs& args, const SourceArgs& sources, cudaStream_t stream) {
  if (sources.tensors == 0) return cudaSuccess;
  switch (formula_of(args.rule)) {
    case Formula::kAdam:
      return launch_rule<Formula::kAdam>(args, sources, stream);
    case Formula::kSgd:
      return launch_rule<Formula::kSgd>(args, sources, stream);
    default:
      return launch_rule<Formula::kLion>(args, sources, stream);
  }
}

}  // namespace gradacc::cuda
