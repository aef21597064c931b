// What a pass reads of gradients: m micro-batches on top of a sum so far, in order, one fused multiply-add each. Here
// is the one place where gradients are summed.
#pragma once

#include <cstdint>

#include "../element.h"
#include "../source.h"
#include "../update_math.h"
#include "simd.h"

namespace gradacc {

constexpr int kRun = 4;  // micro-batches that are summed in one loop

// Some of the micro-batches that count, of one dtype.
struct Taken {
  int64_t micro_batches[kRun];
  int count = 0;
  Dtype dtype = Dtype::kFloat32;
};

// One tensor's accumulated gradient: main_grad (or zero) plus those micro-batches that reached it and weigh something.
struct Gradient {
  const void* main_grad;  // Math[numel], or nullptr: starts from zero
  const Gradients& added;
  int64_t tensor;

  const Source& source(int64_t j) const { return added.sources[j][tensor]; }
  bool counts(int64_t j) const { return added.weights[j] != 0.0 && source(j).data; }
  // The next micro-batches that count, from `j` on: at most `most`, all of one dtype. Moves j behind them.
  Taken take(int64_t& j, int most) const {
    Taken taken;
    for (; j < added.m && taken.count < most; ++j) {
      if (!counts(j)) continue;
      if (taken.count > 0 && source(j).dtype != taken.dtype) break;
      taken.dtype = source(j).dtype;
      taken.micro_batches[taken.count++] = j;
    }
    return taken;
  }
  // Whether none counts from `j` on.
  bool none_left(int64_t j) const {
    for (; j < added.m; ++j) {
      if (counts(j)) return false;
    }
    return true;
  }
  // The main grad from element `start` on.
  template <typename Math>
  const Math* base(int64_t start) const {
    return main_grad ? static_cast<const Math*>(main_grad) + start : nullptr;
  }
};

// kCount micro-batches of one dtype on top of a sum so far: what their elements add up to.
template <int kCount, bool kFromBase, typename ElementType, typename MathType>
struct Run {
  using Element = ElementType;
  using Math = MathType;
  static constexpr int count = kCount;
  static constexpr bool from_base = kFromBase;

  const Math* base;
  const Element* elements[kCount + 1];
  Math weights[kCount + 1];

  // Element 0 of the run is element `start` of the gradient and element 0 of base.
  GRADACC_INLINE Run(const Math* base, const Gradient& gradient, const Taken& taken, int64_t start) : base(base) {
    for (int k = 0; k < kCount; ++k) {
      elements[k] = static_cast<const Element*>(gradient.source(taken.micro_batches[k]).data) + start;
      weights[k] = static_cast<Math>(gradient.added.weights[taken.micro_batches[k]]);
    }
  }

  GRADACC_INLINE Math sum(int64_t i) const {
    Math sum = kFromBase ? base[i] : Math(0);
    for (int k = 0; k < kCount; ++k) {
      sum = fused_multiply_add(weights[k], static_cast<Math>(widen(elements[k][i])), sum);
    }
    return sum;
  }

  // Asks for what the block that lies kAhead elements behind this one reads.
  GRADACC_INLINE void ask_ahead(int64_t block) const {
    for (int k = 0; k < kCount; ++k) read_ahead(elements[k] + block);
    if (kFromBase) read_ahead(base + block);
  }
};

// Calls body(run) with the run of what was taken, 0 to kMost micro-batches of type Element.
template <int kMost, typename Element, typename Math, typename Body>
GRADACC_INLINE void with_run(const Taken& taken, const Math* base, const Gradient& gradient, int64_t start,
                             const Body& body) {
  static_assert(kMost <= kRun, "a case for each count");
#define GRADACC_RUN(COUNT)                                                       \
  case COUNT:                                                                    \
    if constexpr (COUNT <= kMost) {                                              \
      if (base) {                                                                \
        body(Run<COUNT, true, Element, Math>(base, gradient, taken, start));     \
      } else {                                                                   \
        body(Run<COUNT, false, Element, Math>(nullptr, gradient, taken, start)); \
      }                                                                          \
    }                                                                            \
    return;
  switch (taken.count) {
    GRADACC_RUN(0)
    GRADACC_RUN(1)
    GRADACC_RUN(2)
    GRADACC_RUN(3)
    GRADACC_RUN(4)
  }
#undef GRADACC_RUN
}

}  // namespace gradacc
