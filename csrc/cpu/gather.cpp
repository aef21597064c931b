#include "gather.h"

namespace gradacc {
namespace {

// Elements 0 to n of a run into the tile, which may be the run's base.
template <typename Simd, typename OneRun, typename Math>
GRADACC_INLINE void gather_run(Math* tile, const OneRun& from, int64_t n) {
  const OneRun run = from;  // of its own: no store in the loop can change it
  int64_t i = 0;
  for (; n - i >= kBlock; i += kBlock) {
    run.ask_ahead(i);
    Simd::sum_block(tile + i, run, i);
  }
  GRADACC_INDEPENDENT
  for (int64_t k = i; k < n; ++k) tile[k] = run.sum(k);
}

// Run by run. A run's length changes no bit: the fmas of an element are the same ones in the same order.
template <typename Simd, typename Math>
GRADACC_INLINE void gather(Math* tile, const Gradient& gradient, int64_t start, int64_t n) {
  constexpr int kMost = sizeof(Math) == sizeof(float) ? kRun : 1;  // fp64 is too rare for loops of its own
  const Math* base = gradient.base<Math>(start);
  int64_t j = 0;
  do {
    const Taken taken = gradient.take(j, kMost);
    if (taken.count == 0 && base == tile) return;
    const auto body = [&](const auto& run) __attribute__((always_inline)) { gather_run<Simd>(tile, run, n); };
    GRADACC_BY_DTYPE(taken.dtype, (with_run<kMost, Element>(taken, base, gradient, start, body)))
    base = tile;
  } while (j < gradient.added.m);
}

template <typename Math>
void gather_plain(Math* tile, const Gradient& gradient, int64_t start, int64_t n) {
  gather<Plain>(tile, gradient, start, n);
}
template <typename Math>
GRADACC_TARGET_AVX2 void gather_avx2(Math* tile, const Gradient& gradient, int64_t start, int64_t n) {
  gather<Avx2>(tile, gradient, start, n);
}
template <typename Math>
GRADACC_TARGET_AVX512 void gather_avx512(Math* tile, const Gradient& gradient, int64_t start, int64_t n) {
  gather<Avx512>(tile, gradient, start, n);
}

}  // namespace

template <typename Math>
GatherTile<Math>* gather_tile(Isa isa) {
  static constexpr IsaLoops<GatherTile<Math>> kGather{gather_plain<Math>, gather_avx2<Math>, gather_avx512<Math>};
  return kGather.of(isa);
}

template GatherTile<float>* gather_tile<float>(Isa isa);
template GatherTile<double>* gather_tile<double>(Isa isa);

}  // namespace gradacc
