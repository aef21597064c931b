// Tiles: a chunk is walked in slices that stay in the first-level cache. Here is the one place where a
// norm is taken.
#pragma once

#include <cstdint>

#include "../element.h"
#include "../norm_math.h"
#include "gather.h"
#include "simd.h"

namespace gradacc {

template <typename Math, typename Element>
GRADACC_INLINE void load_elements(Math* tile, const Element* source, int64_t n) {
  for (int64_t i = 0; i < n; ++i) tile[i] = static_cast<Math>(widen(source[i]));
}

// Sum of squares or maximum magnitude of a chunk in fp64, with the check for non-finite elements.
struct ChunkNorm {
  alignas(64) double lanes[kLanes] = {};
  bool nonfinite = false;  // complete once finish() was called

  template <typename Simd, typename Math>
  GRADACC_INLINE void add_tile(const Math* tile, int64_t n, NormKind kind) {
    const int64_t whole = n - n % kLanes;
    int64_t i = 0;
    if constexpr (sizeof(Math) == sizeof(float)) {
      if (kind == NormKind::kTwo) Simd::add_squares(tile, i = whole, lanes);
    } else {
      for (int64_t k = 0; k < n; ++k) nonfinite |= exponent_full(tile[k]);
    }
    for (; i < whole; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) add(lane, tile[i + lane], kind);
    }
    for (; i < n; ++i) add(static_cast<int>(i - whole), tile[i], kind);
  }

  // Elements 0 to n of a run's sums, kind kTwo.
  template <typename Simd, typename Run>
  GRADACC_INLINE void add_run(const Run& from, int64_t n) {
    const Run run = from;
    const int64_t whole = n - n % kBlock;
    Simd::add_squares_of(run, whole, lanes);
    for (int64_t i = whole; i < n; ++i) add(static_cast<int>((i - whole) % kLanes), run.sum(i), NormKind::kTwo);
  }

  // Halves the lanes until one is left: a fixed tree.
  template <typename Math>
  GRADACC_INLINE double finish(NormKind kind) {
    double folded[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) folded[lane] = lanes[lane];
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) {
        folded[lane] = with_part(folded[lane], folded[lane + width], kind);
      }
    }
    if (sizeof(Math) == sizeof(float)) nonfinite = exponent_full(folded[0]);
    return folded[0];
  }

 private:
  template <typename Math>
  GRADACC_INLINE void add(int lane, Math value, NormKind kind) {
    lanes[lane] = with_element(lanes[lane], value, kind);
  }
};

// Walks a chunk tile by tile. A whole tile's length is a constant to its loops, which then need no loop tails.
template <typename Body>
GRADACC_INLINE void for_tiles(int64_t start, int64_t numel, const Body& body) {
  const int64_t end = start + numel;
  for (; end - start >= kTile; start += kTile) body(start, kTile);
  if (start < end) body(start, end - start);
}

}  // namespace gradacc
