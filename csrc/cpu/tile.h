// Tiles: a chunk is walked in slices that stay in the first-level cache. Here are their loads and stores, and the one
// place where a norm is taken.
#pragma once

#include <cstdint>

#include "element.h"
#include "gather.h"
#include "simd.h"

namespace gradacc {

enum class NormKind : int { kTwo, kInf };

template <typename Math, typename Element>
GRADACC_INLINE void load_elements(Math* tile, const Element* source, int64_t n) {
  for (int64_t i = 0; i < n; ++i) tile[i] = static_cast<Math>(widen(source[i]));
}

template <typename Math, typename Element>
GRADACC_INLINE void store_elements(Element* target, const Math* tile, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow(tile[i], target[i]);
}

template <typename Math>
GRADACC_INLINE void load_tile(Math* tile, const void* source, Dtype dtype, int64_t start, int64_t n) {
  GRADACC_BY_DTYPE(dtype, load_elements(tile, static_cast<const Element*>(source) + start, n))
}

template <typename Math>
GRADACC_INLINE void store_tile(void* target, Dtype dtype, int64_t start, const Math* tile, int64_t n){
    GRADACC_BY_DTYPE(dtype, store_elements(static_cast<Element*>(target) + start, tile, n))}

GRADACC_INLINE bool exponent_full(float value) {
  return (to_bits(value) & 0x7f800000u) == 0x7f800000u;
}
GRADACC_INLINE bool exponent_full(double value) {
  return (to_bits(value) & 0x7ff0000000000000u) == 0x7ff0000000000000u;
}

// Sum of squares or maximum magnitude of a chunk in fp64, with the check for non-finite elements.
struct ChunkNorm {
  alignas(64) double lanes[kLanes] = {};
  bool nonfinite = false;

  template <typename Simd, typename Math>
  GRADACC_INLINE void add_tile(const Math* tile, int64_t n, NormKind kind) {
    const int64_t whole = n - n % kLanes;
    if (kind == NormKind::kTwo && sizeof(Math) == sizeof(float)) {
      nonfinite |= Simd::add_squares(reinterpret_cast<const float*>(tile), whole, lanes);
      for (int64_t i = whole; i < n; ++i) {
        nonfinite |= exponent_full(tile[i]);
        add(static_cast<int>(i - whole), tile[i], kind);
      }
      return;
    }
    for (int64_t i = 0; i < n; ++i) nonfinite |= exponent_full(tile[i]);
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) add(lane, tile[i + lane], kind);
    }
    for (int64_t i = whole; i < n; ++i) add(static_cast<int>(i - whole), tile[i], kind);
  }

  // Halves the lanes until one is left: a fixed tree.
  GRADACC_INLINE double finish(NormKind kind) const {
    double folded[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) folded[lane] = lanes[lane];
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) {
        const double other = folded[lane + width];
        folded[lane] = kind == NormKind::kTwo ? folded[lane] + other : larger(folded[lane], other);
      }
    }
    return folded[0];
  }

 private:
  // A NaN on either side stays.
  static GRADACC_INLINE double larger(double a, double b) { return a != a ? a : (b > a || b != b ? b : a); }
  template <typename Math>
  GRADACC_INLINE void add(int lane, Math value, NormKind kind) {
    const double wide = static_cast<double>(value);
    lanes[lane] = kind == NormKind::kTwo ? lanes[lane] + wide * wide : larger(lanes[lane], wide < 0 ? -wide : wide);
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
