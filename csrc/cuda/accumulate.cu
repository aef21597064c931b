// accumulate_: m micro-batches into the main grads in one launch, with the closing norm where it is asked for.
// Bytes per element: reads m gradients and (unless overwriting) the main grad, writes the main grad (if stored).
// Deterministic: each element and each partial has one writer, sums have a fixed order.
#include "gather.cuh"
#include "reduce.cuh"

namespace gradacc::cuda {
namespace {

constexpr int kBlocks = 4;  // per multiprocessor at least: half of its threads

// What a thread knows of the norm of the elements that it has seen.
struct ThreadNorm {
  double folded = 0.0;
  bool nonfinite = false;
};

template <typename Kind, typename Math, typename Params>
__device__ __forceinline__ ThreadNorm accumulate_slice(Kind, const Params& p, const Slice& slice, Math* main_grad) {
  constexpr int kVector = sizeof(Math) == sizeof(float) ? 8 : 2;
  ThreadNorm norm;
  for_slice<kVector, Kind>(slice, [&](auto part, int64_t i) {
    constexpr int kWidth = decltype(part)::kWidth;
    using Here = typename decltype(part)::Kind;
    Math sum[kWidth] = {};
    if (p.read && main_grad) load<Here::kAligned>(sum, main_grad + i);
    add_micro_batches(Here(), sum, p.sources, slice.tensor, i);
    if (p.store && main_grad) store<Here::kAligned>(main_grad + i, sum);
    if (!p.norm.of_slices) return;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      norm.folded = with_element(norm.folded, sum[k], p.norm.kind);
      norm.nonfinite = norm.nonfinite || exponent_full(sum[k]);
    }
  });
  return norm;
}

template <typename Params>
__device__ __forceinline__ ThreadNorm accumulate_any(const Params& p, const Slice& slice, const AccumulateRow& row) {
  if (row.is_double) return accumulate_slice(Mixed(), p, slice, static_cast<double*>(row.main_grad));
  float* main_grad = static_cast<float*>(row.main_grad);
  if (is_aligned(main_grad + slice.start, 16)) {
    if (is_uniform<BFloat16>(p.sources, slice.tensor, slice.start)) {
      return accumulate_slice(Uniform<BFloat16>(), p, slice, main_grad);
    }
    if (is_uniform<float>(p.sources, slice.tensor, slice.start)) {
      return accumulate_slice(Uniform<float>(), p, slice, main_grad);
    }
    if (is_uniform<Float16>(p.sources, slice.tensor, slice.start)) {
      return accumulate_slice(Uniform<Float16>(), p, slice, main_grad);
    }
  }
  return accumulate_slice(Mixed(), p, slice, main_grad);
}

// Folds the slices of each chunk into its partial, in order, and leaves the scratch as it was.
__device__ __forceinline__ void finish(const SliceTable& table, const NormArgs& norm) {
  for (int64_t c = threadIdx.x; c < norm.partials_numel; c += kThreads) {
    double partial = 0.0;
    const int64_t end = c < table.chunks ? table.first_of_chunk[c + 1] : 0;
    for (int64_t s = c < table.chunks ? table.first_of_chunk[c] : 0; s < end; ++s) {
      partial = with_part(partial, __ldcg(norm.of_slices + s), norm.kind);
    }
    norm.partials[c] = partial;
  }
  if (threadIdx.x == 0) {
    write(norm.found_inf, atomicExch(norm.nonfinite, 0u) != 0u ? 1.0 : 0.0);
    atomicExch(norm.blocks_done, 0u);
  }
}

template <int64_t kAddresses>
__global__ void __launch_bounds__(kThreads, kBlocks)
    accumulate_kernel(const Params<AccumulateArgs, kAddresses> __grid_constant__ p) {
  bool nonfinite = false;
  for (int64_t s = blockIdx.x; s < p.table.count; s += gridDim.x) {
    const Slice slice = p.table.slices[s];
    const ThreadNorm norm = accumulate_any(p, slice, p.rows[slice.tensor]);
    if (!p.norm.of_slices) continue;
    nonfinite = nonfinite || norm.nonfinite;
    const double folded = fold_block(norm.folded, p.norm.kind);
    if (threadIdx.x == 0) p.norm.of_slices[s] = folded;
  }
  if (!p.norm.of_slices) return;
  if (__syncthreads_or(nonfinite) && threadIdx.x == 0) atomicOr(p.norm.nonfinite, 1u);
  if (last_block(p.norm.blocks_done)) finish(p.table, p.norm);
}

template <int64_t kAddresses>
cudaError_t launch(const AccumulateArgs& args, const SourceArgs& sources, cudaStream_t stream) {
  return launch_pass<accumulate_kernel<kAddresses>, AccumulateArgs, kAddresses>(args, sources, stream);
}

}  // namespace

cudaError_t launch_accumulate(const AccumulateArgs& args, const SourceArgs& sources, cudaStream_t stream) {
  if (!args.norm.of_slices && (args.table.count == 0 || !args.store)) return cudaSuccess;
  return fits(sources, kFewAddresses) ? launch<kFewAddresses>(args, sources, stream)
                                      : launch<kMostAddresses>(args, sources, stream);
}

}  // namespace gradacc::cuda
