#include "gather.h"

#include "../update_math.h"
#include "simd.h"

namespace gradacc {
namespace {

constexpr int kRun = 4;  // micro-batches of one dtype that are gathered in one loop

// tile[i] = base[i] (or 0), then one fma per source of the run. base may be the tile itself.
template <int kCount, bool kFromBase, typename Element, typename Math>
GRADACC_INLINE void gather_run(Math* tile, const Math* base, const Source* const* run, int64_t start, int64_t n,
                               bool ahead) {
  const Element* elements[kCount];
  Math weights[kCount];
  for (int j = 0; j < kCount; ++j) {
    elements[j] = static_cast<const Element*>(run[j]->data) + start;
    weights[j] = static_cast<Math>(run[j]->weight);
  }
  const auto add = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    GRADACC_INDEPENDENT
    for (int64_t i = first; i < first + count; ++i) {
      Math sum = kFromBase ? base[i] : Math(0);
      for (int j = 0; j < kCount; ++j) {
        sum = fused_multiply_add(weights[j], static_cast<Math>(widen(elements[j][i])), sum);
      }
      tile[i] = sum;
    }
  };
  if (n != kTile || !ahead) return add(0, n);
  for (int64_t block = 0; block < kTile; block += kBlock) {
    for (int j = 0; j < kCount; ++j) read_ahead(elements[j] + block);
    if (kFromBase && base != tile) read_ahead(base + block);
    add(block, kBlock);
  }
}

template <int kCount, typename Math>
GRADACC_INLINE void gather_count(Math* tile, const Math* base, const Source* const* run, int64_t start, int64_t n,
                                 bool ahead) {
  if (base) {
    GRADACC_BY_DTYPE(run[0]->dtype, (gather_run<kCount, true, Element>(tile, base, run, start, n, ahead)))
  } else {
    GRADACC_BY_DTYPE(run[0]->dtype, (gather_run<kCount, false, Element>(tile, base, run, start, n, ahead)))
  }
}

// A run's length changes no bit: the fmas of an element are the same ones in the same order.
template <int kLongest, typename Math>
GRADACC_INLINE void gather_runs(Math* tile, const Gradient& gradient, int64_t start, int64_t n, bool ahead) {
  const Math* base = gradient.main_grad ? static_cast<const Math*>(gradient.main_grad) + start : nullptr;
  for (int64_t j = 0; j < gradient.m;) {
    const Source* run[kLongest];
    int count = 0;
    for (; j < gradient.m && count < kLongest; ++j) {
      const Source& source = gradient.sources[j];
      if (!source.data) continue;
      if (count > 0 && source.dtype != run[0]->dtype) break;
      run[count++] = &source;
    }
    if (count == 0) break;
    if (count == 1) gather_count<1>(tile, base, run, start, n, ahead);
    if constexpr (kLongest == kRun) {
      if (count == 2) gather_count<2>(tile, base, run, start, n, ahead);
      if (count == 3) gather_count<3>(tile, base, run, start, n, ahead);
      if (count == 4) gather_count<4>(tile, base, run, start, n, ahead);
    }
    base = tile;
  }
  if (base == tile) return;
  for (int64_t i = 0; i < n; ++i) tile[i] = base ? base[i] : Math(0);
}

// Whole tiles of the common math dtype: long runs, and a length that is a constant to the loops.
template <typename Math>
GRADACC_INLINE void gather(Math* tile, const Gradient& gradient, int64_t start, int64_t n, bool ahead) {
  if (sizeof(Math) == sizeof(float) && n == kTile) {
    gather_runs<sizeof(Math) == sizeof(float) ? kRun : 1>(tile, gradient, start, kTile, ahead);
  } else {
    gather_runs<1>(tile, gradient, start, n, ahead);
  }
}

template <typename Math>
void gather_plain(Math* tile, const Gradient& gradient, int64_t start, int64_t n, bool ahead) {
  gather(tile, gradient, start, n, ahead);
}
template <typename Math>
GRADACC_TARGET_AVX2 void gather_avx2(Math* tile, const Gradient& gradient, int64_t start, int64_t n, bool ahead) {
  gather(tile, gradient, start, n, ahead);
}
template <typename Math>
GRADACC_TARGET_AVX512 void gather_avx512(Math* tile, const Gradient& gradient, int64_t start, int64_t n, bool ahead) {
  gather(tile, gradient, start, n, ahead);
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
