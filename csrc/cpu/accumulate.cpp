// accumulate_: m micro-batches into the main grads in one pass, with the closing norm where it is asked for.
// Bytes per element: reads m gradients and (unless overwriting) the main grad, writes the main grad (if stored).
// Deterministic: each element and each partial has one writer.
#include "passes.h"
#include "simd.h"
#include "tile.h"

namespace gradacc {
namespace {

struct AccumulateArgs {
  const AccumulateRow& row;
  const Gradients& added;
  const Chunk& chunk;
  Isa isa;
  bool stream;      // whole tiles of the sum are written past the cache
  double* partial;  // nullptr: no norm
  NormKind kind;
  std::atomic<int>* nonfinite;
};

// Adds the squares of a sum that nobody stores, without putting it down; false: it is none of a single run.
template <typename Simd>
GRADACC_INLINE bool add_squares(const Gradient& gradient, int64_t start, int64_t numel, ChunkNorm& norm) {
  int64_t j = 0;
  const Taken taken = gradient.take(j, kRun);
  if (!gradient.none_left(j)) return false;
  const float* base = gradient.base<float>(start);
  const auto body = [&](const auto& run) __attribute__((always_inline)) { norm.add_run<Simd>(run, numel); };
  GRADACC_BY_DTYPE(taken.dtype, (with_run<kRun, Element>(taken, base, gradient, start, body)))
  return true;
}

template <typename Simd, typename Math>
GRADACC_INLINE void accumulate_tiles(const AccumulateArgs& args, ChunkNorm& norm) {
  const Gradient gradient{args.row.main_grad, args.added, args.chunk.tensor};
  if constexpr (sizeof(Math) == sizeof(float)) {
    const bool squares = args.partial && !args.row.stored && args.kind == NormKind::kTwo;
    if (squares && add_squares<Simd>(gradient, args.chunk.start, args.chunk.numel, norm)) return;
  }
  alignas(64) Math tile[kTile];
  Math* stored = static_cast<Math*>(args.row.stored);
  const GatherTile<Math>* gather = gather_tile<Math>(args.isa);
  const bool stream = args.stream && reinterpret_cast<uintptr_t>(stored) % kLine == 0;
  for_tiles(args.chunk.start, args.chunk.numel, [&](int64_t start, int64_t n) __attribute__((always_inline)) {
    const bool past_cache = stream && n == kTile;
    Math* sum = stored && !past_cache ? stored + start : tile;
    gather(sum, gradient, start, n);
    for (int64_t block = 0; past_cache && block < kTile; block += kBlock) {
      stream_block(stored + start + block, tile + block);
    }
    if (args.partial) norm.add_tile<Simd>(sum, n, args.kind);
  });
  if (stream) stream_fence();
}

template <typename Simd, typename Math>
GRADACC_INLINE void accumulate_chunk(const AccumulateArgs& args) {
  ChunkNorm norm;
  accumulate_tiles<Simd, Math>(args, norm);
  if (args.partial) {
    *args.partial = norm.finish<Math>(args.kind);
    if (norm.nonfinite) args.nonfinite->store(1, std::memory_order_relaxed);
  }
}

template <typename Simd>
GRADACC_INLINE void accumulate_any(const AccumulateArgs& args) {
  if (args.row.is_double) {
    accumulate_chunk<Simd, double>(args);
  } else {
    accumulate_chunk<Simd, float>(args);
  }
}

void accumulate_plain(const AccumulateArgs& args) { accumulate_any<Plain>(args); }
GRADACC_TARGET_AVX2 void accumulate_avx2(const AccumulateArgs& args) { accumulate_any<Avx2>(args); }
GRADACC_TARGET_AVX512 void accumulate_avx512(const AccumulateArgs& args) { accumulate_any<Avx512>(args); }
constexpr IsaLoops<void(const AccumulateArgs&)> kAccumulate{accumulate_plain, accumulate_avx2, accumulate_avx512};

}  // namespace

void accumulate_pass(const Chunks& chunks, const std::vector<AccumulateRow>& rows, const Gradients& added,
                     NormCells& cells) {
  const Isa isa = current_isa();
  const auto loop = kAccumulate.of(isa);
  const bool large = chunks.elements() * int64_t{sizeof(float)} > streaming_threshold();
  chunks.for_each([&](int64_t k) {
    const AccumulateRow& row = rows[chunks[k].tensor];
    prefetch_ahead(chunks, k, rows, added);
    // A sum that is read first is in the cache when it is written.
    const bool stream = large && row.stored && !row.main_grad;
    loop({row, added, chunks[k], isa, stream, cells.partial(k), cells.kind(), cells.nonfinite()});
  });
  cells.finish(chunks.size());
}

}  // namespace gradacc
