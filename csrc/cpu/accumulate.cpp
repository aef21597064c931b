// accumulate_: m micro-batches into the main grads in one pass, with the closing norm where it is asked for.
// Bytes per element: reads m gradients and (unless overwriting) the main grad, writes the main grad (if stored).
// Deterministic: each element and each partial has one writer.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "gradients.h"
#include "isa.h"
#include "norm.h"

namespace gradacc {
namespace {

struct AccumulateArgs {
  Gradient gradient;
  bool is_double = false;
  void* stored = nullptr;  // Math[], or nullptr: the sum is not stored
  int64_t start = 0;
  int64_t numel = 0;
  double* partial = nullptr;
  NormKind kind = NormKind::kTwo;
  std::atomic<int>* nonfinite = nullptr;
};

template <typename Math>
GRADACC_INLINE void accumulate_chunk(const AccumulateArgs& args) {
  alignas(64) Math tile[kTile];
  ChunkNorm norm;
  Math* stored = static_cast<Math*>(args.stored);
  for_tiles(args.start, args.numel, [&](int64_t start, int64_t n) __attribute__((always_inline)) {
    gather_tile(tile, args.gradient, start, n);
    if (stored) store_elements(stored + start, tile, n);
    if (args.partial) norm.add_tile(tile, n, args.kind);
  });
  if (args.partial) {
    *args.partial = norm.finish(args.kind);
    if (norm.nonfinite) args.nonfinite->store(1, std::memory_order_relaxed);
  }
}

GRADACC_INLINE void accumulate_any(const AccumulateArgs& args) {
  if (args.is_double) {
    accumulate_chunk<double>(args);
  } else {
    accumulate_chunk<float>(args);
  }
}

void accumulate_plain(const AccumulateArgs& args) { accumulate_any(args); }
GRADACC_TARGET_AVX2 void accumulate_avx2(const AccumulateArgs& args) { accumulate_any(args); }
GRADACC_TARGET_AVX512 void accumulate_avx512(const AccumulateArgs& args) { accumulate_any(args); }
constexpr IsaLoops<AccumulateArgs> kAccumulate{accumulate_plain, accumulate_avx2, accumulate_avx512};

void run_accumulate(const char* op, at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                    const at::Tensor& partials, const at::Tensor& found_inf, bool overwrite, bool store,
                    double norm_type) {
  DensePointers pointers;
  GradientArguments arguments =
      gradient_arguments(op, main_grads, grads, weights, pointers, /*read_main_grads=*/!overwrite, nullptr);
  TORCH_CHECK_VALUE(!store || !main_grads.empty() || arguments.gradients.empty(), op,
                    ": store=True needs main_grads to write to, got none. Pass them, or store=False.");
  const std::vector<Chunk> chunks = chunk_table(arguments.numels);
  NormCells cells(op, partials, found_inf, norm_type, chunks.size());

  std::vector<void*> stored(arguments.gradients.size(), nullptr);
  for (size_t i = 0; store && i < stored.size(); ++i) {
    if (arguments.numels[i] == 0) continue;
    stored[i] = pointers.write(main_grads[i], arguments.strides[i]);
    if (!overwrite) arguments.gradients[i].main_grad = stored[i];
  }
  for_chunks(chunks, [&](int64_t k) {
    const Chunk& chunk = chunks[k];
    AccumulateArgs args;
    args.gradient = arguments.gradients[chunk.tensor];
    args.is_double = arguments.is_double[chunk.tensor];
    args.stored = stored[chunk.tensor];
    args.start = chunk.start;
    args.numel = chunk.numel;
    args.partial = cells.partial(k);
    args.kind = cells.kind();
    args.nonfinite = cells.nonfinite();
    kAccumulate(args);
  });
  pointers.finish();
  cells.finish(chunks.size());
}

void accumulate_cpu(at::TensorList main_grads, at::TensorList grads, const at::Tensor& weights,
                    const at::Tensor& partials, const at::Tensor& found_inf, bool overwrite, bool store,
                    double norm_type) {
  run_accumulate("accumulate_", main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type);
}

// The norm as a stage of its own is an accumulation of no micro-batch that stores nothing.
void norm_cpu(at::TensorList main_grads, const at::Tensor& partials, const at::Tensor& found_inf, double norm_type) {
  TORCH_CHECK_VALUE(partials.numel() > 0, "norm_: partials must have one element per chunk, got none. ",
                    "Allocate n_partials(main_grads) of them.");
  run_accumulate("norm_", main_grads, {}, at::empty({0}, at::kDouble), partials, found_inf, /*overwrite=*/false,
                 /*store=*/false, norm_type);
}

}  // namespace
}  // namespace gradacc

TORCH_LIBRARY_IMPL(gradacc_fused, CPU, library) {
  library.impl("accumulate_", gradacc::accumulate_cpu);
  library.impl("norm_", gradacc::norm_cpu);
}
