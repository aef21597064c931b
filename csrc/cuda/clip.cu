// clip_: partials -> total_norm, clip_coef and the one multiplier that the update applies. One block.
#include "reduce.cuh"

namespace gradacc::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) clip_kernel(const ClipArgs __grid_constant__ p) {
  double folded = 0.0;
  for (int64_t k = threadIdx.x; k < p.partials_numel; k += kThreads) folded = with_part(folded, p.partials[k], p.kind);
  folded = fold_block(folded, p.kind);
  if (threadIdx.x != 0) return;
  double count = p.count;
  if (p.counts) {
    count = 0.0;
    for (int64_t j = 0; j < p.counts_numel; ++j) count += p.counts[j];
  }
  const double scale = p.loss_scale.data ? read(p.loss_scale) : p.scale;
  const Clip clip = clip_of(folded, p.kind, count * scale, p.max_norm);
  write(p.total_norm, clip.norm);
  write(p.clip_coef, clip.coefficient);
  write(p.multiplier, clip.multiplier);
  write(p.weight_sum, count);
}

}  // namespace

cudaError_t launch_clip(const ClipArgs& args, cudaStream_t stream) {
  return launch_persistent<clip_kernel>(args, 1, stream);
}

}  // namespace gradacc::cuda
