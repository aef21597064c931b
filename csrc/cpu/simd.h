// What the compiler does not make of plain loops: fp64 lanes of a norm, and stores that go past the cache. One struct
// per instruction set, taken by the loops as a template argument; the same bits from each.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

#if GRADACC_X86
#include <immintrin.h>
#endif

namespace gradacc {

constexpr int kLanes = 16;  // virtual lanes of a chunk's norm: element e belongs to lane e % kLanes

struct Plain {
  // lanes[e % kLanes] += tile[e]^2 in fp64, in order; returns whether any element is not finite.
  // n: a multiple of kLanes. The square of an fp32 number is exact in fp64, so a fused add rounds the same.
  static bool add_squares(const float* tile, int64_t n, double* lanes) {
    float poison[kLanes] = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const double wide = static_cast<double>(tile[i + lane]);
        lanes[lane] = lanes[lane] + wide * wide;
        poison[lane] += tile[i + lane] * 0.0f;
      }
    }
    bool nonfinite = false;
    for (int lane = 0; lane < kLanes; ++lane) nonfinite |= poison[lane] != poison[lane];
    return nonfinite;
  }
  // Copies into memory that nobody reads soon. target: 64-byte aligned; bytes: a multiple of 64.
  static void stream(void* target, const void* source, int64_t bytes) { std::memcpy(target, source, bytes); }
  // Makes streamed stores visible to other threads.
  static void fence() {}
};

#if GRADACC_X86
struct Avx2 {
  GRADACC_TARGET_AVX2 static bool add_squares(const float* tile, int64_t n, double* lanes) {
    __m256d sums[4];
    for (int q = 0; q < 4; ++q) sums[q] = _mm256_loadu_pd(lanes + 4 * q);
    __m256 poison0 = _mm256_setzero_ps(), poison1 = _mm256_setzero_ps();
    const __m256 zero = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int q = 0; q < 4; ++q) {
        const __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(tile + i + 4 * q));
        sums[q] = _mm256_fmadd_pd(wide, wide, sums[q]);
      }
      poison0 = _mm256_fmadd_ps(_mm256_loadu_ps(tile + i), zero, poison0);
      poison1 = _mm256_fmadd_ps(_mm256_loadu_ps(tile + i + 8), zero, poison1);
    }
    for (int q = 0; q < 4; ++q) _mm256_storeu_pd(lanes + 4 * q, sums[q]);
    const __m256 poison = _mm256_add_ps(poison0, poison1);
    return _mm256_movemask_ps(_mm256_cmp_ps(poison, poison, _CMP_UNORD_Q)) != 0;
  }
  GRADACC_TARGET_AVX2 static void stream(void* target, const void* source, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 32) {
      const auto* from = reinterpret_cast<const __m256i*>(static_cast<const char*>(source) + i);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(target) + i), _mm256_loadu_si256(from));
    }
  }
  static void fence() { _mm_sfence(); }
};

struct Avx512 {
  GRADACC_TARGET_AVX512 static bool add_squares(const float* tile, int64_t n, double* lanes) {
    __m512d sums[2] = {_mm512_loadu_pd(lanes), _mm512_loadu_pd(lanes + 8)};
    __m512 poison = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int half = 0; half < 2; ++half) {
        const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(tile + i + 8 * half));
        sums[half] = _mm512_fmadd_pd(wide, wide, sums[half]);
      }
      poison = _mm512_fmadd_ps(_mm512_loadu_ps(tile + i), _mm512_setzero_ps(), poison);
    }
    _mm512_storeu_pd(lanes, sums[0]);
    _mm512_storeu_pd(lanes + 8, sums[1]);
    return _mm512_cmp_ps_mask(poison, poison, _CMP_UNORD_Q) != 0;
  }
  GRADACC_TARGET_AVX512 static void stream(void* target, const void* source, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
      const __m512i values = _mm512_loadu_si512(static_cast<const char*>(source) + i);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(target) + i), values);
    }
  }
  static void fence() { _mm_sfence(); }
};
#else
using Avx2 = Plain;
using Avx512 = Plain;
#endif

}  // namespace gradacc
