// What the compiler does not make of plain loops: sums of bf16 gradients and the fp64 lanes of a norm (one struct per
// instruction set, taken by the loops as a template argument; the same bits from each), reading ahead, and stores that
// go past the cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../element.h"
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

// A run is one of run.h: element i of its sums is run.sum(i).
struct Plain {
  // sums[0] to sums[kBlock]: those of a run's elements from `first` on.
  template <typename Run>
  static GRADACC_INLINE void sum_block(typename Run::Math* sums, const Run& run, int64_t first) {
    GRADACC_INDEPENDENT
    for (int64_t i = 0; i < kBlock; ++i) sums[i] = run.sum(first + i);
  }

  // lanes[e % kLanes] += tile[e]^2 in fp64, in order. n: a multiple of kLanes. The square of an fp32 number is exact in
  // fp64, so a fused add rounds the same; it is finite for every finite one, so a sum tells of non-finite elements.
  static GRADACC_INLINE void add_squares(const float* tile, int64_t n, double* lanes) {
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const double wide = static_cast<double>(tile[i + lane]);
        lanes[lane] = lanes[lane] + wide * wide;
      }
    }
  }

  // The same of a run's sums. n: a multiple of kBlock.
  template <typename Run>
  static GRADACC_INLINE void add_squares_of(const Run& run, int64_t n, double* lanes) {
    alignas(64) float sums[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      run.ask_ahead(i);
      sum_block(sums, run, i);
      add_squares(sums, kBlock, lanes);
    }
  }
};

#if GRADACC_X86
// Sixteen fp32 values as unpacking leaves them: elements 0-3 and 8-11, 4-7 and 12-15.
struct Unpacked {
  __m256 low, high;
};

struct Avx2 {
  template <typename Run>
  static constexpr bool kUnpacks =
      std::is_same_v<typename Run::Element, BFloat16> && std::is_same_v<typename Run::Math, float> && (Run::count > 0);

  // Sums of sixteen elements. Putting bf16 behind zeros makes it fp32.
  template <typename Run>
  static GRADACC_INLINE GRADACC_TARGET_AVX2 Unpacked sum_unpacked(const Run& run, int64_t first) {
    Unpacked sum{_mm256_setzero_ps(), _mm256_setzero_ps()};
    if constexpr (Run::from_base) {
      const __m256 front = _mm256_loadu_ps(run.base + first), back = _mm256_loadu_ps(run.base + first + 8);
      sum = {_mm256_permute2f128_ps(front, back, 0x20), _mm256_permute2f128_ps(front, back, 0x31)};
    }
    for (int k = 0; k < Run::count; ++k) {
      const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run.elements[k] + first));
      const __m256i zero = _mm256_setzero_si256();
      const __m256 weight = _mm256_set1_ps(run.weights[k]);
      sum.low = _mm256_fmadd_ps(weight, _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, packed)), sum.low);
      sum.high = _mm256_fmadd_ps(weight, _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, packed)), sum.high);
    }
    return sum;
  }

  template <typename Run>
  static GRADACC_TARGET_AVX2 void sum_block(typename Run::Math* sums, const Run& run, int64_t first) {
    if constexpr (kUnpacks<Run>) {
      for (int64_t i = 0; i < kBlock; i += 16) {
        const Unpacked sum = sum_unpacked(run, first + i);
        _mm256_storeu_ps(sums + i, _mm256_permute2f128_ps(sum.low, sum.high, 0x20));
        _mm256_storeu_ps(sums + i + 8, _mm256_permute2f128_ps(sum.low, sum.high, 0x31));
      }
    } else {
      Plain::sum_block(sums, run, first);
    }
  }

  static GRADACC_INLINE GRADACC_TARGET_AVX2 __m256d add_square(__m128 value, __m256d sum) {
    const __m256d wide = _mm256_cvtps_pd(value);
    return _mm256_fmadd_pd(wide, wide, sum);
  }

  static GRADACC_TARGET_AVX2 void add_squares(const float* tile, int64_t n, double* lanes) {
    __m256d sums[4];
    for (int q = 0; q < 4; ++q) sums[q] = _mm256_loadu_pd(lanes + 4 * q);
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int q = 0; q < 4; ++q) sums[q] = add_square(_mm_loadu_ps(tile + i + 4 * q), sums[q]);
    }
    for (int q = 0; q < 4; ++q) _mm256_storeu_pd(lanes + 4 * q, sums[q]);
  }

  template <typename Run>
  static GRADACC_TARGET_AVX2 void add_squares_of(const Run& run, int64_t n, double* lanes) {
    __m256d sums[4];
    for (int q = 0; q < 4; ++q) sums[q] = _mm256_loadu_pd(lanes + 4 * q);
    for (int64_t block = 0; block < n; block += kBlock) {
      run.ask_ahead(block);
      if constexpr (kUnpacks<Run>) {
        for (int64_t i = block; i < block + kBlock; i += kLanes) {
          const Unpacked sum = sum_unpacked(run, i);
          sums[0] = add_square(_mm256_castps256_ps128(sum.low), sums[0]);
          sums[1] = add_square(_mm256_castps256_ps128(sum.high), sums[1]);
          sums[2] = add_square(_mm256_extractf128_ps(sum.low, 1), sums[2]);
          sums[3] = add_square(_mm256_extractf128_ps(sum.high, 1), sums[3]);
        }
      } else {
        alignas(64) float values[kBlock];
        Plain::sum_block(values, run, block);
        for (int64_t i = 0; i < kBlock; i += kLanes) {
          for (int q = 0; q < 4; ++q) sums[q] = add_square(_mm_load_ps(values + i + 4 * q), sums[q]);
        }
      }
    }
    for (int q = 0; q < 4; ++q) _mm256_storeu_pd(lanes + 4 * q, sums[q]);
  }
};

struct Avx512 : Avx2 {
  static GRADACC_TARGET_AVX512 void add_squares(const float* tile, int64_t n, double* lanes) {
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
