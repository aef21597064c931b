// gradacc_fused._C_cuda: registers the ops for CUDA tensors, beside those of cpu/ops.cpp, and has the
// optimizer's own way into them. Pieces come from gradacc_fused._C, which has to be imported before.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "../bind_hot_path.h"
#include "../chunk_table.h"
#include "../update_math.h"
#include "hot_path.h"
#include "launch.h"
#include "ops.h"

TORCH_LIBRARY_IMPL(gradacc_fused, CUDA, library) {
  library.impl("accumulate_", gradacc::cuda::accumulate_op);
  library.impl("norm_", gradacc::cuda::norm_op);
  library.impl("clip_", gradacc::cuda::clip_op);
  library.impl("update_", gradacc::cuda::update_op);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("CHUNK") = gradacc::kChunk;
  module.attr("HYPER_COLUMNS") = static_cast<int>(gradacc::kHyperColumns);
  module.attr("MOST_ADDRESSES") = gradacc::cuda::kMostAddresses;
  module.attr("CUDART_VERSION") = CUDART_VERSION;
  gradacc::bind_hot_path<gradacc::cuda::HotPath>(module);
}
