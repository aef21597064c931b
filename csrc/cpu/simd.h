// What the compiler does not make of plain loops: the fp64 lanes of a norm (one struct per instruction set, taken by
// the loops as a template argument; the same bits from each), reading ahead, and stores that go past the cache.
#pragma once

#include <cstdint>
#include <cstring>

#include "element.h"
#include "isa.h"

#if GRADACC_X86
#include <immintrin.h>
#endif

namespace gradacc {

constexpr int64_t kLine = 64;    // bytes of a cache line
constexpr int64_t kBlock = 32;   // elements between two requests: a line of a 16-bit array, two of an fp32 one
constexpr int64_t kAhead = 256;  // elements from a request to its use

// Asks for elements start to start + n of an array; beyond its end that does no harm.
GRADACC_INLINE void prefetch(const void* array, int64_t start, int64_t n, int64_t element_bytes) {
  if (!array) return;
  const char* from = static_cast<const char*>(array) + start * element_bytes;
  for (int64_t i = 0; i < n * element_bytes; i += kLine) __builtin_prefetch(from + i);
}

// Asks for what the block that lies kAhead elements behind this one needs.
template <typename Element>
GRADACC_INLINE void read_ahead(const Element* block) {
  prefetch(block, kAhead, kBlock, sizeof(Element));
}

// Copies a block into memory that nobody reads soon. target: aligned to a line.
template <typename Element>
GRADACC_INLINE void stream_block(Element* target, const Element* source) {
#if GRADACC_X86
  for (size_t i = 0; i < kBlock * sizeof(Element) / sizeof(__m128i); ++i) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target) + i,
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + i));
  }
#else
  std::memcpy(target, source, kBlock * sizeof(Element));
#endif
}

// Makes streamed stores visible to other threads.
GRADACC_INLINE void stream_fence() {
#if GRADACC_X86
  _mm_sfence();
#endif
}

constexpr int kLanes = 16;  // virtual lanes of a chunk's norm: element e belongs to lane e % kLanes

struct Plain {
  // lanes[e % kLanes] += tile[e]^2 in fp64, in order. n: a multiple of kLanes. The square of an fp32 number is exact in
  // fp64, so a fused add rounds the same; it is finite for every finite one, so a sum tells of non-finite elements.
  static void add_squares(const float* tile, int64_t n, double* lanes) {
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const double wide = static_cast<double>(tile[i + lane]);
        lanes[lane] = lanes[lane] + wide * wide;
      }
    }
  }
};

#if GRADACC_X86
struct Avx2 {
  GRADACC_TARGET_AVX2 static void add_squares(const float* tile, int64_t n, double* lanes) {
    __m256d sums[4];
    for (int q = 0; q < 4; ++q) sums[q] = _mm256_loadu_pd(lanes + 4 * q);
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int q = 0; q < 4; ++q) {
        const __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(tile + i + 4 * q));
        sums[q] = _mm256_fmadd_pd(wide, wide, sums[q]);
      }
    }
    for (int q = 0; q < 4; ++q) _mm256_storeu_pd(lanes + 4 * q, sums[q]);
  }
};

struct Avx512 {
  GRADACC_TARGET_AVX512 static void add_squares(const float* tile, int64_t n, double* lanes) {
    __m512d sums[2] = {_mm512_loadu_pd(lanes), _mm512_loadu_pd(lanes + 8)};
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int half = 0; half < 2; ++half) {
        const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(tile + i + 8 * half));
        sums[half] = _mm512_fmadd_pd(wide, wide, sums[half]);
      }
    }
    _mm512_storeu_pd(lanes, sums[0]);
    _mm512_storeu_pd(lanes + 8, sums[1]);
  }
};
#else
using Avx2 = Plain;
using Avx512 = Plain;
#endif

}  // namespace gradacc
