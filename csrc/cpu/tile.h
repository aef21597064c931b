// Tiles: a chunk is walked in slices that stay in the first-level cache. Here is the one place where a gradient is
// gathered (fma of m micro-batches in order) and where its norm is taken; accumulate_, norm_ and update_ call it.
#pragma once

#include <cstdint>

#include "../update_math.h"
#include "element.h"

namespace gradacc {

constexpr int64_t kTile = 256;  // elements; a multiple of kLanes, and kChunk is a multiple of it
constexpr int kLanes = 16;      // virtual lanes of a chunk's norm: element e belongs to lane e % kLanes

// One micro-batch's gradient of one tensor.
struct Piece {
  const void* data = nullptr;  // nullptr: the micro-batch did not reach this parameter
  Dtype dtype = Dtype::kFloat32;
  double weight = 0.0;  // 0: unread
};

// A tensor's accumulated gradient: main_grad (or zero) plus m pieces.
struct Gradient {
  const void* main_grad = nullptr;  // Math[numel], or nullptr: starts from zero
  const Piece* pieces = nullptr;
  int64_t m = 0;
};

enum class NormKind : int { kTwo, kInf };

template <typename Math, typename Element>
GRADACC_INLINE void load_elements(Math* tile, const Element* source, int64_t n) {
  for (int64_t i = 0; i < n; ++i) tile[i] = static_cast<Math>(widen(source[i]));
}

template <typename Math, typename Element>
GRADACC_INLINE void fma_elements(Math* tile, const Element* source, Math weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    tile[i] = fused_multiply_add(weight, static_cast<Math>(widen(source[i])), tile[i]);
  }
}

template <typename Math, typename Element>
GRADACC_INLINE void store_elements(Element* target, const Math* tile, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow(tile[i], target[i]);
}

// Calls OPERATION with `elements` typed by DTYPE and moved to element START.
#define GRADACC_BY_DTYPE(DTYPE, POINTER, START, CONSTNESS, OPERATION)       \
  switch (DTYPE) {                                                          \
    case Dtype::kFloat32: {                                                 \
      auto* elements = static_cast<CONSTNESS float*>(POINTER) + (START);    \
      OPERATION;                                                            \
    } break;                                                                \
    case Dtype::kFloat64: {                                                 \
      auto* elements = static_cast<CONSTNESS double*>(POINTER) + (START);   \
      OPERATION;                                                            \
    } break;                                                                \
    case Dtype::kFloat16: {                                                 \
      auto* elements = static_cast<CONSTNESS Float16*>(POINTER) + (START);  \
      OPERATION;                                                            \
    } break;                                                                \
    case Dtype::kBFloat16: {                                                \
      auto* elements = static_cast<CONSTNESS BFloat16*>(POINTER) + (START); \
      OPERATION;                                                            \
    } break;                                                                \
  }

template <typename Math>
GRADACC_INLINE void load_tile(Math* tile, const void* source, Dtype dtype, int64_t start, int64_t n) {
  GRADACC_BY_DTYPE(dtype, source, start, const, load_elements(tile, elements, n))
}

template <typename Math>
GRADACC_INLINE void store_tile(void* target, Dtype dtype, int64_t start, const Math* tile, int64_t n) {
  GRADACC_BY_DTYPE(dtype, target, start, , store_elements(elements, tile, n))
}

// tile[i] = main_grad[i] (or 0), then one fma per piece with a non-zero weight, in micro-batch order.
template <typename Math>
GRADACC_INLINE void gather_tile(Math* tile, const Gradient& gradient, int64_t start, int64_t n) {
  if (gradient.main_grad) {
    const Math* main_grad = static_cast<const Math*>(gradient.main_grad) + start;
    for (int64_t i = 0; i < n; ++i) tile[i] = main_grad[i];
  } else {
    for (int64_t i = 0; i < n; ++i) tile[i] = 0;
  }
  for (int64_t j = 0; j < gradient.m; ++j) {
    const Piece& piece = gradient.pieces[j];
    if (!piece.data || piece.weight == 0.0) continue;
    const Math weight = static_cast<Math>(piece.weight);
    GRADACC_BY_DTYPE(piece.dtype, piece.data, start, const, fma_elements(tile, elements, weight, n))
  }
}

GRADACC_INLINE bool exponent_full(float value) { return (to_bits(value) & 0x7f800000u) == 0x7f800000u; }
GRADACC_INLINE bool exponent_full(double value) {
  return (to_bits(value) & 0x7ff0000000000000u) == 0x7ff0000000000000u;
}

// Sum of squares or maximum magnitude of a chunk in fp64, with the check for non-finite elements.
struct ChunkNorm {
  alignas(64) double lanes[kLanes] = {};
  int nonfinite = 0;

  template <typename Math>
  GRADACC_INLINE void add_tile(const Math* tile, int64_t n, NormKind kind) {
    int bad = 0;
    for (int64_t i = 0; i < n; ++i) bad |= exponent_full(tile[i]) ? 1 : 0;
    nonfinite |= bad;
    const int64_t whole = n - n % kLanes;
    if (kind == NormKind::kTwo) {
      double sums[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
      for (int64_t i = 0; i < whole; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          const double wide = static_cast<double>(tile[i + lane]);
          sums[lane] = sums[lane] + wide * wide;
        }
      }
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
      for (int64_t i = whole; i < n; ++i) add_square(static_cast<int>(i - whole), tile[i]);
    } else {
      for (int64_t i = 0; i < whole; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) add_magnitude(lane, tile[i + lane]);
      }
      for (int64_t i = whole; i < n; ++i) add_magnitude(static_cast<int>(i - whole), tile[i]);
    }
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
  GRADACC_INLINE void add_square(int lane, Math value) {
    const double wide = static_cast<double>(value);
    lanes[lane] = lanes[lane] + wide * wide;
  }
  template <typename Math>
  GRADACC_INLINE void add_magnitude(int lane, Math value) {
    const double wide = static_cast<double>(value);
    lanes[lane] = larger(lanes[lane], wide < 0 ? -wide : wide);
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
